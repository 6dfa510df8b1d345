// Switches of libtorch that tch does not reach.
#include "shim.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

extern "C" void plimsoll_set_deterministic(int32_t on) {
  auto& context = at::globalContext();
  context.setDeterministicCuDNN(on != 0);
  context.setBenchmarkCuDNN(false);
  // A warning, not an error: most operators without a deterministic kernel are deterministic in the cases at hand.
  context.setDeterministicAlgorithms(on != 0, /*warn_only=*/true);
  context.setDeterministicFillUninitializedMemory(false);
}

extern "C" void plimsoll_autocast(int32_t on_cuda, int32_t on) {
  auto device = on_cuda ? c10::kCUDA : c10::kCPU;
  at::autocast::set_autocast_enabled(device, on != 0);
  if (on) {
    at::autocast::set_autocast_dtype(device, c10::kBFloat16);
    at::autocast::increment_nesting();
  } else if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}
