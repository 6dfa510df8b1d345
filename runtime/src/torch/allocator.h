// The allocator that counts: every byte that libtorch allocates on the CPU passes through it, temporaries inside
// kernels included. Where a session counts another device (accelerator.h), this one is not registered, and that device's
// allocator books here.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>

namespace plimsoll {

// Registers the allocator over libtorch's. Storages allocated before stay with the old one, uncounted.
void install_allocator();
// Who is told of the entry that was named for bytes, or for a pointer that stands for them, when they are freed.
void on_free(void (*report)(uint32_t entry));
void report_freed(uint32_t entry);

// Names the entry to report when the bytes are freed; 0 for none. Returns the one that was named before; nothing where none can be
// named for them, for they did not come from the allocator that counts, or are none.
std::optional<uint32_t> set_owner(const at::DataPtr& bytes, uint32_t entry);
// The entry that was named, for absent bytes too, or 0; nothing where they did not come from the allocator that counts.
std::optional<uint32_t> owner_of(const at::DataPtr& bytes);
// What frees the bytes that the allocator that counts gives out; null until it is registered.
inline at::DeleterFnPtr counted_deleter = nullptr;
// Whether the pointer stands for bytes that are elsewhere.
bool is_absent(const at::DataPtr& bytes);
// A pointer that stands for bytes that are elsewhere. Reading it faults. When it is freed, `entry` is reported.
at::DataPtr absent_bytes(c10::Device device, uint32_t entry);

uint64_t live_bytes();
uint64_t peak_bytes();
void reset_peak();
// The most bytes that were allocated at once on top of those of the last reset_operator_peak(). What is `Ours` does not
// count: neither the bytes that an eviction frees nor those that a restored storage takes. Nor do an operator's inputs count
// that are let go of before it ends.
uint64_t operator_peak_bytes();
void reset_operator_peak();

// Bytes that no allocation may exceed; UINT64_MAX for none.
void set_line(uint64_t bytes);
// Called, with no lock held and on any thread: `make_room` where an allocation of so many bytes would exceed the line,
// `give_back` where the device refuses one that would not. See `pressure` and `refused` in shim.h.
void on_pressure(int32_t (*make_room)(uint64_t bytes), int32_t (*give_back)(uint64_t bytes));

// For the allocator of another device, which tells what it did after the fact.
//
// Before an allocation: evicts until it fits under the line, and books it, so that no other thread takes the same room; or throws. What
// this thread books next, while it lives, is that allocation.
class BookedAhead {
 public:
  explicit BookedAhead(uint64_t bytes);
  ~BookedAhead();
  BookedAhead(const BookedAhead&) = delete;
  BookedAhead& operator=(const BookedAhead&) = delete;

 private:
  uint64_t outer_ = 0;  // where it is made meanwhile for another
};
// After the device has refused one that fits: evicts so many bytes, or all there are. Whether there were any.
bool evict_more(uint64_t bytes);
// Whether there is a line, and this thread allocates for the program.
bool is_under_line();
void book(uint64_t bytes);
void unbook(uint64_t bytes, uint32_t owner);

// Allocations of this thread that found no room, so far.
inline thread_local uint64_t refused_here = 0;

// What this thread allocates and frees meanwhile is done on Rust's behalf: it still counts, but over the line it fails
// at once, for Rust makes room first.
struct Ours {
  Ours();
  ~Ours();
};

// What this thread allocates meanwhile is the interceptor's own and not counted.
struct Uncounted {
  Uncounted();
  ~Uncounted();
};

}  // namespace plimsoll
