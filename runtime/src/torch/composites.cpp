#include "composites.h"

#include "entries.h"
#include "interceptor.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace plimsoll {
namespace {

// It calls an operator where somebody looks on.
constexpr const char* kMaxPool = "max_pool1d";
// Found by what calls `data_ptr` among the composites that libtorch exports.
constexpr const char* kAsOne[] = {"_rowwise_prune",
                                  "_grid_sampler_2d_cpu_fallback_backward",
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
// A view that does.
constexpr const char* kNestedView = "_nested_view_from_buffer";
// Those of their arguments.
constexpr const char* kAddressed[] = {"batch_sizes", "input_lengths", "target_lengths", "tensor_indices_or_sections",
                                      "shape",       "nested_size",   "nested_strides", "offsets"};
// They have a direct way to give what they are told to write more bytes, which no operator tells of.
constexpr const char* kGrowing[] = {"inner.out",
                                    "kron.out",
                                    "matmul.out",
                                    "tensordot.out",
                                    "chain_matmul.out",
                                    "matrix_power.out",
                                    "nuclear_norm.out",
                                    "nuclear_norm.dim_out",
                                    "linalg_matmul.out",
                                    "linalg_cond.out",
                                    "linalg_cond.p_str_out",
                                    "linalg_matrix_norm.out",
                                    "linalg_matrix_norm.str_ord_out",
                                    "linalg_matrix_power.out",
                                    "linalg_matrix_rank.out",
                                    "linalg_matrix_rank.atol_rtol_tensor_out",
                                    "linalg_matrix_rank.out_tol_tensor",
                                    "linalg_matrix_rank.atol_rtol_float_out",
                                    "linalg_pinv.out",
                                    "linalg_pinv.atol_rtol_float_out",
                                    "linalg_pinv.out_rcond_tensor",
                                    "linalg_tensorinv.out"};

template <size_t count>
bool is_among(const char* const (&names)[count], const std::string& name) {
  return std::find(names, names + count, name) != names + count;
}

// Whether the program looks on, or in, at a call: by a gradient, forward or backward, a class of tensors, a mode.
bool is_looked_at(c10::ArrayRef<c10::IValue> arguments) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const at::Tensor& tensor = argument.toTensor();
    return (c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined() || at::isTensorSubclassLike(tensor);
  });
}

bool is_of_integers(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && at::isIntegralType(tensor.scalar_type(), false);
}

void run_composite(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

void run_as_one(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (!is_intercepted() || c10::impl::dispatch_mode_enabled()) return run_composite(handle, stack);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  handle.callBoxed(stack);
}

void run_max_pool(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  if (!is_intercepted() || is_looked_at(arguments)) return run_composite(handle, stack);
  run_as_one(handle, stack);
}

void run_with_addresses_kept(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (!is_intercepted()) return run_composite(handle, stack);
  KeptAddresses kept(handle, torch::jit::last(*stack, handle.schema().arguments().size()).data());
  run_composite(handle, stack);
}

// How many such composites this thread is in.
thread_local size_t keeping = 0;

// Those that have a kernel here, for whom libtorch's Python chooses kernels itself.
std::vector<std::string> composites() {
  std::vector<std::string> names = {kMaxPool};
  names.insert(names.end(), kAsOne, std::end(kAsOne));
  names.insert(names.end(), kGrowing, std::end(kGrowing));
  names.insert(names.end(), kKeepAddresses, std::end(kKeepAddresses));
  return names;
}

TORCH_LIBRARY_FRAGMENT(plimsoll, library) { library.def("composites() -> str[]", &composites); }
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl(kMaxPool, torch::CppFunction::makeFromBoxedFunction<&run_max_pool>());
  for (const char* name : kGrowing) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_addresses_kept>());
  for (const char* name : kAsOne) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_as_one>());
  for (const char* name : kKeepAddresses)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_addresses_kept>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  for (const char* name : kGrowing) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_addresses_kept>());
}

}  // namespace

bool runs_as_one(const std::string& name) { return name == kMaxPool || is_among(kAsOne, name); }
bool keeps_addresses(const std::string& name) {
  return name == kNestedView || is_among(kKeepAddresses, name) || is_among(kGrowing, name);
}

// No mode of the program's need know.
void keep(const at::Storage& storage) {
  static auto keep = c10::Dispatcher::singleton().findSchemaOrThrow("plimsoll::keep", "").typed<void(const at::Storage&)>();
  keep.redispatch(c10::DispatchKeySet(kInterceptorKey), storage);
}

void keep_parts(const c10::IValue& made) {
  if (made.isList())
    for (const c10::IValue& element : made.toListRef()) keep_parts(element);
  if (!made.isTensor() || !is_nested(made.toTensor().key_set())) return;
  for (auto* part : storages_of_parts(made.unsafeToTensorImpl())) keep(Storage::reclaim_copy(part));
}

KeptAddresses::KeptAddresses(const c10::OperatorHandle& composite, const c10::IValue* arguments) {
  const auto& declared = composite.schema().arguments();
  for (size_t index = 0; index < declared.size(); ++index) {
    if (!arguments[index].isTensor()) continue;
    const at::Tensor& tensor = arguments[index].toTensor();
    bool is_addressed = is_among(kAddressed, declared[index].name()) && is_of_integers(tensor);
    bool may_grow = declared[index].kwarg_only() && tensor.defined() && !tensor.is_meta();
    if ((is_addressed || may_grow) && has_plain_storage(tensor.unsafeGetTensorImpl())) keep(tensor.storage());
  }
  ++keeping;
}

KeptAddresses::~KeptAddresses() { --keeping; }

bool are_kept(const c10::IValue& first_result) {
  return keeping > 0 && first_result.isTensor() && is_of_integers(first_result.toTensor());
}

}  // namespace plimsoll
