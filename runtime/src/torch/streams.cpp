#include "streams.h"

#include "accelerator.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace plimsoll {
namespace {

// Whether a graph is being captured in that stream. CUDA does not say so of the default one while any is.
std::optional<bool> captures(void* stream) {
  using IsCapturing = int (*)(void* stream, int* status);
  static auto* ask = reinterpret_cast<IsCapturing>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
  int status = 0;
  if (ask && ask(stream, &status) != 0) return {};
  return status != 0;
}

// Whether it may be marked, and wait for others: a graph that is being captured may wait for nothing outside, and what it is made of is
// not queued.
bool is_queued(void* stream) { return captures(stream) == false; }

class Streams {
 public:
  bool are_several() const { return count_.load(std::memory_order_acquire) > 1; }

  // Whether it is among them afterwards.
  bool add(c10::Stream stream, void* handle) {
    Guard guard(mutex_);
    for (const Known& one : known_)
      if (one.handle == handle) return true;
    if (!is_queued(handle)) return false;
    for (Known& one : known_)
      if (is_queued(one.handle)) one.hold_up(stream);
    known_.push_back({stream, handle, c10::Event(c10::kCUDA)});
    count_.store(known_.size(), std::memory_order_release);
    return true;
  }

  void join(c10::Stream here) {
    void* handle = here.native_handle();
    Guard guard(mutex_);
    c10::SmallVector<Known*, 8> others;
    for (Known& one : known_)
      if (one.handle != handle && is_queued(one.handle)) others.push_back(&one);
    for (Known* one : others) one->hold_up(here);
    c10::Event together(c10::kCUDA);
    together.record(here);
    for (const Known* one : others) together.block(one->stream);
  }

  // Whether a graph is being captured in that stream, or in any of them.
  bool capture_or(void* here) {
    if (captures(here).value_or(false)) return true;
    Guard guard(mutex_);
    return std::any_of(known_.begin(), known_.end(), [here](const Known& one) {
      return one.handle != here && captures(one.handle).value_or(false);
    });
  }

  c10::Stream of(void* handle) {
    Guard guard(mutex_);
    for (const Known& one : known_)
      if (one.handle == handle) return one.stream;
    return unnamed(handle);
  }

  // Libtorch's name for one that it did not make itself, and as good a name for any.
  static c10::Stream unnamed(void* handle) {
    return c10::Stream(c10::Stream::UNSAFE, counted_device(), reinterpret_cast<c10::StreamId>(handle));
  }

 private:
  using Guard = std::lock_guard<std::mutex>;

  struct Known {
    c10::Stream stream;
    void* handle;
    c10::Event given;  // behind what it was given when others last waited for it

    void hold_up(c10::Stream other) {
      given.record(stream);
      given.block(other);
    }
  };

  std::mutex mutex_;
  std::vector<Known> known_;
  std::atomic<size_t> count_{0};
};

Streams& streams() {
  static auto* streams = new Streams();  // outlives every tensor
  return *streams;
}

// That of the last operator of this thread.
struct Noted {
  c10::StreamId id = -1;
  void* handle = nullptr;
};
thread_local Noted noted;

}  // namespace

c10::Stream current_stream() {
  // What libtorch's guards ask, which take several times as long to get there.
  using Current = c10::cuda::CUDAStream (*)(c10::DeviceIndex);
  static const auto current = reinterpret_cast<Current>(dlsym(RTLD_DEFAULT, "_ZN3c104cuda20getCurrentCUDAStreamEa"));
  TORCH_CHECK(current, "libtorch's CUDA half does not tell the current stream");
  return current(counted_device().index());
}

void note_stream() {
  if (!counts_accelerator()) return;
  c10::Stream stream = current_stream();
  if (C10_LIKELY(stream.id() == noted.id)) return;
  void* handle = stream.native_handle();
  if (streams().add(stream, handle)) noted = {stream.id(), handle};
}

void note_stream_of_bytes(void* stream) {
  if (counts_accelerator()) streams().add(Streams::unnamed(stream), stream);
}

void* noted_stream() { return noted.handle; }

bool is_capturing() noexcept {
  try {
    return counts_accelerator() && streams().capture_or(current_stream().native_handle());
  } catch (...) {
    return false;  // a device that has failed says so itself
  }
}

void join_streams() {
  TORCH_CHECK(!is_capturing(), "nothing may leave or come back while a CUDA graph is captured");
  note_stream();
  if (streams().are_several()) streams().join(current_stream());
}

void use_in_stream(const at::DataPtr& bytes, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(bytes, stream);
}

c10::Stream stream_of_cuda(void* stream) { return streams().of(stream); }

OnCountedDevice::OnCountedDevice() {
  if (counts_accelerator()) guard_.reset_device(counted_device());
}

InStream::InStream(void* stream) {
  note_stream();
  if (streams().are_several()) stream_.emplace(streams().of(stream));
}

}  // namespace plimsoll
