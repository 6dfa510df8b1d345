// The allocator that counts: every byte that libtorch allocates on the CPU passes through it, temporaries inside
// kernels included.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace plimsoll {

// Registers the allocator over libtorch's. Storages allocated before stay with the old one, uncounted.
void install_allocator(void (*on_free)(uint32_t entry));

// Whether the bytes came from the allocator.
bool is_ours(const at::DataPtr& bytes);
// Names the entry to report when the bytes are freed; 0 for none.
void set_owner(const at::DataPtr& bytes, uint32_t entry);
// A pointer that stands for bytes that are elsewhere. Reading it faults. When it is freed, `entry` is reported.
at::DataPtr absent_bytes(c10::Device device, uint32_t entry);

uint64_t live_bytes();
uint64_t peak_bytes();
void reset_peak();
// The most bytes since the last reset_operator_peak(), apart from peak_bytes().
uint64_t operator_peak_bytes();
void reset_operator_peak();

// What this thread allocates meanwhile is the interceptor's own and not counted.
struct Uncounted {
  Uncounted();
  ~Uncounted();
};

}  // namespace plimsoll
