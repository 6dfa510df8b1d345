#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <vector>

namespace stand_in {

struct Stream {
  struct Task {
    uint64_t number;
    std::function<void()> run;    // none for a wait
    Stream* awaited = nullptr;    // the stream that has to come first
    uint64_t awaited_number = 0;  // to here
  };
  std::deque<Task> tasks;
  uint64_t asked = 0, done = 0;
  bool blocking = true;
};

struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;
  std::chrono::steady_clock::time_point reached;
};

namespace {

constexpr uint64_t kBytes = uint64_t{16} << 30;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Pieces of memory by their addresses.
class Ranges {
 public:
  void add(const void* start, size_t bytes) { ranges_[reinterpret_cast<uintptr_t>(start)] = bytes; }
  size_t remove(const void* start) {
    auto found = ranges_.find(reinterpret_cast<uintptr_t>(start));
    if (found == ranges_.end()) refuse("memory is given back that was not taken");
    size_t bytes = found->second;
    ranges_.erase(found);
    return bytes;
  }
  // Bytes from `at` to the end of its range; none outside of all.
  size_t behind(const void* at) const {
    auto address = reinterpret_cast<uintptr_t>(at);
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return 0;
    --after;
    return address < after->first + after->second ? after->first + after->second - address : 0;
  }

 private:
  std::map<uintptr_t, size_t> ranges_;
};

struct Device {
  std::recursive_mutex mutex;
  Stream default_stream;
  std::vector<Stream*> streams{&default_stream};  // in the order in which they were made, for the draws
  Ranges ranges, page_locked;
  uint64_t used_bytes = 0;
  std::mt19937_64 random{setting("STAND_IN_SEED", 0)};
  uint64_t forgets_waits = setting("STAND_IN_FORGETS_WAITS", 0);
  uint64_t late_copies = 0, copies = 0, waits = 0;
};

Device& device() {
  static auto* device = new Device();  // outlives whoever still uses it when the process ends
  return *device;
}

using Guard = std::lock_guard<std::recursive_mutex>;

struct Report {
  ~Report() {
    const char* path = std::getenv("STAND_IN_REPORT");
    std::FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    std::fprintf(file, "{\"copies\": %ju, \"late_copies\": %ju, \"waits\": %ju}\n", uintmax_t{device().copies},
                 uintmax_t{device().late_copies}, uintmax_t{device().waits});
    std::fclose(file);
  }
} report;

Stream& stream_at(Stream* stream) {
  if (!stream) return device().default_stream;
  const auto& streams = device().streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) refuse("a stream is used that is gone");
  return *stream;
}

// Does what the stream was asked for up to `number`, and all that this has to wait for.
void come_to(Stream& stream, uint64_t number) {
  while (stream.done < number) {
    if (stream.tasks.empty()) refuse("a stream waits for what nobody asked for");
    Stream::Task task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    if (task.awaited) come_to(*task.awaited, task.awaited_number);
    if (task.run) task.run();
    stream.done = task.number;
  }
}

void come_to_end(Stream& stream) { come_to(stream, stream.asked); }

// Adds a task; what may not be `late` is done as soon as nothing is before it.
void ask(Stream& stream, std::function<void()> run, bool late) {
  Stream& first = device().default_stream;
  if (&stream == &first) {
    for (Stream* other : device().streams)
      if (other->blocking && other != &first) come_to_end(*other);
  } else if (stream.blocking) {
    come_to_end(first);
  }
  bool idle = stream.tasks.empty();
  stream.tasks.push_back({++stream.asked, std::move(run)});
  if (idle && !late) come_to_end(stream);
}

bool draw_late() { return device().random() % 4 > 0; }

void ask_for_copy(Stream& stream, std::function<void()> run) {
  bool late = draw_late();
  device().copies += 1;
  device().late_copies += late;
  ask(stream, std::move(run), late);
}

// Puts there what is elsewhere now.
std::function<void()> put(void* to, const void* from, size_t bytes) {
  const char* first = static_cast<const char*>(from);
  return [to, kept = std::vector<char>(first, first + bytes)] { std::memcpy(to, kept.data(), kept.size()); };
}

// Behind everybody's back one stream does one thing.
void let_time_pass() {
  auto& streams = device().streams;
  Stream& stream = *streams[device().random() % streams.size()];
  if (!stream.tasks.empty()) come_to(stream, stream.tasks.front().number);
}

// What memory holds that nobody has written to yet.
constexpr int kNothing = 0xA5;

void* fresh(size_t bytes) {
  constexpr size_t kAlignment = 512;
  void* start = nullptr;
  if (posix_memalign(&start, kAlignment, bytes ? bytes : 1)) return nullptr;
  std::memset(start, kNothing, bytes);
  return start;
}

void check_inside(const Ranges& ranges, const void* start, size_t bytes) {
  size_t behind = ranges.behind(start);
  if (behind && behind < bytes) refuse("a copy leaves its memory");
}

// Before there is any memory of the device, and when all of libtorch is there.
void load_kernels() {
  static void* kernels = dlopen("libstand_in_kernels.so", RTLD_NOW | RTLD_LOCAL);
  if (!kernels) refuse(dlerror());
}

}  // namespace

Stream* make_stream(bool blocking) {
  Guard guard(device().mutex);
  auto* stream = new Stream();
  stream->blocking = blocking;
  device().streams.push_back(stream);
  return stream;
}

void destroy(Stream* stream) {
  Guard guard(device().mutex);
  come_to_end(stream_at(stream));
  // Kept, for the events that stand in it.
  auto& streams = device().streams;
  streams.erase(std::find(streams.begin(), streams.end(), stream));
}

bool is_done(Stream* stream) {
  Guard guard(device().mutex);
  let_time_pass();
  Stream& asked = stream_at(stream);
  return asked.done == asked.asked;
}

void finish(Stream* stream) {
  Guard guard(device().mutex);
  come_to_end(stream_at(stream));
}

void finish_all() {
  Guard guard(device().mutex);
  for (Stream* stream : device().streams) come_to_end(*stream);
}

void wait_for(Stream* stream, const Event* event) {
  Guard guard(device().mutex);
  Stream& waiting = stream_at(stream);
  bool forgotten = device().forgets_waits == (&waiting == &device().default_stream ? 1 : 2);
  if (forgotten || !event->stream || event->stream->done >= event->number) return;
  waiting.tasks.push_back({++waiting.asked, {}, event->stream, event->number});
}

Event* make_event() { return new Event(); }  // kept: a mark on its way still writes to it

void record(Event* event, Stream* stream) {
  Guard guard(device().mutex);
  event->stream = &stream_at(stream);
  event->number = event->stream->asked + 1;
  ask(*event->stream, [event] { event->reached = std::chrono::steady_clock::now(); }, false);
}

bool is_reached(const Event* event) {
  Guard guard(device().mutex);
  let_time_pass();
  return !event->stream || event->stream->done >= event->number;
}

void reach(const Event* event) {
  Guard guard(device().mutex);
  if (event->stream) come_to(*event->stream, event->number);
}

float between_ms(const Event* from, const Event* to) {
  Guard guard(device().mutex);
  for (const Event* event : {from, to})
    if (!event->stream || event->stream->done < event->number) return -1;
  return std::chrono::duration<float, std::milli>(to->reached - from->reached).count();
}

void* allocate(size_t bytes) {
  load_kernels();
  Guard guard(device().mutex);
  if (!take_bytes(bytes)) return nullptr;
  void* start = fresh(bytes);
  if (start) device().ranges.add(start, bytes);
  return start;
}

void free(void* start) {
  Guard guard(device().mutex);
  finish_all();
  give_bytes(device().ranges.remove(start));
  std::free(start);
}

size_t free_bytes() {
  Guard guard(device().mutex);
  return kBytes - device().used_bytes;
}

size_t total_bytes() { return kBytes; }

bool take_bytes(size_t bytes) {
  load_kernels();
  Guard guard(device().mutex);
  if (bytes > free_bytes()) return false;
  device().used_bytes += bytes;
  return true;
}

void give_bytes(size_t bytes) {
  Guard guard(device().mutex);
  device().used_bytes -= bytes;
}

void add_range(const void* start, size_t bytes) {
  Guard guard(device().mutex);
  device().ranges.add(start, bytes);
}

void remove_range(const void* start) {
  Guard guard(device().mutex);
  device().ranges.remove(start);
}

bool is_on_device(const void* start) {
  Guard guard(device().mutex);
  return device().ranges.behind(start) > 0;
}

void* allocate_page_locked(size_t bytes) {
  void* start = fresh(bytes);
  if (start) lock_pages(start, bytes);
  return start;
}

void free_page_locked(void* start) {
  unlock_pages(start);
  std::free(start);
}

void lock_pages(const void* start, size_t bytes) {
  Guard guard(device().mutex);
  device().page_locked.add(start, bytes);
}

void unlock_pages(const void* start) {
  Guard guard(device().mutex);
  finish_all();
  device().page_locked.remove(start);
}

bool is_page_locked(const void* start) {
  Guard guard(device().mutex);
  return device().page_locked.behind(start) > 0;
}

void copy(void* to, const void* from, size_t bytes, Stream* stream) {
  Guard guard(device().mutex);
  for (const void* end : {static_cast<const void*>(to), from}) {
    check_inside(device().ranges, end, bytes);
    check_inside(device().page_locked, end, bytes);
  }
  Stream& asked = stream_at(stream);
  auto reachable = [](const void* end) { return is_on_device(end) || is_page_locked(end); };
  if (!reachable(from)) {
    ask_for_copy(asked, put(to, from, bytes));
  } else {
    ask_for_copy(asked, [to, from, bytes] { std::memmove(to, from, bytes); });
  }
  if (!reachable(to)) come_to_end(asked);
}

void fill(void* start, int value, size_t bytes, Stream* stream) {
  Guard guard(device().mutex);
  check_inside(device().ranges, start, bytes);
  ask_for_copy(stream_at(stream), [start, value, bytes] { std::memset(start, value, bytes); });
}

void write(void* to, const void* made, size_t bytes, Stream* stream) {
  Guard guard(device().mutex);
  check_inside(device().ranges, to, bytes);
  auto run = put(to, made, bytes);
  std::memset(to, kNothing, bytes);
  ask(stream_at(stream), std::move(run), draw_late());
}

void count_wait() {
  Guard guard(device().mutex);
  ++device().waits;
}

void refuse(const std::string& what) {
  std::fprintf(stderr, "the stand-in device: %s\n", what.c_str());
  std::abort();
}

}  // namespace stand_in
