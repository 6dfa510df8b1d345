// Streams that do what they were asked to as late as their order allows, or at once, by a draw. Whoever relies on more than
// that order reads bytes that are not there yet, or no more.
#include "device.h"
#include "order.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
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

struct Streams {
  std::recursive_mutex mutex;
  Stream first;
  std::vector<Stream*> all{&first};  // in the order in which they were made, for the draws
  std::mt19937_64 random{setting("STAND_IN_SEED", 0)};
  uint64_t forgets_waits = setting("STAND_IN_FORGETS_WAITS", 0);
};

Streams& streams() {
  static auto* streams = new Streams();  // outlives whoever still uses it when the process ends
  return *streams;
}

using Guard = std::lock_guard<std::recursive_mutex>;

Stream& stream_at(Stream* stream) {
  if (!stream) return streams().first;
  const auto& all = streams().all;
  if (std::find(all.begin(), all.end(), stream) == all.end()) refuse("a stream is used that is gone");
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
  Stream& first = streams().first;
  if (&stream == &first) {
    for (Stream* other : streams().all)
      if (other->blocking && other != &first) come_to_end(*other);
  } else if (stream.blocking) {
    come_to_end(first);
  }
  bool idle = stream.tasks.empty();
  stream.tasks.push_back({++stream.asked, std::move(run)});
  if (idle && !late) come_to_end(stream);
}

bool draw_late() { return streams().random() % 4 > 0; }

void ask_for_copy(Stream& stream, std::function<void()> run) {
  bool late = draw_late();
  counts().copies += 1;
  counts().late_copies += late;
  ask(stream, std::move(run), late);
}

// Puts there what is elsewhere now.
std::function<void()> put(void* to, const void* from, size_t bytes) {
  const char* first = static_cast<const char*>(from);
  return [to, kept = std::vector<char>(first, first + bytes)] { std::memcpy(to, kept.data(), kept.size()); };
}

// Behind everybody's back one stream does one thing.
void let_time_pass() {
  auto& all = streams().all;
  Stream& stream = *all[streams().random() % all.size()];
  if (!stream.tasks.empty()) come_to(stream, stream.tasks.front().number);
}

// What memory holds that nobody has written to yet.
constexpr int kNothing = 0xA5;

}  // namespace

const char* kernels_library() { return "libstand_in_processor.so"; }

std::string device_name() { return "stand-in"; }

// An H100's: it has every kernel of attention.
int compute_capability() { return 9; }

void* fresh(size_t bytes) {
  constexpr size_t kAlignment = 512;
  void* start = nullptr;
  if (posix_memalign(&start, kAlignment, bytes ? bytes : 1)) return nullptr;
  spoil(start, bytes);
  return start;
}

void discard(void* start, size_t) { std::free(start); }

void spoil(void* start, size_t bytes) { std::memset(start, kNothing, bytes); }

Stream* make_stream(bool blocking) {
  Guard guard(streams().mutex);
  auto* stream = new Stream();
  stream->blocking = blocking;
  streams().all.push_back(stream);
  order::adds(stream, blocking);
  return stream;
}

void destroy(Stream* stream) {
  finish(stream);
  Guard guard(streams().mutex);
  // Kept, for the events that stand in it.
  auto& all = streams().all;
  all.erase(std::find(all.begin(), all.end(), stream));
}

bool is_done(Stream* stream) {
  Guard guard(streams().mutex);
  let_time_pass();
  Stream& asked = stream_at(stream);
  if (asked.done != asked.asked) return false;
  order::is_known(stream);
  return true;
}

void catch_up(Stream* stream) {
  Guard guard(streams().mutex);
  come_to_end(stream_at(stream));
}

void finish(Stream* stream) {
  Guard guard(streams().mutex);
  catch_up(stream);
  order::is_known(stream);
}

void finish_all() {
  Guard guard(streams().mutex);
  for (Stream* stream : streams().all) come_to_end(*stream);
  order::all_is_known();
}

void wait_for(Stream* stream, const Event* event) {
  Guard guard(streams().mutex);
  Stream& waiting = stream_at(stream);
  bool forgotten = streams().forgets_waits == (&waiting == &streams().first ? 1 : 2);
  if (forgotten || !event->stream) return;
  order::waits(stream, event);
  if (event->stream->done >= event->number) return;
  waiting.tasks.push_back({++waiting.asked, {}, event->stream, event->number});
}

Event* make_event() { return new Event(); }  // kept: a mark on its way still writes to it

void record(Event* event, Stream* stream) {
  Guard guard(streams().mutex);
  event->stream = &stream_at(stream);
  event->number = event->stream->asked + 1;
  order::marks(event, stream);
  ask(*event->stream, [event] { event->reached = std::chrono::steady_clock::now(); }, false);
}

bool is_reached(const Event* event) {
  Guard guard(streams().mutex);
  let_time_pass();
  if (event->stream && event->stream->done < event->number) return false;
  order::is_known(event);
  return true;
}

void reach(const Event* event) {
  Guard guard(streams().mutex);
  if (event->stream) come_to(*event->stream, event->number);
  order::is_known(event);
}

float between_ms(const Event* from, const Event* to) {
  Guard guard(streams().mutex);
  for (const Event* event : {from, to})
    if (!event->stream || event->stream->done < event->number) return NAN;
  return std::chrono::duration<float, std::milli>(to->reached - from->reached).count();
}

void copy(void* to, const void* from, size_t bytes, Stream* stream) {
  Guard guard(streams().mutex);
  for (const void* end : {static_cast<const void*>(to), from}) check_inside(end, bytes);
  Stream& asked = stream_at(stream);
  if (is_reachable(from)) {
    order::touches(stream, from, bytes, false, "a copy from there");
    ask_for_copy(asked, [to, from, bytes] { std::memmove(to, from, bytes); });
  } else {
    ask_for_copy(asked, put(to, from, bytes));
  }
  if (is_reachable(to)) {
    order::touches(stream, to, bytes, true, "a copy to there");
  } else {
    finish(stream);
  }
}

void fill(void* start, int value, size_t bytes, Stream* stream) {
  Guard guard(streams().mutex);
  check_inside(start, bytes);
  order::touches(stream, start, bytes, true, "bytes set");
  ask_for_copy(stream_at(stream), [start, value, bytes] { std::memset(start, value, bytes); });
}

void rest(Stream* stream) {
  Guard guard(streams().mutex);
  ask(stream_at(stream), [] {}, draw_late());
}

void write(void* to, const void* made, size_t bytes, Stream* stream) {
  Guard guard(streams().mutex);
  check_inside(to, bytes);
  auto run = put(to, made, bytes);
  spoil(to, bytes);
  ask(stream_at(stream), std::move(run), draw_late());
}

}  // namespace stand_in
