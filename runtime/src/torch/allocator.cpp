#include "allocator.h"

#include "accelerator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

namespace plimsoll {

std::string& refusal();

namespace {

// In front of every allocation.
struct Header {
  uint64_t bytes;  // 0 where not counted
  std::atomic<uint32_t> owner;
  uint32_t lead_bytes : 7;  // between the start of the memory and the header
  uint32_t mark : 25;       // says that it is one
};
static_assert(sizeof(Header) == 16);

// What libtorch's kernels expect of the bytes.
constexpr size_t kAlignment = 64;

std::atomic<uint64_t> live{0}, peak{0}, line{UINT64_MAX};
std::atomic<int64_t> operator_bytes{0}, operator_peak{0};
thread_local int uncounted_depth = 0, ours_depth = 0;
thread_local uint64_t booked_ahead = 0;
void (*report_free)(uint32_t) = nullptr;
int32_t (*make_room)(uint64_t) = nullptr;
int32_t (*give_back)(uint64_t) = nullptr;

template <class Number>
void raise_to(std::atomic<Number>& mark, Number bytes) {
  Number seen = mark.load(std::memory_order_relaxed);
  while (seen < bytes && !mark.compare_exchange_weak(seen, bytes, std::memory_order_relaxed)) {
  }
}

// Raises the peaks to an allocation that left `now` bytes allocated.
void mark_peaks(uint64_t now, uint64_t bytes) {
  raise_to(peak, now);
  if (!ours_depth) {
    auto signed_bytes = static_cast<int64_t>(bytes);
    raise_to(operator_peak, operator_bytes.fetch_add(signed_bytes, std::memory_order_relaxed) + signed_bytes);
  }
}

// Takes room for an allocation, unless it would exceed the line. What is allocated then; nothing where it would.
std::optional<uint64_t> take_room(uint64_t bytes) {
  uint64_t before = live.load(std::memory_order_relaxed);
  do {
    if (bytes && before + bytes > line.load(std::memory_order_relaxed)) return {};
  } while (!live.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  return before + bytes;
}

// `owner` is that of bytes that were there before the operator under way.
void uncount(uint64_t bytes, uint32_t owner = 0) {
  live.fetch_sub(bytes, std::memory_order_relaxed);
  if (!ours_depth && !owner) operator_bytes.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

void evict_or_throw(uint64_t bytes) {
  uint64_t refused_before = refused_here++;
  TORCH_CHECK_WITH(OutOfMemoryError, !ours_depth && make_room, bytes, " bytes more exceed the budget");
  TORCH_CHECK_WITH(OutOfMemoryError, make_room(bytes) == 0, refusal());
  refused_here = refused_before;
}

// The same, after as many evictions as that takes.
uint64_t take_room_or_throw(uint64_t bytes) {
  for (;;) {
    if (auto now = take_room(bytes)) return *now;
    evict_or_throw(bytes);
  }
}

Header* header_of(void* bytes) { return static_cast<Header*>(bytes) - 1; }

// Another one for each place, and never 0, as what stands before a block of glibc's own is.
uint32_t mark_at(uintptr_t header) { return static_cast<uint32_t>(header * 0x9e3779b97f4a7c15 >> 40) | 1 << 24; }

// Memory for a header and so many bytes behind it; null where the system has none. Aligned by hand: glibc keeps small
// blocks at hand for `malloc`, but searches and splits for every `aligned_alloc`.
Header* header_before(size_t bytes, uint64_t counted) {
  static_assert(alignof(std::max_align_t) == sizeof(Header));
  if (bytes > PTRDIFF_MAX - kAlignment) return nullptr;
  void* memory = std::malloc(kAlignment + bytes);
  if (!memory) return nullptr;
  auto start = reinterpret_cast<uintptr_t>(memory);
  uintptr_t header = (start / kAlignment + 1) * kAlignment - sizeof(Header);
  return new (reinterpret_cast<void*>(header)) Header{counted, {0}, static_cast<uint32_t>(header - start), mark_at(header)};
}

// As libtorch's own allocator does: a profiler of this thread's may want to know.
void tell_profiler(void* bytes, int64_t more) {
  if (C10_LIKELY(!c10::memoryProfilingEnabled() || more == 0)) return;
  c10::reportMemoryUsageToProfiler(bytes, more, live.load(std::memory_order_relaxed), 0, c10::Device(c10::kCPU));
}

// Libraries that take memory without a deleter, as oneDNN does, ask for one when they free it: it may be from before this was registered.
void free_bytes(void* bytes) {
  if (!bytes) return;
  Header* header = header_of(bytes);
  if (C10_UNLIKELY(header->mark != mark_at(reinterpret_cast<uintptr_t>(header))))
    return c10::GetDefaultCPUAllocator()->raw_deleter()(bytes);
  uint32_t owner = header->owner.load(std::memory_order_relaxed);
  uncount(header->bytes, owner);
  tell_profiler(bytes, -static_cast<int64_t>(header->bytes));
  std::free(reinterpret_cast<char*>(header) - header->lead_bytes);
  if (owner) report_free(owner);
}

struct CountingAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    // A storage of no bytes gets no memory, but the same deleter, so that it counts as ours.
    if (bytes == 0) return {nullptr, nullptr, &free_bytes, c10::Device(c10::kCPU)};
    uint64_t counted = uncounted_depth ? 0 : bytes;
    mark_peaks(take_room_or_throw(counted), counted);
    Header* header = header_before(bytes, counted);
    if (!header) uncount(counted);
    TORCH_CHECK_WITH(OutOfMemoryError, header, "the system has no ", bytes, " bytes left");
    void* data = header + 1;
    tell_profiler(data, static_cast<int64_t>(counted));
    return {data, data, &free_bytes, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_bytes; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void free_absent(void* owner) { report_free(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(owner))); }

// Address space without memory behind it, so that a read past the dispatcher faults instead of lying. It is a file of no
// bytes, for its name: a debugger, a core dump and /proc/self/maps say what the address that faulted stands for. Null,
// where address space is rationed, faults as well. Every entry has a page of its own: programs tell storages apart by addresses.
void* nowhere(uint32_t entry) {
  constexpr size_t kPage = 4096, kPlaces = size_t{1} << 36, kReach = size_t{1} << 36;
  static char* region = [] {
    int file = memfd_create("plimsoll: evicted tensor, read it through an operator", MFD_CLOEXEC);
    int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* reserved = mmap(nullptr, kPlaces + kReach, PROT_NONE, kind | MAP_NORESERVE, file, 0);
    if (file >= 0) close(file);
    return reserved == MAP_FAILED ? nullptr : static_cast<char*>(reserved);
  }();
  return region ? region + entry * kPage % kPlaces : nullptr;
}

}  // namespace

void on_free(void (*report)(uint32_t)) { report_free = report; }
void report_freed(uint32_t entry) { report_free(entry); }

void install_allocator() {
  static CountingAllocator allocator;
  counted_deleter = &free_bytes;
  c10::SetAllocator(c10::kCPU, &allocator, 255);
}

namespace {

bool is_on_host(const at::DataPtr& bytes) { return bytes.get_deleter() == &free_bytes; }

}  // namespace

std::optional<uint32_t> set_owner(const at::DataPtr& bytes, uint32_t entry) {
  if (!is_on_host(bytes)) return set_accelerator_owner(bytes, entry);
  if (!bytes.get()) return {};
  auto& owner = header_of(bytes.get())->owner;
  uint32_t before = owner.load(std::memory_order_relaxed);
  owner.store(entry, std::memory_order_relaxed);
  return before;
}

bool is_absent(const at::DataPtr& bytes) { return bytes.get_deleter() == &free_absent; }

std::optional<uint32_t> owner_of(const at::DataPtr& bytes) {
  if (is_absent(bytes)) return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(bytes.get_context()));
  if (!is_on_host(bytes)) return accelerator_owner_of(bytes);
  return bytes.get() ? header_of(bytes.get())->owner.load(std::memory_order_relaxed) : 0;
}

at::DataPtr absent_bytes(c10::Device device, uint32_t entry) {
  return {nowhere(entry), reinterpret_cast<void*>(static_cast<uintptr_t>(entry)), &free_absent, device};
}

uint64_t live_bytes() { return live.load(std::memory_order_relaxed); }
uint64_t peak_bytes() { return peak.load(std::memory_order_relaxed); }
void reset_peak() { peak.store(live_bytes(), std::memory_order_relaxed); }
uint64_t operator_peak_bytes() { return static_cast<uint64_t>(operator_peak.load(std::memory_order_relaxed)); }
void reset_operator_peak() {
  operator_bytes.store(0, std::memory_order_relaxed);
  operator_peak.store(0, std::memory_order_relaxed);
}

void set_line(uint64_t bytes) { line.store(bytes, std::memory_order_relaxed); }
void on_pressure(int32_t (*under_line)(uint64_t), int32_t (*on_device)(uint64_t)) {
  make_room = under_line;
  give_back = on_device;
}

BookedAhead::BookedAhead(uint64_t bytes) {
  take_room_or_throw(bytes);
  outer_ = std::exchange(booked_ahead, bytes);
}
BookedAhead::~BookedAhead() { live.fetch_sub(std::exchange(booked_ahead, outer_), std::memory_order_relaxed); }

bool evict_more(uint64_t bytes) {
  if (!is_under_line()) return false;
  int32_t given = give_back(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, given >= 0, refusal());
  return given;
}

bool is_under_line() { return !ours_depth && make_room && line.load(std::memory_order_relaxed) != UINT64_MAX; }

void book(uint64_t bytes) {
  // Modulo 2^64: it may be less than was booked ahead.
  uint64_t more = bytes - std::exchange(booked_ahead, 0);
  mark_peaks(live.fetch_add(more, std::memory_order_relaxed) + more, bytes);
}
void unbook(uint64_t bytes, uint32_t owner) { uncount(bytes, owner); }

Ours::Ours() { ++ours_depth; }
Ours::~Ours() { --ours_depth; }

Uncounted::Uncounted() { ++uncounted_depth; }
Uncounted::~Uncounted() { --uncounted_depth; }

}  // namespace plimsoll
