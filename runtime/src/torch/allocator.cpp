#include "allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace plimsoll {
namespace {

// In front of every allocation; as long as the alignment that libtorch's kernels expect.
struct alignas(64) Header {
  uint64_t bytes;  // 0 where not counted
  std::atomic<uint32_t> owner;
};
static_assert(sizeof(Header) == 64);

std::atomic<uint64_t> live{0}, peak{0}, operator_peak{0};
thread_local int uncounted_depth = 0;
void (*report_free)(uint32_t) = nullptr;

void raise_to(std::atomic<uint64_t>& mark, uint64_t bytes) {
  uint64_t seen = mark.load(std::memory_order_relaxed);
  while (seen < bytes && !mark.compare_exchange_weak(seen, bytes, std::memory_order_relaxed)) {
  }
}

Header* header_of(void* bytes) { return static_cast<Header*>(bytes) - 1; }

void free_bytes(void* bytes) {
  if (!bytes) return;
  Header* header = header_of(bytes);
  live.fetch_sub(header->bytes, std::memory_order_relaxed);
  uint32_t owner = header->owner.load(std::memory_order_relaxed);
  header->~Header();
  std::free(header);
  if (owner) report_free(owner);
}

struct CountingAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    // A storage of no bytes gets no memory, but the same deleter, so that it counts as ours.
    if (bytes == 0) return {nullptr, nullptr, &free_bytes, c10::Device(c10::kCPU)};
    size_t rounded = (sizeof(Header) + bytes + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, rounded);
    TORCH_CHECK_WITH(OutOfMemoryError, memory, "the system has no ", bytes, " bytes left");
    uint64_t counted = uncounted_depth ? 0 : bytes;
    Header* header = new (memory) Header{counted, {0}};
    uint64_t now = live.fetch_add(counted, std::memory_order_relaxed) + counted;
    raise_to(peak, now);
    raise_to(operator_peak, now);
    void* data = header + 1;
    return {data, data, &free_bytes, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_bytes; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void free_absent(void* owner) { report_free(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(owner))); }

// Address space without memory behind it, so that a read past the dispatcher faults instead of lying. Null, where
// address space is rationed, faults as well.
void* nowhere() {
  static void* region = [] {
    void* reserved = mmap(nullptr, size_t{1} << 36, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return reserved == MAP_FAILED ? nullptr : reserved;
  }();
  return region;
}

}  // namespace

void install_allocator(void (*on_free)(uint32_t)) {
  static CountingAllocator allocator;
  report_free = on_free;
  c10::SetAllocator(c10::kCPU, &allocator, 255);
}

bool is_ours(const at::DataPtr& bytes) { return bytes.get_deleter() == &free_bytes; }

void set_owner(const at::DataPtr& bytes, uint32_t entry) {
  if (bytes.get() && is_ours(bytes)) header_of(bytes.get())->owner.store(entry, std::memory_order_relaxed);
}

at::DataPtr absent_bytes(c10::Device device, uint32_t entry) {
  return {nowhere(), reinterpret_cast<void*>(static_cast<uintptr_t>(entry)), &free_absent, device};
}

uint64_t live_bytes() { return live.load(std::memory_order_relaxed); }
uint64_t peak_bytes() { return peak.load(std::memory_order_relaxed); }
void reset_peak() { peak.store(live_bytes(), std::memory_order_relaxed); }
uint64_t operator_peak_bytes() { return operator_peak.load(std::memory_order_relaxed); }
void reset_operator_peak() { operator_peak.store(live_bytes(), std::memory_order_relaxed); }

Uncounted::Uncounted() { ++uncounted_depth; }
Uncounted::~Uncounted() { --uncounted_depth; }

}  // namespace plimsoll
