// The CUDA device that a session counts: its caching allocator asked before it allocates, and told of what it did; the
// times of operators on the device itself.
//
// It needs neither CUDA's headers nor its libraries to be built: libtorch's CUDA half is found at run time.
#pragma once

#include "shim.h"
#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

namespace plimsoll {

// What the caching allocator itself counts, in bytes.
struct AcceleratorBytes {
  uint64_t allocated_now, allocated_peak;  // blocks, each a little larger than what was asked for
  uint64_t reserved_now, reserved_peak;    // what it has of the device
  uint64_t failed, retried;                // allocations that the device refused for good, and at first
};

// Puts itself before the caching allocator of device `index`. Libtorch's CUDA half must be loaded and the device in use.
// Throws where it is another libtorch than the one that this was compiled for, or its allocator does not tell all.
void install_accelerator(int32_t index);

// The device whose bytes are counted, and whether it is an accelerator.
c10::Device counted_device();
bool counts_accelerator();

// As set_owner() and owner_of(), for what came from the caching allocator since it was installed.
std::optional<uint32_t> set_accelerator_owner(const at::DataPtr& bytes, uint32_t entry);
std::optional<uint32_t> accelerator_owner_of(const at::DataPtr& bytes);
// The stream that they were allocated for, and whose order says when they are used again; null is the default one.
void* accelerator_stream_of(const at::DataPtr& bytes);
// Others that may use them, as the program says.
OtherStreams accelerator_other_streams_of(const at::DataPtr& bytes);

AcceleratorBytes accelerator_bytes();
void reset_accelerator_peak();
// Share of the device's memory that the caching allocator may take.
void set_accelerator_share(double share);
// Gives the memory that the caching allocator keeps for later back to the device.
void empty_accelerator_cache();

// Allocations under a line that were refused for good: so many, on any thread.
inline std::atomic<uint64_t> refusals{0};
// Throws the last one that this thread met if it came after so many. An operator that goes on all the same, as cuDNN's
// convolutions do without a workspace, has taken another kernel, whose bits are others.
void throw_refusal_after(uint64_t number);

// A digest of the bytes of a storage, which the device takes: none of them leaves it.
uint64_t digest_on_accelerator(const c10::StorageImpl& storage);

// What is timed by the device's own clock, in its own order: operators are where they are asked for times.
void time_on_accelerator(PlimsollDeviceTiming timing);
void accelerator_interrupted();
void accelerator_operator_starts();
void accelerator_operator_ends();
// How long each operator took of what was timed last, and what was before it; and the whole. Waits for its end.
std::vector<PlimsollDeviceTimes> take_accelerator_times(uint64_t& makespan_ns);

}  // namespace plimsoll
