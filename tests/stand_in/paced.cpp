// Streams that do nothing, and take a GPU's time for it, by the clock on the wall. STAND_IN_MACHINE names the GPU: a file of
// configs/hardware/. STAND_IN_SWEEP_BYTES: before each kernel the host runs so many bytes of code that do nothing, as a driver's
// would: what it had in its caches is gone by then.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace stand_in {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// What copies one way, one after the other.
struct Engine {
  Time done;
};

// When all that was asked for is done is known as soon as it is asked for: nothing waits for what is not yet on its way.
struct Stream {
  Time done;
  bool blocking = true;
  Engine* last = nullptr;  // what did its last work, unless that was a kernel
};

struct Event {
  Time reached;
};

namespace {

// Of what a data sheet promises, a device is taken to reach so much.
constexpr double kReached = 0.8;
// A kernel or a copy takes so long however little it does, by assumption.
constexpr double kLeastNs = 2000;

// The numbers in a file of TOML, by section and key.
std::map<std::string, double> numbers_in(const char* path) {
  std::ifstream file(path ? path : "");
  if (!file) refuse("STAND_IN_MACHINE names no file");
  std::map<std::string, double> numbers;
  std::string line, section;
  while (std::getline(file, line)) {
    size_t equals = line.find('=');
    if (line[0] == '[') {
      section = line.substr(1, line.find(']') - 1) + ".";
    } else if (line[0] != '#' && equals != std::string::npos) {
      numbers[section + line.substr(0, line.find_first_of(" ="))] = std::strtod(line.c_str() + equals + 1, nullptr);
    }
  }
  return numbers;
}

struct Pace {
  double bytes_per_s, flops_per_s[3], offload_bytes_per_s, prefetch_bytes_per_s, latency_ns;

  explicit Pace(const std::map<std::string, double>& machine) {
    auto of = [&](const char* name) {
      auto found = machine.find(name);
      return found == machine.end() ? 0 : found->second;
    };
    bytes_per_s = kReached * of("memory_bytes_per_s");
    flops_per_s[Work::kF32] = kReached * of("flops_per_s.f32");
    flops_per_s[Work::kTf32] = std::max(kReached * of("flops_per_s.tf32"), flops_per_s[Work::kF32]);
    flops_per_s[Work::kHalf] = std::max(kReached * of("flops_per_s.bf16"), flops_per_s[Work::kF32]);
    offload_bytes_per_s = kReached * of("link.offload_bytes_per_s");
    prefetch_bytes_per_s = kReached * of("link.prefetch_bytes_per_s");
    latency_ns = of("link.latency_ns");
    if (bytes_per_s * flops_per_s[Work::kF32] * offload_bytes_per_s * prefetch_bytes_per_s <= 0) refuse("a machine without a pace");
  }
};

struct Device {
  std::mutex mutex;
  Pace pace{numbers_in(std::getenv("STAND_IN_MACHINE"))};
  Stream first;
  std::vector<Stream*> all{&first};
  Engine offloads, prefetches;
};

Device& device() {
  static auto* device = new Device();  // outlives whoever still uses it when the process ends
  return *device;
}

// What the host runs before each kernel.
class Sweep {
 public:
  Sweep() {
    size_t bytes = setting("STAND_IN_SWEEP_BYTES", 0);
    if (bytes <= sizeof kNothing) return;
#ifndef __x86_64__
    refuse("STAND_IN_SWEEP_BYTES is for x86 alone");
#endif
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) refuse("no memory for STAND_IN_SWEEP_BYTES");
    auto* code = static_cast<unsigned char*>(place);
    size_t at = 0;
    for (; at + sizeof kNothing < bytes; at += sizeof kNothing) std::memcpy(code + at, kNothing, sizeof kNothing);
    code[at] = kReturn;
    run_ = reinterpret_cast<void (*)()>(place);
  }
  void run() const {
    if (run_) run_();
  }

 private:
  // The longest instruction that does nothing.
  static constexpr unsigned char kNothing[] = {0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0};
  static constexpr unsigned char kReturn = 0xc3;
  void (*run_)() = nullptr;
};

const Sweep& sweep() {
  static const Sweep sweep;
  return sweep;
}

using Guard = std::lock_guard<std::mutex>;

Stream& stream_at(Stream* stream) { return stream ? *stream : device().first; }

std::chrono::nanoseconds as_time(double ns) { return std::chrono::nanoseconds(static_cast<int64_t>(ns)); }

// Adds what takes so long, and does not begin before so long from now, to a stream, and to an engine that does it, where one
// does.
void take(Stream& stream, double ns, double from_now_ns = 0, Engine* engine = nullptr) {
  Stream& first = device().first;
  Time begin = std::max(Clock::now() + as_time(from_now_ns), stream.done);
  for (Stream* other : device().all)
    if (stream.blocking && other->blocking && (&stream == &first || other == &first)) begin = std::max(begin, other->done);
  if (engine) begin = std::max(begin, engine->done);
  stream.done = begin + as_time(ns);
  stream.last = engine;
  if (engine) engine->done = stream.done;
}

double in_memory_ns(double bytes) { return kLeastNs + 1e9 * bytes / device().pace.bytes_per_s; }

// Whoever sleeps wakes late: the end is waited for awake.
void wait_until(Time time) {
  constexpr auto kAwake = std::chrono::microseconds(200);
  std::this_thread::sleep_until(time - kAwake);
  while (Clock::now() < time) std::this_thread::yield();
}

// So few bytes are copied after all: a loss is a number.
constexpr size_t kSmall = 4096;

}  // namespace

const char* kernels_library() { return "libstand_in_paper.so"; }

std::string device_name() {
  const std::string path = std::getenv("STAND_IN_MACHINE");
  size_t from = path.rfind('/') + 1;
  return "stand-in at the pace of " + path.substr(from, path.rfind('.') - from);
}

// Hopper's.
int compute_capability() { return 9; }

void* fresh(size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, kFlags, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

void discard(void* start, size_t bytes) { munmap(start, std::max<size_t>(bytes, 1)); }

void spoil(void*, size_t) {}

Stream* make_stream(bool blocking) {
  Guard guard(device().mutex);
  return device().all.emplace_back(new Stream{{}, blocking});
}

void destroy(Stream* stream) {
  finish(stream);
  Guard guard(device().mutex);
  auto& all = device().all;
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  delete stream;
}

bool is_done(Stream* stream) {
  Guard guard(device().mutex);
  return stream_at(stream).done <= Clock::now();
}

void finish(Stream* stream) {
  std::unique_lock<std::mutex> guard(device().mutex);
  Time done = stream_at(stream).done;
  guard.unlock();
  wait_until(done);
}

void finish_all() {
  std::unique_lock<std::mutex> guard(device().mutex);
  Time done;
  for (Stream* stream : device().all) done = std::max(done, stream->done);
  guard.unlock();
  wait_until(done);
}

void wait_for(Stream* stream, const Event* event) {
  Guard guard(device().mutex);
  Stream& waiting = stream_at(stream);
  waiting.done = std::max(waiting.done, event->reached);
}

Event* make_event() { return new Event(); }

// A mark behind a copy is reached by what made that, behind all that it was asked for meanwhile: as an H200 did it.
void record(Event* event, Stream* stream) {
  Guard guard(device().mutex);
  Stream& marked = stream_at(stream);
  take(marked, 0, 0, marked.last);
  event->reached = marked.done;
}

bool is_reached(const Event* event) {
  Guard guard(device().mutex);
  return event->reached <= Clock::now();
}

void reach(const Event* event) {
  std::unique_lock<std::mutex> guard(device().mutex);
  Time reached = event->reached;
  guard.unlock();
  wait_until(reached);
}

float between_ms(const Event* from, const Event* to) {
  if (!is_reached(from) || !is_reached(to)) return NAN;
  return std::chrono::duration<float, std::milli>(to->reached - from->reached).count();
}

void copy(void* to, const void* from, size_t bytes, Stream* stream) {
  check_inside(to, bytes);
  check_inside(from, bytes);
  ++counts().copies;
  {
    Guard guard(device().mutex);
    const Pace& pace = device().pace;
    Stream& asked = stream_at(stream);
    auto over_link = [&](double bytes_per_s, Engine& engine) {
      take(asked, kLeastNs + 1e9 * static_cast<double>(bytes) / bytes_per_s, pace.latency_ns, &engine);
    };
    if (is_on_device(to) && is_on_device(from)) {
      take(asked, in_memory_ns(2.0 * static_cast<double>(bytes)));
    } else if (is_on_device(to)) {
      over_link(pace.prefetch_bytes_per_s, device().prefetches);
    } else {
      over_link(pace.offload_bytes_per_s, device().offloads);
    }
  }
  if (!is_reachable(to)) finish(stream);
  if (bytes <= kSmall) std::memmove(to, from, bytes);
}

void fill(void* start, int, size_t bytes, Stream* stream) {
  check_inside(start, bytes);
  Guard guard(device().mutex);
  take(stream_at(stream), in_memory_ns(static_cast<double>(bytes)));
}

void rest(Stream* stream) {
  Guard guard(device().mutex);
  take(stream_at(stream), kLeastNs);
}

void work(const Work& kernel, Stream* stream) {
  sweep().run();
  Guard guard(device().mutex);
  double computing_ns = kLeastNs + 1e9 * kernel.flops / device().pace.flops_per_s[kernel.kind];
  double ns = std::max(in_memory_ns(kernel.bytes), computing_ns);
  take(stream_at(stream), ns);
  ++counts().kernels;
  counts().kernel_ns += static_cast<uint64_t>(ns);
}

}  // namespace stand_in
