// Kernels of a paced device: what they would make has its size and its time, and that is all.
#include "device.h"
#include "kernels.h"

#include <ATen/EmptyTensor.h>

#include <array>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace stand_in {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;
using Results = std::vector<IValue>;
using Sizes = std::vector<int64_t>;

Tensor make(c10::IntArrayRef sizes, at::ScalarType kind) { return at::empty(sizes, at::dtype(kind).device(there())); }
Tensor like(const IValue& tensor) { return at::empty_like(tensor.toTensor()); }
IValue like_if(bool wanted, const IValue& tensor) { return wanted ? like(tensor) : Tensor(); }
int64_t side(const std::vector<int64_t>& of_each_axis, size_t axis) {
  return of_each_axis.size() == 1 ? of_each_axis[0] : of_each_axis[axis];
}

Results convolution(Arguments in) {
  const Tensor &input = in[0].toTensor(), &weight = in[1].toTensor();
  auto stride = in[3].toIntVector(), padding = in[4].toIntVector(), dilation = in[5].toIntVector();
  TORCH_CHECK(!in[6].toBool(), "no transposed convolution here");
  Sizes sizes{input.size(0), weight.size(0)};
  for (int64_t axis = 2; axis < input.dim(); ++axis) {
    int64_t window = side(dilation, axis - 2) * (weight.size(axis) - 1) + 1;
    sizes.push_back((input.size(axis) + 2 * side(padding, axis - 2) - window) / side(stride, axis - 2) + 1);
  }
  return {make(sizes, input.scalar_type())};
}

Results convolution_backward(Arguments in) {
  auto wanted = in[10].toBoolList();
  const Tensor& gradient = in[0].toTensor();
  IValue bias = wanted[2] ? make({gradient.size(1)}, gradient.scalar_type()) : Tensor();
  return {like_if(wanted[0], in[1]), like_if(wanted[1], in[2]), bias};
}

Results batch_norm(Arguments in) {
  Tensor mean = like(in[1]), deviation = like(in[1]);
  return {like(in[0]), mean, deviation, make({in[5].toBool() ? 16 : 0}, at::kByte)};
}

Results layer_norm(Arguments in) {
  const Tensor& input = in[0].toTensor();
  Sizes sizes = input.sizes().vec();
  std::fill(sizes.end() - in[1].toIntVector().size(), sizes.end(), 1);
  return {make(input.sizes(), input.scalar_type()), make(sizes, at::kFloat), make(sizes, at::kFloat)};
}

Results layer_norm_backward(Arguments in) {
  auto wanted = in[7].toBoolList();
  return {like_if(wanted[0], in[1]), like_if(wanted[1], in[5]), like_if(wanted[2], in[6])};
}

Results index_select(Arguments in) {
  const Tensor& from = in[0].toTensor();
  Sizes sizes = from.sizes().vec();
  sizes[in[1].toInt()] = in[2].toTensor().numel();
  return {make(sizes, from.scalar_type())};
}

Results embedding_backward(Arguments in) {
  const Tensor& gradient = in[0].toTensor();
  return {make({in[2].toInt(), gradient.size(-1)}, gradient.scalar_type())};
}

// Heads last, as attention's kernels lay it out.
Tensor attended(const Tensor& query) { return at::empty_like(query.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2); }
Tensor log_sums(const Tensor& query) { return make({query.size(0), query.size(1), query.size(2)}, at::kFloat); }

Results flash_attention(Arguments in) {
  const Tensor &query = in[0].toTensor(), &key = in[1].toTensor();
  return {attended(query), log_sums(query), Tensor(), Tensor(), query.size(2), key.size(2), make({2}, at::kUInt64),
          make({}, at::kUInt64), make({0}, query.scalar_type())};
}

Results cudnn_attention(Arguments in) {
  const Tensor &query = in[0].toTensor(), &key = in[1].toTensor();
  Tensor seed = make({}, at::kLong), offset = make({}, at::kLong);
  return {attended(query), log_sums(query).unsqueeze(-1), Tensor(), Tensor(), query.size(2), key.size(2), seed, offset, Tensor()};
}

Results attention_backward(Arguments in) { return {like(in[1]), like(in[2]), like(in[3])}; }

// Operators of which libtorch's C++ does not tell what they make.
const std::unordered_map<std::string, std::function<Results(Arguments)>> kMade = {
    {"aten::convolution", &convolution},
    {"aten::_convolution", &convolution},
    {"aten::convolution_backward", &convolution_backward},
    {"aten::cudnn_batch_norm", &batch_norm},
    {"aten::cudnn_batch_norm_backward", [](Arguments in) { return Results{like(in[0]), like(in[2]), like(in[2])}; }},
    {"aten::native_layer_norm", &layer_norm},
    {"aten::native_layer_norm_backward", &layer_norm_backward},
    {"aten::native_dropout", [](Arguments in) { return Results{like(in[0]), at::empty_like(in[0].toTensor(), at::kBool)}; }},
    {"aten::native_dropout_backward", [](Arguments in) { return Results{like(in[0])}; }},
    {"aten::relu", [](Arguments in) { return Results{like(in[0])}; }},
    {"aten::index_select", &index_select},
    {"aten::embedding_dense_backward", &embedding_backward},
    {"aten::_scaled_dot_product_flash_attention", &flash_attention},
    {"aten::_scaled_dot_product_flash_attention_backward", &attention_backward},
    {"aten::_scaled_dot_product_cudnn_attention", &cudnn_attention},
    {"aten::_scaled_dot_product_cudnn_attention_backward", &attention_backward},
};

double product(const Tensor& left, const Tensor& right) {
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
}

// Both matrix products of attention; half of each where nobody looks ahead.
double attention(const Tensor& query, const Tensor& key, bool causal) {
  return (causal ? 2.0 : 4.0) * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
}

double multiplications(const Tensor& output, const Tensor& weight) {
  return 2.0 * static_cast<double>(output.numel()) * static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0));
}

// A kernel reaches so much of what the device reaches on large matrices: attention, by kernels of Ampere's time ("only 35%
// utilization on the H100 GPU", FlashAttention-3, arXiv 2407.08608, abstract), and convolutions, by assumption.
constexpr double kAttentionShare = 0.45, kConvolutionShare = 0.4;

// Operations of the operators that have many; forward and backward.
const std::unordered_map<std::string, std::function<double(Arguments, const Results&)>> kOperations = {
    {"aten::mm", [](Arguments in, const Results&) { return product(in[0].toTensor(), in[1].toTensor()); }},
    {"aten::bmm", [](Arguments in, const Results&) { return product(in[0].toTensor(), in[1].toTensor()); }},
    {"aten::addmm", [](Arguments in, const Results&) { return product(in[1].toTensor(), in[2].toTensor()); }},
    {"aten::baddbmm", [](Arguments in, const Results&) { return product(in[1].toTensor(), in[2].toTensor()); }},
    {"aten::convolution",
     [](Arguments in, const Results& made) { return multiplications(made[0].toTensor(), in[1].toTensor()) / kConvolutionShare; }},
    {"aten::convolution_backward",
     [](Arguments in, const Results&) {
       auto wanted = in[10].toBoolList();
       return (wanted[0] + wanted[1]) * multiplications(in[0].toTensor(), in[2].toTensor()) / kConvolutionShare;
     }},
    {"aten::_scaled_dot_product_flash_attention",
     [](Arguments in, const Results&) { return attention(in[0].toTensor(), in[1].toTensor(), in[4].toBool()) / kAttentionShare; }},
    {"aten::_scaled_dot_product_flash_attention_backward",
     [](Arguments in, const Results&) {
       return 2.5 * attention(in[1].toTensor(), in[2].toTensor(), in[11].toBool()) / kAttentionShare;
     }},
    {"aten::_scaled_dot_product_cudnn_attention",
     [](Arguments in, const Results&) { return attention(in[0].toTensor(), in[1].toTensor(), in[6].toBool()) / kAttentionShare; }},
    {"aten::_scaled_dot_product_cudnn_attention_backward",
     [](Arguments in, const Results&) {
       return 2.5 * attention(in[1].toTensor(), in[2].toTensor(), in[14].toBool()) / kAttentionShare;
     }},
};

// Operators that write to their first argument without reading it.
const std::unordered_set<std::string> kOverwriting = {"aten::copy_",   "aten::fill_",    "aten::zero_",
                                                      "aten::normal_", "aten::uniform_", "aten::random_"};

// What is the same for all calls of an operator.
struct Form {
  std::vector<int> given;  // for each result, the argument that it is; negative for what is made
  std::vector<bool> written;
  bool makes = false, draws = false, overwrites = false, resizes = false, convolves = false;
  const std::function<Results(Arguments)>* made = nullptr;
  const std::function<double(Arguments, const Results&)>* operations = nullptr;

  explicit Form(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    const auto& name = schema.name();
    for (const auto& argument : schema.arguments()) written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    for (const auto& result : schema.returns()) {
      int found = -1;
      for (size_t position = 0; position < written.size() && result.alias_info(); ++position) {
        const auto* alias = schema.arguments()[position].alias_info();
        if (alias && *alias == *result.alias_info()) found = static_cast<int>(position);
      }
      if (result.alias_info() && !result.alias_info()->isWrite()) refuse(name + " makes a view, which is no kernel");
      given.push_back(found);
      makes |= found < 0;
    }
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    overwrites = kOverwriting.count(name) > 0;
    resizes = schema.overload_name().find("out") != std::string::npos;
    convolves = name.find("convolution") != std::string::npos;
    if (auto entry = kMade.find(name); entry != kMade.end()) made = &entry->second;
    if (auto entry = kOperations.find(name); entry != kOperations.end()) operations = &entry->second;
  }
};

const Form& form_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Form> forms;
  return forms.try_emplace(&op.schema(), op).first->second;
}

// What libtorch's own account of sizes says that an operator makes.
Results by_meta(const c10::OperatorHandle& op, Arguments in) {
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) refuse(op.schema().name() + ": nobody tells what it makes");
  std::vector<std::pair<Tensor, Tensor>> twins;
  torch::jit::Stack stack(in.begin(), in.end());
  for (IValue& value : stack) {
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (value.isGenerator()) value = IValue();
    change_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      Tensor twin = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
      twins.emplace_back(tensor, twin);
      return twin;
    });
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &stack);
  for (auto& [original, twin] : twins)
    if (original.sizes() != twin.sizes()) original.resize_(twin.sizes());
  for (IValue& value : stack)
    change_tensors(value, [&](const Tensor& found) {
      if (!found.defined()) return found;
      for (auto& [original, twin] : twins)
        if (twin.unsafeGetTensorImpl() == found.unsafeGetTensorImpl()) return original;
      return at::empty_strided(found.sizes(), found.strides(), found.options().device(there()));
    });
  return stack;
}

// Adds up what is touched: each tensor once.
struct Touched {
  std::unordered_set<c10::TensorImpl*> seen;
  double bytes = 0;
  Work::Kind kind = Work::kF32;

  void add(IValue value, double times) {
    change_tensors(value, [&](const Tensor& tensor) {
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
        bytes += times * static_cast<double>(tensor.nbytes());
        if (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf) kind = Work::kHalf;
      }
      return tensor;
    });
  }
};

}  // namespace

bool can_run(const c10::OperatorHandle& op) { return op.hasKernelForDispatchKey(DispatchKey::CUDA); }

std::vector<std::pair<c10::OperatorName, c10::KernelFunction>> own_kernels() { return {}; }

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Form& form = form_of(op);
  size_t count = op.schema().arguments().size();
  auto in = torch::jit::last(*stack, count);
  if (form.draws) {
    std::optional<at::Generator> given;
    for (const IValue& value : in)
      if (value.isGenerator()) given = value.toGenerator();
    Place::draw(given);
  }
  Results results;
  if (form.made) {
    results = (*form.made)(in);
  } else if (form.makes || form.resizes) {
    results = by_meta(op, in);
  } else {
    for (int argument : form.given) results.push_back(in[argument]);
  }
  Touched touched;
  for (size_t position = 0; position < count; ++position)
    touched.add(in[position], form.written[position] && !form.overwrites ? 2 : 1);
  for (const IValue& result : results) touched.add(result, 1);
  Work kernel{touched.bytes, form.operations ? (*form.operations)(in, results) : 0, touched.kind};
  if (kernel.kind == Work::kF32 && form.convolves) kernel.kind = Work::kTf32;
  work(kernel, current_stream());
  torch::jit::drop(*stack, count);
  for (IValue& result : results) torch::jit::push(*stack, std::move(result));
}

}  // namespace stand_in
