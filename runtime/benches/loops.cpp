// Loops of tiny operators, timed on the thread's own CPU clock, for benches/interceptor.rs.

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <time.h>

#include <cstdint>

namespace {

uint64_t thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

template <class Body>
uint64_t timed(uint64_t rounds, Body body) {
  uint64_t start = thread_ns();
  for (uint64_t round = 0; round < rounds; ++round) body();
  return thread_ns() - start;
}

}  // namespace

extern "C" {

// Allocates by libtorch's own allocator, as without Plimsoll, or by ours again.
void plimsoll_bench_own_allocator(int32_t own) {
  static c10::Allocator* ours = c10::GetAllocator(c10::kCPU);
  c10::SetAllocator(c10::kCPU, own ? c10::GetDefaultCPUAllocator() : ours, 255);
}

// Adds two tensors of 8 elements, `rounds` times.
uint64_t plimsoll_bench_adds(uint64_t rounds) {
  c10::NoGradGuard no_grad;
  at::Tensor a = at::ones({8}), b = at::ones({8});
  return timed(rounds, [&] { at::Tensor sum = at::add(a, b); });
}

// Adds two tensors of 2,048 elements, 8 KiB each: what is made is large enough to be evicted.
uint64_t plimsoll_bench_large_adds(uint64_t rounds) {
  c10::NoGradGuard no_grad;
  at::Tensor a = at::ones({2048}), b = at::ones({2048});
  return timed(rounds, [&] { at::Tensor sum = at::add(a, b); });
}

// Makes a view of a tensor, `rounds` times.
uint64_t plimsoll_bench_views(uint64_t rounds) {
  c10::NoGradGuard no_grad;
  at::Tensor a = at::ones({8});
  return timed(rounds, [&] { at::Tensor view = a.view({2, 4}); });
}

// Multiplies in place, `rounds` times.
uint64_t plimsoll_bench_in_place(uint64_t rounds) {
  c10::NoGradGuard no_grad;
  at::Tensor a = at::ones({8}), b = at::ones({8});
  return timed(rounds, [&] { a.mul_(b); });
}
}
