#include "processor.h"

#include "device.h"
#include "order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

namespace stand_in {
namespace {

using c10::DispatchKey;

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

}  // namespace

bool can_run(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CUDA) && op.hasComputedKernelForDispatchKey(DispatchKey::CPU);
}

// Of an operator's arguments: libtorch's own kernels make that the current device.
std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (c10::IValue argument : arguments) {
    auto see = [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
      return tensor;
    };
    change_tensors(argument, see);
    if (!found && argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index()) found = argument.toDevice();
  }
  return found;
}

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::OptionalDeviceGuard guard(device_of(torch::jit::last(*stack, op.schema().arguments().size())));
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

void finish_current_stream() { catch_up(current_stream()); }

namespace {

// From the first byte of a tensor to the last.
void touch(const at::Tensor& tensor, bool writes, const char* what) {
  if (tensor.numel() == 0) return;
  if (device_of(tensor.const_data_ptr()) != tensor.device().index()) refuse("a tensor has bytes of another device");
  int64_t last = 0;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  order::touches(current_stream(), tensor.const_data_ptr(), static_cast<size_t>(last + 1) * tensor.itemsize(), writes, what);
}

}  // namespace

at::Tensor Twins::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  for (auto& [original, twin] : tensors_)
    if (original.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return twin;
  touch(tensor, false, "a kernel that reads");
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
  touch(made, true, "a kernel that makes");
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
  touch(argument, true, "a kernel that writes");
  const auto& storage = argument.storage();
  if (storage.nbytes() == 0 || !written_.insert(storage.unsafeGetStorageImpl()).second) return;
  write(storage.mutable_data(), storage.data(), storage.nbytes(), current_stream());
}

}  // namespace stand_in
