// A CUDA device that is not there: its memory is the host's, its kernels are the processor's (kernels.cpp), and its
// streams do what they were asked to as late as their order allows, or at once, by a draw. Whoever relies on more than
// that order reads bytes that are not there yet, or no more. runtime.cpp and driver.cpp put NVIDIA's names to it.
//
// The environment says how it is: STAND_IN_SEED, of the draws; STAND_IN_FORGETS_WAITS, a fault to be found out: 1 for the
// waits of the default stream, 2 for those of the others; STAND_IN_REPORT, a file that is written when the process ends.
#pragma once

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
// Does all that it was asked for.
void finish(Stream* stream);
void finish_all();
void wait_for(Stream* stream, const Event* event);

Event* make_event();
void record(Event* event, Stream* stream);
// Whether its mark was reached. Meanwhile some stream goes on.
bool is_reached(const Event* event);
void reach(const Event* event);
// From one mark to another, in ms; negative where one was not reached.
float between_ms(const Event* from, const Event* to);

// Bytes of the device; null where it has no more.
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
bool is_page_locked(const void* start);

// Asks for a copy. What is neither on the device nor page-locked is read, or written, before it returns.
void copy(void* to, const void* from, size_t bytes, Stream* stream);
void fill(void* start, int value, size_t bytes, Stream* stream);
// Puts there what a kernel has made. Until the stream comes to that there are other bytes.
void write(void* to, const void* made, size_t bytes, Stream* stream);

// Counts a call that holds up the host.
void count_wait();
// Ends the process: something was asked for that no device does, or that this one cannot.
[[noreturn]] void refuse(const std::string& what);

}  // namespace stand_in
