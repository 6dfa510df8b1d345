// Puts kernels in the place of libtorch's own: those of processor.cpp on a late device, those of paper.cpp on a paced one.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>

#include <utility>
#include <vector>

namespace stand_in {

struct Stream;

// This thread's current device, as libtorch has it, and its current stream.
c10::Device there();
Stream* current_stream();

// What stands for the CUDA kernel of an operator, and of which operators it does.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
bool can_run(const c10::OperatorHandle& op);
// Kernels of operators that have one of their own.
std::vector<std::pair<c10::OperatorName, c10::KernelFunction>> own_kernels();

// Where a generator of the device stands: what a kernel draws from.
struct Place {
  uint64_t seed, offset;
  // Moves the generator, or the default one, on as a kernel does.
  static Place draw(const std::optional<at::Generator>& given = {});
  // A generator of the processor that begins there.
  at::Generator generator() const;
};

// Changes the tensors in an argument or a result.
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

}  // namespace stand_in
