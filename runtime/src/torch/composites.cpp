#include "composites.h"

#include "interceptor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>

namespace plimsoll {
namespace {

// Found by what calls `data_ptr` among the composites that libtorch exports.
constexpr const char* kAsOne[] = {"max_pool1d",
                                  "_sobol_engine_draw",
                                  "_sobol_engine_ff_",
                                  "_sobol_engine_scramble_",
                                  "_sobol_engine_initialize_state_",
                                  "_saturate_weight_to_fp16",
                                  "choose_qparams_optimized",
                                  "fbgemm_linear_quantize_weight",
                                  "fbgemm_pack_gemm_matrix_fp16",
                                  "fbgemm_pack_quantized_matrix",
                                  "fbgemm_pack_quantized_matrix.KN",
                                  "fbgemm_linear_fp16_weight",
                                  "fbgemm_linear_fp16_weight_fp32_activation",
                                  "fbgemm_linear_int8_weight",
                                  "fbgemm_linear_int8_weight_fp32_activation"};
constexpr const char* kKeepAddresses[] = {"lstm.data",
                                          "gru.data",
                                          "rnn_tanh.data",
                                          "rnn_relu.data",
                                          "_pad_packed_sequence",
                                          "_pack_padded_sequence_backward",
                                          "ctc_loss.Tensor",
                                          "tensor_split.tensor_indices_or_sections",
                                          "_reshape_from_tensor"};

template <size_t count>
bool is_among(const char* const (&names)[count], const std::string& name) {
  return std::find(names, names + count, name) != names + count;
}

bool wants_gradient(c10::ArrayRef<c10::IValue> arguments) {
  return c10::GradMode::is_enabled() && std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
           return argument.isTensor() && argument.toTensor().requires_grad();
         });
}

bool is_of_integers(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && at::isIntegralType(tensor.scalar_type(), false);
}

void run_composite(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

void run_as_one(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (!is_intercepted() || wants_gradient(torch::jit::last(*stack, handle.schema().arguments().size())))
    return run_composite(handle, stack);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  handle.callBoxed(stack);
}

// How many of them this thread is in.
thread_local size_t keeping = 0;

struct Keeping {
  Keeping() { ++keeping; }
  ~Keeping() { --keeping; }
};

void run_with_addresses_kept(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (!is_intercepted()) return run_composite(handle, stack);
  size_t count = handle.schema().arguments().size();
  keep_integers(torch::jit::last(*stack, count).data(), count);
  Keeping addresses;
  run_composite(handle, stack);
}

void keep(const at::Storage&) {}

TORCH_LIBRARY_FRAGMENT(plimsoll, library) { library.def("keep(Storage storage) -> ()"); }
TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, library) { library.impl("keep", &keep); }
TORCH_LIBRARY_IMPL(plimsoll, Tracer, library) { library.impl("keep", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  for (const char* name : kAsOne) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_as_one>());
  for (const char* name : kKeepAddresses)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_addresses_kept>());
}

}  // namespace

bool runs_as_one(const std::string& name) { return is_among(kAsOne, name); }
bool keeps_addresses(const std::string& name) { return is_among(kKeepAddresses, name); }

void keep_integers(const c10::IValue* arguments, size_t count) {
  static auto keep = c10::Dispatcher::singleton().findSchemaOrThrow("plimsoll::keep", "").typed<void(const at::Storage&)>();
  for (size_t index = 0; index < count; ++index) {
    if (!arguments[index].isTensor()) continue;
    const at::Tensor& tensor = arguments[index].toTensor();
    if (is_of_integers(tensor) && has_plain_storage(tensor.unsafeGetTensorImpl())) keep.call(tensor.storage());
  }
}

bool are_kept(const c10::IValue& first_result) {
  return keeping > 0 && first_result.isTensor() && is_of_integers(first_result.toTensor());
}

}  // namespace plimsoll
