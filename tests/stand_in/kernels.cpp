#include "kernels.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
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

Stream* current_stream() {
  return static_cast<Stream*>(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(there()).native_handle());
}

template <class Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    value = changed;
  }
}

// While it lives, the processor's default generator is the device's.
class Drawing {
 public:
  explicit Drawing(const std::optional<at::Generator>& given) { exchange(Place::draw(given).generator().get_state()); }
  ~Drawing() { exchange(state_); }

 private:
  void exchange(const at::Tensor& state) {
    auto generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> guard(generator.mutex());
    at::Tensor before = generator.get_state();
    generator.set_state(state);
    state_ = before;
  }
  at::Tensor state_;
};

void on_the_processor(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  finish_current_stream();
  Twins twins;
  std::optional<at::Generator> generator;
  std::vector<at::Tensor> written;
  const auto& arguments = op.schema().arguments();
  for (size_t position = 0; position < arguments.size(); ++position) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + position];
    const auto* alias = arguments[position].alias_info();
    if (alias && alias->isWrite())
      change_tensors(value, [&](const at::Tensor& tensor) { return written.emplace_back(tensor); });
    if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    } else {
      change_tensors(value, [&](const at::Tensor& tensor) { return twins.of(tensor); });
    }
  }
  {
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(generator);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  }
  twins.resize_back();
  for (const at::Tensor& tensor : written) twins.written(tensor);
  for (size_t index = stack->size() - op.schema().returns().size(); index < stack->size(); ++index)
    change_tensors((*stack)[index], [&](const at::Tensor& tensor) { return twins.back(tensor); });
}

// Within the device; from and to the host as libtorch does.
void copy_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = torch::jit::last(*stack, 3);
  at::Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
  if (to.is_cuda() && from.is_cuda()) return on_the_processor(op, keys, stack);
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
      bool both = op->hasKernelForDispatchKey(DispatchKey::CUDA) && op->hasComputedKernelForDispatchKey(DispatchKey::CPU);
      if (name.name == "aten::copy_") {
        put(name, c10::KernelFunction::makeFromBoxedFunction<&copy_kernel>());
      } else if (both || kChoosing.count(name.name)) {
        put(name, c10::KernelFunction::makeFromBoxedFunction<&on_the_processor>());
      }
    }
    for (auto& [name, kernel] : fused_kernels()) put(name, std::move(kernel));
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

c10::Device there() { return {c10::kCUDA, 0}; }

void finish_current_stream() { finish(current_stream()); }

at::Tensor Twins::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  for (auto& [original, twin] : tensors_)
    if (original.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return twin;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = twins_.find(storage);
  if (found == twins_.end()) {
    at::DataPtr bytes(tensor.storage().mutable_data(), c10::kCPU);
    c10::Storage twin(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(bytes), c10::GetAllocator(c10::kCPU), true);
    originals_.emplace(twin.unsafeGetStorageImpl(), tensor.storage());
    found = twins_.emplace(storage, std::move(twin)).first;
  }
  c10::DispatchKeySet keys(DispatchKey::CPU);
  auto twin = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), keys, tensor.dtype());
  auto* made = twin.unsafeGetTensorImpl();
  made->set_storage_offset(tensor.storage_offset());
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  made->_set_conj(tensor.is_conj());
  made->_set_neg(tensor.is_neg());
  tensors_.emplace_back(tensor, twin);
  return twin;
}

std::optional<at::Tensor> Twins::of(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(of(*tensor)) : std::nullopt;
}

at::Tensor Twins::back(const at::Tensor& found) {
  if (!found.defined() || !found.is_cpu()) return found;
  for (auto& [original, twin] : tensors_)
    if (twin.unsafeGetTensorImpl() == found.unsafeGetTensorImpl()) return original;
  auto options = found.options().device(there());
  auto argument = originals_.find(found.storage().unsafeGetStorageImpl());
  if (argument != originals_.end())
    return at::empty({0}, options).set_(argument->second, found.storage_offset(), found.sizes(), found.strides());
  auto made = at::empty_strided(found.sizes(), found.strides(), options);
  finish_current_stream();  // the block may be another's, until then
  if (size_t bytes = made.storage().nbytes()) write(made.mutable_data_ptr(), found.const_data_ptr(), bytes, current_stream());
  return made;
}

void Twins::resize_back() {
  for (auto& [original, twin] : tensors_) {
    if (original.sizes() == twin.sizes()) continue;
    original.resize_(twin.sizes());
    TORCH_CHECK(original.strides() == twin.strides(), "an output was given strides of its own");
    finish_current_stream();
    if (size_t bytes = twin.nbytes()) std::memcpy(original.mutable_data_ptr(), twin.const_data_ptr(), bytes);
  }
}

void Twins::written(const at::Tensor& argument) {
  if (!argument.defined() || !argument.is_cuda()) return;
  const auto& storage = argument.storage();
  if (storage.nbytes() == 0 || !written_.insert(storage.unsafeGetStorageImpl()).second) return;
  write(storage.mutable_data(), storage.data(), storage.nbytes(), current_stream());
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
