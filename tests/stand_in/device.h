// A CUDA device that is not there, in one of two forms. Its memory is the host's (device.cpp), and runtime.cpp and driver.cpp
// put NVIDIA's names to it.
//
// - Late (late.cpp, processor.cpp): its kernels are the processor's, and its streams do what they were asked to as late as
//   their order allows, or at once, by a draw. Whoever relies on more than that order reads bytes that are not there yet, or
//   no more.
// - Paced (paced.cpp, paper.cpp): nothing is computed and nothing copied, but all takes the time that a GPU would take for it
//   by its data sheet. Models of any size run there, with memory that nobody touches.
//
// The environment says how it is: STAND_IN_DEVICES, how many there are; STAND_IN_BYTES, the memory of all; STAND_IN_REPORT, a file that is written when the process ends. Of
// a late one: STAND_IN_SEED, of the draws; STAND_IN_FORGETS_WAITS, a fault to be found out: 1 for the waits of the default
// stream, 2 for those of the others. Of a paced one: STAND_IN_MACHINE, the GPU, a file of configs/hardware/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace stand_in {

// A queue of work. A null pointer stands for the default stream, which all streams but the non-blocking ones wait for.
struct Stream;
// A mark in a stream, or none yet.
struct Event;

Stream* make_stream(bool blocking);
void destroy(Stream* stream);
// Whether all that it was asked for is done.
bool is_done(Stream* stream);
// Returns when all is done that it was asked for.
void finish(Stream* stream);
void finish_all();
void wait_for(Stream* stream, const Event* event);

Event* make_event();
void record(Event* event, Stream* stream);
// Whether its mark was reached. Meanwhile some stream goes on.
bool is_reached(const Event* event);
void reach(const Event* event);
// From one mark to another, in ms; negative where the other was reached first, no number where one was not.
float between_ms(const Event* from, const Event* to);

// How many devices there are, which of them is this thread's current one, and which some bytes belong to.
int devices();
int current_device();
// Whether there is such a one.
bool set_current_device(int ordinal);
int device_of(const void* start);

// Bytes of the current device; null where there are no more.
void* allocate(size_t bytes);
void free(void* start);
size_t free_bytes();
size_t total_bytes();
// Takes so many bytes without an address, or gives them back; whether there were so many.
bool take_bytes(size_t bytes);
void give_bytes(size_t bytes);
// Addresses that are the device's, whatever is behind them.
void add_range(const void* start, size_t bytes);
void remove_range(const void* start);
bool is_on_device(const void* start);

// Page-locked memory: that of these functions, and what was given to lock.
void* allocate_page_locked(size_t bytes);
void free_page_locked(void* start);
void lock_pages(const void* start, size_t bytes);
void unlock_pages(const void* start);
// Whether copies reach it: on the device or page-locked.
bool is_reachable(const void* start);
bool is_page_locked(const void* start);
// Refuses what leaves its piece of memory.
void check_inside(const void* start, size_t bytes);

// What memory is made of: null where the host has no more. A late device has nonsense in what nobody has written to.
void* fresh(size_t bytes);
void discard(void* start, size_t bytes);
void spoil(void* start, size_t bytes);

// Asks for a copy. What is neither on the device nor page-locked is read, or written, before it returns.
void copy(void* to, const void* from, size_t bytes, Stream* stream);
void fill(void* start, int value, size_t bytes, Stream* stream);
// A kernel that does nothing.
void rest(Stream* stream);

// Graphs are captured of what a stream is given.
bool begin_capture(const Stream* stream);
bool end_capture(const Stream* stream);
bool captures(const Stream* stream);
bool captures_any();

// The library that puts kernels in the place of libtorch's.
const char* kernels_library();
// Its name, and its generation as CUDA counts them.
std::string device_name();
int compute_capability();

// On a late device: has a stream do all that it was asked for, which is nobody's wait.
void catch_up(Stream* stream);
// Puts there what a kernel has made. Until the stream comes to that there are other bytes.
void write(void* to, const void* made, size_t bytes, Stream* stream);

// On a paced device: a kernel that moves so many bytes, and computes so much with numbers of a kind.
struct Work {
  enum Kind { kF32, kTf32, kHalf };
  double bytes = 0, flops = 0;
  Kind kind = kF32;
};
void work(const Work& kernel, Stream* stream);

// What was asked of it. A wait is a call that holds up the host.
struct Counts {
  std::atomic<uint64_t> copies{0}, late_copies{0}, waits{0}, kernels{0}, kernel_ns{0};
};
Counts& counts();

// A number in the environment.
uint64_t setting(const char* name, uint64_t otherwise);

// Ends the process: something was asked for that no device does, or that this one cannot.
[[noreturn]] void refuse(const std::string& what);

}  // namespace stand_in
