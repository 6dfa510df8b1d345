#include "order.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace stand_in {
namespace order {
namespace {

// How much of each stream comes before something ("Time, Clocks, and the Ordering of Events in a Distributed System", Lamport 1978,
// with a number for each stream).
class Clock {
 public:
  uint64_t of(size_t stream) const { return stream < passed_.size() ? passed_[stream] : 0; }
  uint64_t advance(size_t stream) {
    if (passed_.size() <= stream) passed_.resize(stream + 1);
    return ++passed_[stream];
  }
  void merge(const Clock& other) {
    if (passed_.size() < other.passed_.size()) passed_.resize(other.passed_.size());
    for (size_t stream = 0; stream < other.passed_.size(); ++stream) passed_[stream] = std::max(passed_[stream], other.passed_[stream]);
  }

 private:
  std::vector<uint64_t> passed_;
};

struct Line {
  size_t index;
  bool blocking;
  Clock clock;
};

struct Touch {
  size_t stream;
  uint64_t number;
  const char* what;
};

// Bytes that were touched alike, up to an end: by whom last, and who has read that since.
struct Piece {
  uintptr_t end;
  std::optional<Touch> writer;
  std::vector<Touch> readers;
};

struct Order {
  std::mutex mutex;
  std::unordered_map<const Stream*, Line> lines{{nullptr, Line{0, true, {}}}};
  std::unordered_map<const Event*, Clock> marks;
  Clock host;
  std::map<uintptr_t, Piece> pieces;

  // Its clock, for what it is given now.
  Line& now(const Stream* stream) {
    Line& line = lines.at(stream);
    line.clock.merge(host);
    if (!stream) {
      for (const auto& other : lines)
        if (other.second.blocking) line.clock.merge(other.second.clock);
    } else if (line.blocking) {
      line.clock.merge(lines.at(nullptr).clock);
    }
    return line;
  }

  // Has a piece begin there, where one spans it.
  void cut(uintptr_t at) {
    auto after = pieces.upper_bound(at);
    if (after == pieces.begin()) return;
    auto spanning = std::prev(after);
    if (spanning->first == at || spanning->second.end <= at) return;
    Piece rest = spanning->second;
    spanning->second.end = at;
    pieces.emplace(at, std::move(rest));
  }
};

Order& order() {
  static auto* order = new Order();  // outlives whoever still uses it when the process ends
  return *order;
}

using Guard = std::lock_guard<std::mutex>;

void check(const Clock& clock, const Touch& earlier, const Touch& later) {
  if (clock.of(earlier.stream) < earlier.number)
    refuse(std::string("a race: ") + earlier.what + " in stream " + std::to_string(earlier.stream) + ", and " + later.what +
           " in stream " + std::to_string(later.stream) + ", which nothing keeps behind it");
}

}  // namespace

void touches(Stream* stream, const void* start, size_t bytes, bool writes, const char* what) {
  if (bytes == 0) return;
  Guard guard(order().mutex);
  Line& line = order().now(stream);
  Touch touch{line.index, line.clock.advance(line.index), what};
  auto at = reinterpret_cast<uintptr_t>(start), end = at + bytes;
  order().cut(at);
  order().cut(end);
  auto& pieces = order().pieces;
  auto first = pieces.lower_bound(at), behind = pieces.lower_bound(end);
  for (auto piece = first; piece != behind; ++piece) {
    const auto& [piece_end, writer, readers] = piece->second;
    if (writer) check(line.clock, *writer, touch);
    for (const Touch& reader : readers)
      if (writes) check(line.clock, reader, touch);
  }
  if (writes) {
    pieces.erase(first, behind);
    pieces.emplace(at, Piece{end, touch, {}});
    return;
  }
  while (at < end) {
    auto piece = pieces.lower_bound(at);
    if (piece == pieces.end() || piece->first > at) {
      uintptr_t next = piece == pieces.end() ? end : std::min(end, piece->first);
      piece = pieces.emplace(at, Piece{next, {}, {}}).first;
    }
    auto& readers = piece->second.readers;
    auto same = std::find_if(readers.begin(), readers.end(), [&](const Touch& one) { return one.stream == touch.stream; });
    if (same == readers.end()) {
      readers.push_back(touch);
    } else {
      *same = touch;
    }
    at = piece->second.end;
  }
}

void marks(const Event* event, Stream* stream) {
  Guard guard(order().mutex);
  order().marks[event] = order().now(stream).clock;
}

void waits(Stream* stream, const Event* event) {
  Guard guard(order().mutex);
  order().lines.at(stream).clock.merge(order().marks[event]);
}

void is_known(Stream* stream) {
  Guard guard(order().mutex);
  order().host.merge(order().now(stream).clock);
}

void is_known(const Event* event) {
  Guard guard(order().mutex);
  order().host.merge(order().marks[event]);
}

void all_is_known() {
  Guard guard(order().mutex);
  for (const auto& line : order().lines) order().host.merge(line.second.clock);
}

void adds(Stream* stream, bool blocking) {
  Guard guard(order().mutex);
  size_t index = order().lines.size();
  order().lines.insert_or_assign(stream, Line{index, blocking, {}});
}

}  // namespace order
}  // namespace stand_in
