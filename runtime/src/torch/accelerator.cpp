#include "accelerator.h"

#include "allocator.h"
#include "entries.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace plimsoll {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

struct Block {
  uint64_t bytes = 0;
  uint32_t owner = 0;
  void* stream = nullptr;  // in whose order it is used
  OtherStreams others;
};

// What is allocated on the device, by address: what a header says on the host.
class Blocks {
 public:
  void add(const void* start, uint64_t bytes, void* stream) {
    Guard guard(lock_);
    blocks_[start] = {bytes, 0, stream, {}};
  }
  std::optional<Block> take(const void* start) {
    Guard guard(lock_);
    auto found = blocks_.find(start);
    if (found == blocks_.end()) return {};
    Block block = std::move(found->second);
    blocks_.erase(found);
    return block;
  }
  // What is noted of the one there, if there is one.
  template <class Part>
  std::optional<Part> part(const void* start, Part Block::*part) {
    Guard guard(lock_);
    auto found = blocks_.find(start);
    if (found == blocks_.end()) return {};
    return found->second.*part;
  }
  // The one before; nothing where it is not there.
  std::optional<uint32_t> set_owner(const void* start, uint32_t owner) {
    Guard guard(lock_);
    auto found = blocks_.find(start);
    if (found == blocks_.end()) return {};
    return std::exchange(found->second.owner, owner);
  }
  void add_other_stream(const void* start, c10::Stream stream) {
    Guard guard(lock_);
    auto found = blocks_.find(start);
    if (found != blocks_.end()) found->second.others.add(stream);
  }

 private:
  using Guard = std::lock_guard<ShortLock>;
  ShortLock lock_;
  ska::flat_hash_map<const void*, Block> blocks_;
};

Blocks& blocks = *new Blocks();  // outlives every tensor

// The last refusal of this thread.
struct Refusal {
  uint64_t number = 0;
  std::exception_ptr why;
};
thread_local Refusal last_refusal;

caching::CUDAAllocator* native = nullptr;
c10::Device counted = c10::kCPU;

// Whether the bytes, if they are any, came from the caching allocator for that device.
bool is_on_device(const at::DataPtr& bytes) {
  return native && bytes.get_deleter() == counted_deleter && bytes.device().index() == counted.index();
}

// What is noted of the block that holds the bytes, if they are any, and came from there.
template <class Part>
std::optional<Part> part_of_block(const at::DataPtr& bytes, Part Block::*part) {
  if (!is_on_device(bytes) || !bytes.get()) return {};
  return blocks.part(bytes.get(), part);
}

// Called with the lock of the caching allocator held: books, and calls nothing of libtorch's.
void told(const c10::CachingDeviceAllocator::TraceEntry& event) {
  using Event = c10::CachingDeviceAllocator::TraceEntry;
  if (event.device_ != counted.index()) return;
  const auto* start = reinterpret_cast<const void*>(event.addr_);
  if (event.action_ == Event::ALLOC) {
    blocks.add(start, event.size_, event.stream_);
    book(event.size_);
  } else if (event.action_ == Event::FREE_REQUESTED) {
    auto block = blocks.take(start);
    if (!block) return;  // from before the session
    unbook(block->bytes, block->owner);
    if (block->owner) report_freed(block->owner);
  }
}

// Stands before the caching allocator: asks for room first, and passes everything on. What it returns is the caching
// allocator's own, deleter included, so that libtorch treats it like any other.
class AskingAllocator final : public caching::CUDAAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    return asked(bytes, [&] { return native->allocate(bytes); });
  }
  void* raw_alloc(size_t bytes) override {
    return asked(bytes, [&] { return native->raw_alloc(bytes); });
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return asked(bytes, [&] { return native->raw_alloc_with_stream(bytes, stream); });
  }

  at::DeleterFnPtr raw_deleter() const override { return native->raw_deleter(); }
  bool is_simple_data_ptr(const at::DataPtr& bytes) const override { return native->is_simple_data_ptr(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { native->copy_data(to, from, bytes); }
  void raw_delete(void* start) override { native->raw_delete(start); }

  bool initialized() override { return native->initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { native->emptyCache(pool); }
  void recordStream(const at::DataPtr& bytes, c10::cuda::CUDAStream stream) override {
    entries().note_other_stream(bytes, stream, [&] {
      if (is_on_device(bytes)) blocks.add_other_stream(bytes.get(), stream);
      native->recordStream(bytes, stream);
    });
  }
  void recordStream(const at::DataPtr& bytes, c10::Stream stream) override { recordStream(bytes, c10::cuda::CUDAStream(stream)); }
  caching::DeviceStats getDeviceStats(c10::DeviceIndex device) override { return native->getDeviceStats(device); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { native->resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { native->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return native->getMemoryInfo(device); }

  void init(int devices) override { native->init(devices); }
  double getMemoryFraction(c10::DeviceIndex device) override { return native->getMemoryFraction(device); }
  void setMemoryFraction(double share, c10::DeviceIndex device) override { native->setMemoryFraction(share, device); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    return native->getExpandableSegmentSizes(device);
  }
  void enable(bool on) override { native->enable(on); }
  bool isEnabled() const override { return native->isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override { native->cacheInfo(device, largest); }
  void* getBaseAllocation(void* start, size_t* bytes) override { return native->getBaseAllocation(start, bytes); }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) override { return native->snapshot(pool, traces); }
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    native->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override { native->endAllocateToPool(device, pool); }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override { native->releasePool(device, pool); }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override { return native->getPoolUseCount(device, pool); }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::shared_ptr<CUDAAllocator> allocator) override {
    native->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool on) override { native->setUseOnOOM(device, pool, on); }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override { native->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return native->checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* start) override { return native->shareIpcHandle(start); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return native->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return native->isHistoryEnabled(); }
  void recordHistory(bool on, caching::CreateContextFn context, size_t entries_max, caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    native->recordHistory(on, context, entries_max, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override {
    native->recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override { native->pushCompileContext(context); }
  void popCompileContext() override { native->popCompileContext(); }
  void setUserMetadata(const std::string& text) override { native->setUserMetadata(text); }
  std::string getUserMetadata() override { return native->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override { native->enablePeerAccess(device, peer); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peers) override {
    return native->memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return native->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> given) override {
    return native->setCheckpointPoolState(device, std::move(given));
  }
  std::string name() override { return native->name(); }

 private:
  // Room under the line first, unless another device is asked. Where the device itself refuses, for its memory is in pieces or somebody
  // else's, more is evicted than the line asks for, twice as much each time, until nothing is left.
  template <class Allocate>
  auto asked(size_t bytes, Allocate allocate) -> decltype(allocate()) {
    if (C10_UNLIKELY(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice() != counted)) return allocate();
    try {
      BookedAhead ahead(bytes);
      for (uint64_t more = bytes;; more = std::max(more, 2 * more)) {
        try {
          return allocate();
        } catch (const c10::OutOfMemoryError&) {
          if (!evict_more(more)) throw;
        }
      }
    } catch (const c10::OutOfMemoryError&) {
      ++refused_here;
      if (is_under_line()) last_refusal = {1 + refusals.fetch_add(1), std::current_exception()};
      throw;
    }
  }
};

// Start and end of every operator on the device, each a mark in its stream; and where the runtime came between, one more.
class DeviceClock {
 public:
  void switch_to(PlimsollDeviceTiming timing) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!native) return;
    on_ = timing == PLIMSOLL_OPERATOR_TIMES;
    if (timing != PLIMSOLL_NO_TIMES) {
      has_failed_ = false;
      mark([&] {
        whole_.emplace();
        whole_->start.record(current_stream());
        used_ = 0;
        next().is_interrupted = false;
      });
    } else if (whole_) {
      mark([&] { whole_->end.record(current_stream()); });
    }
  }
  void interrupt() {
    if (!on_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    mark([&] {
      Marks& marks = next();
      if (!marks.is_interrupted) marks.interrupted.record(current_stream());
      marks.is_interrupted = true;
    });
  }
  void start() {
    if (!on_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    mark([&] { next().start.record(current_stream()); });
  }
  void end() {
    if (!on_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    mark([&] {
      next().end.record(current_stream());
      ++used_;
      next().is_interrupted = false;
    });
  }
  std::vector<PlimsollDeviceTimes> take(uint64_t& makespan_ns) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<PlimsollDeviceTimes> times;
    makespan_ns = 0;
    auto whole = std::exchange(whole_, std::nullopt);
    if (!whole) return times;
    TORCH_CHECK(!has_failed_, "the device could not be timed");
    whole->end.synchronize();
    for (size_t index = 0; index < used_; ++index) {
      const Marks& marks = marks_[index];
      // Each may be in another stream.
      if (marks.is_interrupted) marks.interrupted.synchronize();
      marks.start.synchronize();
      marks.end.synchronize();
      const auto& idle_until = marks.is_interrupted ? marks.interrupted : marks.start;
      times.push_back({elapsed_ns(index ? marks_[index - 1].end : whole->start, idle_until),
                       marks.is_interrupted ? elapsed_ns(marks.interrupted, marks.start) : 0, elapsed_ns(marks.start, marks.end)});
    }
    makespan_ns = elapsed_ns(whole->start, whole->end);
    return times;
  }

 private:
  struct Marks {
    static c10::Event made() { return {c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT}; }
    c10::Event interrupted = made(), start = made(), end = made();
    bool is_interrupted = false;
  };

  // A device that fails at a mark fails the program at its next step, too, which tells it better: here times are unknown. So they are
  // where a graph is captured, in which a mark is no moment of the device's.
  template <class Body>
  void mark(Body body) {
    try {
      if (is_capturing()) {
        has_failed_ = true;
      } else {
        body();
      }
    } catch (...) {
      has_failed_ = true;
    }
  }

  // Of the operator that is under way, or comes next.
  Marks& next() {
    if (used_ == marks_.size()) marks_.emplace_back();
    return marks_[used_];
  }

  static uint64_t elapsed_ns(const c10::Event& from, const c10::Event& to) {
    return static_cast<uint64_t>(std::max(from.elapsedTime(to), 0.0) * 1e6);
  }

  std::mutex mutex_;
  std::atomic<bool> on_{false};
  bool has_failed_ = false;
  size_t used_ = 0;
  std::optional<Marks> whole_;  // what is timed, or was last
  std::vector<Marks> marks_;  // kept: making them is slower than using them
};

DeviceClock& device_clock() {
  static auto* clock = new DeviceClock();
  return *clock;
}

// What is evicted leaves holes between blocks that stay. Where segments cannot grow, such a hole is of use only to what fits
// into it, and a device with room enough refuses large blocks. Whoever has set it is not overruled, and where the driver cannot
// let them grow they stay as they are.
void let_segments_expand() {
  constexpr size_t kSegmentBytes = size_t{64} << 20;
  std::string settings = c10::CachingAllocator::getAllocatorSettings();
  if (settings.find("expandable_segments") != std::string::npos) return;
  std::string others = settings + (settings.empty() ? "" : ",");
  c10::CachingAllocator::setAllocatorSettings(others + "expandable_segments:True");
  c10::DeviceGuard on_device(counted_device());
  try {
    native->raw_delete(native->raw_alloc(kSegmentBytes));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    TORCH_WARN("plimsoll: segments of the CUDA allocator cannot grow here, so that evictions leave holes: ",
               error.what_without_backtrace());
    c10::CachingAllocator::setAllocatorSettings(others + "expandable_segments:False");
  }
  native->emptyCache({0, 0});
}

// A block of its own must be counted to the byte, and be gone when it is freed.
void check_that_all_is_told() {
  constexpr size_t kBytes = 1000;
  uint64_t before = live_bytes();
  at::DataPtr probe = c10::GetAllocator(c10::kCUDA)->allocate(kBytes);
  uint64_t during = live_bytes();
  probe.clear();
  TORCH_CHECK(during == before + kBytes && live_bytes() == before, "libtorch's CUDA allocator does not tell what it does: ",
              kBytes, " bytes were counted as ", during - before, ", and ", live_bytes() - before, " after they were freed");
}

}  // namespace

void install_accelerator(int32_t index) {
  constexpr int kMinorVersionShift = 48;
  uint64_t found = aoti_torch_abi_version() >> kMinorVersionShift, expected = TORCH_ABI_VERSION >> kMinorVersionShift;
  TORCH_CHECK(found == expected, "expected libtorch ", expected >> 8, ".", expected & 0xff, ", found ", found >> 8, ".",
              found & 0xff);
  void* symbol = dlsym(RTLD_DEFAULT, "_ZN3c104cuda20CUDACachingAllocator9allocatorE");
  TORCH_CHECK(symbol, "libtorch's CUDA half is not loaded, or has no caching allocator");
  auto* in_use = static_cast<std::atomic<caching::CUDAAllocator*>*>(symbol);
  native = in_use->load();
  TORCH_CHECK(native && native->initialized(), "libtorch's CUDA allocator is not in use yet");
  counted = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  let_segments_expand();
  counted_deleter = native->raw_deleter();
  native->attachAllocatorTraceTracker(&told);
  static auto* asking = new AskingAllocator();
  in_use->store(asking);
  c10::SetAllocator(c10::kCUDA, asking, 255);
  c10::DeviceGuard on_device(counted_device());
  check_that_all_is_told();
}

c10::Device counted_device() { return counted; }

bool counts_accelerator() { return native; }

std::optional<uint32_t> set_accelerator_owner(const at::DataPtr& bytes, uint32_t entry) {
  if (!is_on_device(bytes) || !bytes.get()) return {};
  return blocks.set_owner(bytes.get(), entry);
}

std::optional<uint32_t> accelerator_owner_of(const at::DataPtr& bytes) {
  if (is_on_device(bytes) && !bytes.get()) return 0;
  return part_of_block(bytes, &Block::owner);
}

void* accelerator_stream_of(const at::DataPtr& bytes) { return part_of_block(bytes, &Block::stream).value_or(nullptr); }

OtherStreams accelerator_other_streams_of(const at::DataPtr& bytes) {
  return part_of_block(bytes, &Block::others).value_or(OtherStreams());
}

AcceleratorBytes accelerator_bytes() {
  if (!native) return {};
  auto now = native->getDeviceStats(counted.index());
  auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto &allocated = now.allocated_bytes[all], &reserved = now.reserved_bytes[all];
  auto bytes = [](int64_t number) { return static_cast<uint64_t>(std::max<int64_t>(number, 0)); };
  return {bytes(allocated.current), bytes(allocated.peak), bytes(reserved.current),
          bytes(reserved.peak),     bytes(now.num_ooms),   bytes(now.num_alloc_retries)};
}

void reset_accelerator_peak() {
  if (native) native->resetPeakStats(counted.index());
}

void set_accelerator_share(double share) {
  TORCH_CHECK(native, "the session counts no accelerator");
  native->setMemoryFraction(share, counted.index());
}

void empty_accelerator_cache() {
  if (native) native->emptyCache({0, 0});
}

namespace {

// What words are multiplied by, each by its own: odd numbers that have nothing in common.
at::Tensor weights(int64_t count, c10::Device device) {
  auto numbers = at::arange(1, count + 1, at::dtype(at::kLong).device(device));
  for (int64_t factor : {int64_t{0x1e3779b97f4a7c15}, int64_t{0x3f58476d1ce4e5b9}}) {
    numbers.mul_(at::Scalar(factor));
    numbers.bitwise_xor_(at::bitwise_right_shift(numbers, at::Scalar(int64_t{29})));
  }
  return numbers.bitwise_or_(at::Scalar(int64_t{1}));
}

// So many words are looked at at a time.
constexpr int64_t kWords = 1 << 22;

}  // namespace

uint64_t digest_on_accelerator(const c10::StorageImpl& storage) {
  Uncounted uncounted;
  size_t bytes = storage.nbytes();
  auto kind = bytes % sizeof(int64_t) == 0 ? at::kLong : bytes % sizeof(int32_t) == 0 ? at::kInt : at::kByte;
  auto count = static_cast<int64_t>(bytes / at::elementSize(kind));
  auto options = at::TensorOptions().dtype(kind).device(storage.device());
  auto words = at::from_blob(const_cast<void*>(storage.data()), {count}, options);
  // Sums of whole numbers, which are the same in any order.
  auto total = at::zeros({}, options.dtype(at::kLong));
  auto factors = weights(std::min(kWords, count), storage.device());
  for (int64_t first = 0; first < count; first += kWords) {
    int64_t length = std::min(kWords, count - first);
    auto part = words.narrow(0, first, length) * factors.narrow(0, 0, length);
    total.mul_(at::Scalar(int64_t{0x100000001b3})).add_(part.sum());
  }
  return static_cast<uint64_t>(total.item<int64_t>());
}

void throw_refusal_after(uint64_t number) {
  // Who has all kernels tried asks for no bits in particular.
  if (last_refusal.number > number && !at::globalContext().benchmarkCuDNN()) std::rethrow_exception(last_refusal.why);
}

void time_on_accelerator(PlimsollDeviceTiming timing) { device_clock().switch_to(timing); }
void accelerator_interrupted() { device_clock().interrupt(); }
void accelerator_operator_starts() { device_clock().start(); }
void accelerator_operator_ends() { device_clock().end(); }
std::vector<PlimsollDeviceTimes> take_accelerator_times(uint64_t& makespan_ns) { return device_clock().take(makespan_ns); }

}  // namespace plimsoll
