// Switches of libtorch that tch does not reach.
#include "shim.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

extern "C" void plimsoll_set_deterministic(int32_t how) noexcept {
  auto& context = at::globalContext();
  context.setDeterministicCuDNN(how != PLIMSOLL_ANY_KERNELS);
  context.setBenchmarkCuDNN(false);
  context.setDeterministicAlgorithms(how != PLIMSOLL_ANY_KERNELS, /*warn_only=*/how == PLIMSOLL_PREFER_DETERMINISTIC);
  context.setDeterministicFillUninitializedMemory(false);
}

extern "C" void plimsoll_autocast(int32_t on_cuda, int32_t on) noexcept {
  auto device = on_cuda ? c10::kCUDA : c10::kCPU;
  at::autocast::set_autocast_enabled(device, on != 0);
  if (on) {
    at::autocast::set_autocast_dtype(device, c10::kBFloat16);
    at::autocast::increment_nesting();
  } else if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}
