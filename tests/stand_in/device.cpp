// The memory of the device, and what was asked of it.
#include "device.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

namespace stand_in {
namespace {

// Pieces of memory by their addresses.
class Ranges {
 public:
  void add(const void* start, size_t bytes) { ranges_[reinterpret_cast<uintptr_t>(start)] = {bytes, current_device()}; }
  size_t remove(const void* start) {
    auto found = ranges_.find(reinterpret_cast<uintptr_t>(start));
    if (found == ranges_.end()) refuse("memory is given back that was not taken");
    size_t bytes = found->second.bytes;
    ranges_.erase(found);
    return bytes;
  }
  // Bytes from `at` to the end of its range; none outside of all.
  size_t behind(const void* at) const {
    auto address = reinterpret_cast<uintptr_t>(at);
    auto found = before(address);
    return found == ranges_.end() ? 0 : found->first + found->second.bytes - address;
  }
  // The device that a range belongs to; none outside of all.
  int device_of(const void* at) const {
    auto found = before(reinterpret_cast<uintptr_t>(at));
    return found == ranges_.end() ? -1 : found->second.device;
  }

 private:
  struct Range {
    size_t bytes;
    int device;
  };
  using Found = std::map<uintptr_t, Range>::const_iterator;
  Found before(uintptr_t address) const {
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return ranges_.end();
    --after;
    return address < after->first + after->second.bytes ? after : ranges_.end();
  }
  std::map<uintptr_t, Range> ranges_;
};

thread_local int current = 0;

struct Memory {
  std::recursive_mutex mutex;
  Ranges ranges, page_locked;
  uint64_t total_bytes = setting("STAND_IN_BYTES", uint64_t{16} << 30), used_bytes = 0;
};

// Streams of which graphs are captured.
struct Captures {
  std::mutex mutex;
  std::set<const Stream*> streams;
};

Captures& captured() {
  static auto* captured = new Captures();
  return *captured;
}

Memory& memory() {
  static auto* memory = new Memory();  // outlives whoever still uses it when the process ends
  return *memory;
}

using Guard = std::lock_guard<std::recursive_mutex>;

struct Report {
  ~Report() {
    const char* path = std::getenv("STAND_IN_REPORT");
    std::FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    auto put = [&](const char* before, const char* name, uint64_t count) {
      std::fprintf(file, "%s\"%s\": %ju", before, name, uintmax_t{count});
    };
    put("{", "copies", counts().copies);
    put(", ", "late_copies", counts().late_copies);
    put(", ", "waits", counts().waits);
    put(", ", "kernels", counts().kernels);
    put(", ", "kernel_ns", counts().kernel_ns);
    std::fprintf(file, "}\n");
    std::fclose(file);
  }
} report;

// Before there is any memory of the device, and when all of libtorch is there.
void load_kernels() {
  static void* kernels = dlopen(kernels_library(), RTLD_NOW | RTLD_LOCAL);
  if (!kernels) refuse(dlerror());
}

}  // namespace

int devices() {
  static int count = static_cast<int>(setting("STAND_IN_DEVICES", 1));
  return count;
}

int current_device() { return current; }

bool begin_capture(const Stream* stream) {
  std::lock_guard<std::mutex> guard(captured().mutex);
  return captured().streams.insert(stream).second;
}
bool end_capture(const Stream* stream) {
  std::lock_guard<std::mutex> guard(captured().mutex);
  return captured().streams.erase(stream) > 0;
}
bool captures(const Stream* stream) {
  std::lock_guard<std::mutex> guard(captured().mutex);
  return captured().streams.count(stream) > 0;
}
bool captures_any() {
  std::lock_guard<std::mutex> guard(captured().mutex);
  return !captured().streams.empty();
}

bool set_current_device(int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return false;
  current = ordinal;
  return true;
}

int device_of(const void* start) {
  Guard guard(memory().mutex);
  return memory().ranges.device_of(start);
}

void* allocate(size_t bytes) {
  load_kernels();
  Guard guard(memory().mutex);
  if (!take_bytes(bytes)) return nullptr;
  void* start = fresh(bytes);
  if (start) memory().ranges.add(start, bytes);
  return start;
}

void free(void* start) {
  finish_all();
  Guard guard(memory().mutex);
  size_t bytes = memory().ranges.remove(start);
  give_bytes(bytes);
  discard(start, bytes);
}

size_t free_bytes() {
  Guard guard(memory().mutex);
  return memory().total_bytes - memory().used_bytes;
}

size_t total_bytes() { return memory().total_bytes; }

bool take_bytes(size_t bytes) {
  load_kernels();
  Guard guard(memory().mutex);
  if (bytes > free_bytes()) return false;
  memory().used_bytes += bytes;
  return true;
}

void give_bytes(size_t bytes) {
  Guard guard(memory().mutex);
  memory().used_bytes -= bytes;
}

void add_range(const void* start, size_t bytes) {
  Guard guard(memory().mutex);
  memory().ranges.add(start, bytes);
}

void remove_range(const void* start) {
  Guard guard(memory().mutex);
  memory().ranges.remove(start);
}

bool is_on_device(const void* start) {
  Guard guard(memory().mutex);
  return memory().ranges.behind(start) > 0;
}

void* allocate_page_locked(size_t bytes) {
  void* start = fresh(bytes);
  if (start) lock_pages(start, bytes);
  return start;
}

void free_page_locked(void* start) {
  finish_all();
  Guard guard(memory().mutex);
  discard(start, memory().page_locked.remove(start));
}

void lock_pages(const void* start, size_t bytes) {
  Guard guard(memory().mutex);
  memory().page_locked.add(start, bytes);
}

void unlock_pages(const void* start) {
  finish_all();
  Guard guard(memory().mutex);
  memory().page_locked.remove(start);
}

bool is_page_locked(const void* start) {
  Guard guard(memory().mutex);
  return memory().page_locked.behind(start) > 0;
}

bool is_reachable(const void* start) { return is_on_device(start) || is_page_locked(start); }

void check_inside(const void* start, size_t bytes) {
  Guard guard(memory().mutex);
  for (const Ranges* ranges : {&memory().ranges, &memory().page_locked}) {
    size_t behind = ranges->behind(start);
    if (behind && behind < bytes) refuse("a copy leaves its memory");
  }
}

Counts& counts() {
  static Counts counts;
  return counts;
}

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

void refuse(const std::string& what) {
  std::fprintf(stderr, "the stand-in device: %s\n", what.c_str());
  std::abort();
}

}  // namespace stand_in
