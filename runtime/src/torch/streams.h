// The streams of the counted device that operators have been queued in. Most programs use one alone, and nothing here costs them more
// than a look at which one that is.
//
// A program orders what it does in them, and the runtime moves bytes without knowing how: from whichever stream is current. So all of
// them come together before bytes leave or arrive, and after it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace plimsoll {

// Streams that may use bytes that were allocated for another: few, each once.
class OtherStreams {
 public:
  auto begin() const { return streams_.begin(); }
  auto end() const { return streams_.end(); }
  void add(c10::Stream stream) {
    if (std::find(begin(), end(), stream) == end()) streams_.push_back(stream);
  }

 private:
  std::vector<c10::Stream> streams_;
};

// An operator is about to be queued by this thread, in its current stream. One that is new comes after all that the others have been
// given so far, for they may have waited for what it never heard of.
void note_stream();
// The same of a stream that bytes were allocated for: operators may have been queued in it that nobody listened to.
void note_stream_of_bytes(void* stream);
// The stream of the last operator of this thread, as CUDA has it; null is the default one.
void* noted_stream();
// Whether a CUDA graph is being captured, in the current stream or in any of them: copies would become a part of it, and waiting for
// them would break it.
bool is_capturing() noexcept;
// What any of them, and the current one, is given from now on comes after all that each of them has been given so far. Throws where a
// graph is being captured.
void join_streams();
// Bytes that were allocated for another stream may be used in this one, too, for as long as they live.
void use_in_stream(const at::DataPtr& bytes, c10::Stream stream);
// Libtorch's stream for one of CUDA's.
c10::Stream stream_of_cuda(void* stream);
// The current stream of this thread.
c10::Stream current_stream();

// Makes the counted device the current one for as long as this lives: bystanders, and threads of another device, may be on any.
struct OnCountedDevice {
  OnCountedDevice();

 private:
  c10::OptionalDeviceGuard guard_;
};

// Makes a stream of the counted device, where there are several, and the device itself, the current one for as long as this lives.
class InStream {
 public:
  explicit InStream(void* stream);

 private:
  OnCountedDevice device_;
  std::optional<c10::StreamGuard> stream_;
};

}  // namespace plimsoll
