// What programs in C++ and Python do with libtorch and `tch` cannot: autocast, optimizers that step all parameters in one operator,
// and errors that do not say where they were raised. Every function returns null, or what went wrong.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Logging.h>

#include <string>
#include <vector>

namespace {

std::vector<at::Tensor> list(at::Tensor* const* tensors, size_t count) {
  std::vector<at::Tensor> list;
  for (size_t index = 0; index < count; ++index) list.push_back(*tensors[index]);
  return list;
}

template <class Body>
const char* caught(Body body) {
  thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "an exception of an unknown kind";
  }
  return message.c_str();
}

}  // namespace

extern "C" {

// From now on errors do not say where they were raised, which takes longer to find out than a small program runs.
const char* plimsoll_tests_forget_origins() {
  return caught([] { c10::SetStackTraceFetcher([] { return std::string(); }); });
}

// Enters or leaves CPU autocast to bf16, as `torch.autocast` does.
const char* plimsoll_tests_autocast(int enter) {
  return caught([&] {
    if (enter) {
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
    } else {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
  });
}

// Of each tensor a number times itself and the tangent of that, by operators that act on all of them, in place and not; the first.
const char* plimsoll_tests_blend(at::Tensor* const* tensors, size_t count, double number, at::Tensor** first) {
  return caught([&] {
    auto scaled = at::_foreach_mul(list(tensors, count), number);
    at::_foreach_add_(scaled, at::_foreach_tanh(scaled));
    at::Tensor sum = scaled[0];
    for (size_t index = 1; index < count; ++index) sum = sum + scaled[index].mean();
    *first = new at::Tensor(std::move(sum));
  });
}

// For where no gradients are recorded. Clips all gradients to a norm of at most one, then steps by momentum, as `clip_grad_norm_` and `SGD(foreach=True)` do.
const char* plimsoll_tests_foreach_step(at::Tensor* const* parameters, at::Tensor* const* gradients,
                                        at::Tensor* const* velocities, size_t count, double rate) {
  return caught([&] {
    auto weights = list(parameters, count), slopes = list(gradients, count), speeds = list(velocities, count);
    at::Tensor norm = at::stack(at::_foreach_norm(slopes, 2)).norm();
    at::_foreach_mul_(slopes, norm.reciprocal().clamp_max(1.0));
    at::_foreach_mul_(speeds, 0.9);
    at::_foreach_add_(speeds, slopes);
    at::_foreach_add_(weights, speeds, -rate);
    at::_foreach_lerp_(speeds, slopes, 0.01);
  });
}

// The same. One step of `AdamW(fused=True)`.
const char* plimsoll_tests_fused_step(at::Tensor* const* parameters, at::Tensor* const* gradients, at::Tensor* const* means,
                                      at::Tensor* const* squares, at::Tensor* const* steps, size_t count, double rate) {
  return caught([&] {
    auto counts = list(steps, count);
    at::_foreach_add_(counts, 1);
    at::_fused_adamw_(list(parameters, count), list(gradients, count), list(means, count), list(squares, count), {}, counts,
                      rate, 0.9, 0.999, 1e-2, 1e-8, false, false);
  });
}
}
