#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <unordered_set>

namespace stand_in {
namespace {

using c10::DispatchKey;
using Stack = torch::jit::Stack;

// These compute nothing on a device: they stay libtorch's own.
const std::unordered_set<std::string> kNative = {
    "aten::empty",        "aten::empty_strided", "aten::as_strided",  "aten::view",   "aten::_reshape_alias",
    "aten::resize_",      "aten::resize_as_",    "aten::set_",        "aten::unfold", "aten::_local_scalar_dense",
    "aten::record_stream", "aten::is_pinned",    "aten::_pin_memory", "aten::is_set_to"};
// These choose among libraries of the device.
const std::unordered_set<std::string> kChoosing = {"aten::convolution", "aten::convolution_backward", "aten::_convolution"};

// Within the device; from and to the host as libtorch does.
void copy_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = torch::jit::last(*stack, 3);
  at::Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
  if (to.is_cuda() && from.is_cuda()) return run_kernel(op, keys, stack);
  at::native::copy_(to, from, arguments[2].toBool());
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, to);
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Puts our kernels in the place of libtorch's, which says so each time.
struct Replacement {
  Replacement() {
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      auto op = dispatcher.findSchema(name);
      if (!op || kNative.count(name.name)) continue;
      if (name.name == "aten::copy_") {
        put(name, c10::KernelFunction::makeFromBoxedFunction<&copy_kernel>());
      } else if (can_run(*op) || kChoosing.count(name.name)) {
        put(name, c10::KernelFunction::makeFromBoxedFunction<&run_kernel>());
      }
    }
    for (auto& [name, kernel] : own_kernels()) put(name, std::move(kernel));
  }

  void put(const c10::OperatorName& name, c10::KernelFunction kernel) {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto put = dispatcher.registerImpl(name, DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "the stand-in device");
    registrations.push_back(std::move(put));
  }
  std::vector<c10::RegistrationHandleRAII> registrations;
};

auto& replacement = *new Replacement();  // for as long as the process lives

}  // namespace

c10::Device there() { return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice(); }

Stream* current_stream() {
  return static_cast<Stream*>(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(there()).native_handle());
}

Place Place::draw(const std::optional<at::Generator>& given) {
  constexpr uint64_t kStep = 4;
  bool is_ours = given && given->defined() && given->device().is_cuda();
  at::Generator generator = is_ours ? *given : at::globalContext().defaultGenerator(there());
  std::lock_guard<std::mutex> guard(generator.mutex());
  Place place{generator.current_seed(), generator.get_offset()};
  generator.set_offset(place.offset + kStep);
  return place;
}

at::Generator Place::generator() const {
  return at::detail::createCPUGenerator(seed * 0x9e3779b97f4a7c15 + offset * 0xbf58476d1ce4e5b9);
}

}  // namespace stand_in
