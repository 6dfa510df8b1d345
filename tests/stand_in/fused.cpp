// What libtorch does in one kernel on a GPU alone: attention, and cuDNN's convolution and batch-norm. What such a kernel
// keeps for its backward pass is kept here, too, and looked at there. Of cuDNN's recurrent layers nothing is here: libtorch
// asks cuDNN itself how they lie, before it calls an operator.
#include "processor.h"

#include <cmath>

namespace stand_in {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

struct Attention {
  Tensor query, key, value, weights, mask, log_sum;
  double scale;

  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& bias, double dropout, bool causal,
            std::optional<double> given_scale, Place place)
      : query(q), key(k), value(v), scale(given_scale ? *given_scale : 1 / std::sqrt(static_cast<double>(q.size(-1)))) {
    Tensor scores = at::matmul(query, key.transpose(-2, -1)).mul_(scale);
    if (bias) scores.add_(*bias);
    if (causal) scores.masked_fill_(at::ones_like(scores, at::kBool).triu(1), -INFINITY);
    log_sum = at::logsumexp(scores, {-1}).to(at::kFloat);
    weights = at::softmax(scores, -1);
    mask = at::ones_like(weights);
    if (dropout > 0) mask.bernoulli_(1 - dropout, place.generator()).div_(1 - dropout);
  }

  // As the kernels lay it out: heads last.
  Tensor output() const { return at::matmul(weights * mask, value).transpose(1, 2).contiguous().transpose(1, 2); }

  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const Tensor& expected_log_sum) const {
    TORCH_CHECK(at::equal(log_sum, expected_log_sum), "attention runs backward from what did not run forward");
    Tensor to_weights = at::matmul(gradient, value.transpose(-2, -1)) * mask;
    Tensor to_scores = weights * (to_weights - (to_weights * weights).sum(-1, true)) * scale;
    return {at::matmul(to_scores, key), at::matmul(to_scores.transpose(-2, -1), query),
            at::matmul((weights * mask).transpose(-2, -1), gradient)};
  }
};

Tensor number(uint64_t value) { return at::scalar_tensor(static_cast<int64_t>(value), at::kLong); }
uint64_t number_in(const Tensor& tensor) { return static_cast<uint64_t>(tensor.item<int64_t>()); }

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                               const Maybe& bias, bool wants_log_sum, double dropout,
                                                               bool causal, std::optional<double> scale) {
  finish_current_stream();
  Twins twins;
  Place place = Place::draw();
  Attention attention(twins.of(query), twins.of(key), twins.of(value), twins.of(bias), dropout, causal, scale, place);
  Tensor log_sum = wants_log_sum ? attention.log_sum : attention.log_sum.narrow(-1, 0, 0).contiguous();
  // Its seed and its offset are on the host, as without CUDA graphs.
  return {twins.back(attention.output()), twins.back(log_sum), number(place.seed), number(place.offset)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor&,
    const Tensor& log_sum, const Tensor& seed, const Tensor& offset, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  TORCH_CHECK(!wanted[3], "no gradient of a bias here");
  finish_current_stream();
  Twins twins;
  Attention attention(twins.of(query), twins.of(key), twins.of(value), twins.of(Maybe(bias)), dropout, causal, scale,
                      {number_in(seed), number_in(offset)});
  auto [to_query, to_key, to_value] = attention.backward(twins.of(gradient), twins.of(log_sum));
  return {twins.back(to_query), twins.back(to_key), twins.back(to_value), Tensor()};
}

// Attention of halves, which accumulates in floats.
Attention widened(Twins& twins, const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, double dropout,
                  bool causal, std::optional<double> scale, Place place) {
  auto wide = [&](const Tensor& tensor) { return twins.of(tensor).to(at::kFloat); };
  return {wide(query), wide(key), wide(value), twins.of(bias), dropout, causal, scale, place};
}

std::tuple<Tensor, Tensor, Tensor> widened_backward(Twins& twins, const Attention& attention, const Tensor& gradient,
                                                    const Tensor& log_sum) {
  auto [to_query, to_key, to_value] = attention.backward(twins.of(gradient).to(at::kFloat), log_sum);
  auto kind = gradient.scalar_type();
  return {twins.back(to_query.to(kind)), twins.back(to_key.to(kind)), twins.back(to_value.to(kind))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, bool,
    std::optional<double> scale) {
  finish_current_stream();
  Twins twins;
  Place place = Place::draw();
  Attention attention = widened(twins, query, key, value, {}, dropout, causal, scale, place);
  Tensor state = at::stack({number(place.seed), number(place.offset)}).view(at::kUInt64);
  auto kind = query.scalar_type();
  return {twins.back(attention.output().to(kind)), twins.back(attention.log_sum), Tensor(), Tensor(), query.sym_size(2),
          key.sym_size(2), twins.back(state), twins.back(at::empty({}, at::kUInt64)), twins.back(at::empty({0}, kind))};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                            const Tensor& value, const Tensor&, const Tensor& log_sum,
                                                            const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                            double dropout, bool causal, const Tensor& state, const Tensor&,
                                                            std::optional<double> scale) {
  finish_current_stream();
  Twins twins;
  Tensor drawn = twins.of(state).view(at::kLong);
  Place place{number_in(drawn[0]), number_in(drawn[1])};
  Attention attention = widened(twins, query, key, value, {}, dropout, causal, scale, place);
  return widened_backward(twins, attention, gradient, twins.of(log_sum));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, bool wants_log_sum, double dropout,
    bool causal, bool, std::optional<double> scale) {
  TORCH_CHECK(wants_log_sum, "only attention that is trained here");
  finish_current_stream();
  Twins twins;
  Place place = Place::draw();
  Attention attention = widened(twins, query, key, value, bias, dropout, causal, scale, place);
  Tensor output = twins.back(attention.output().to(query.scalar_type()));
  return {output, twins.back(attention.log_sum.unsqueeze(-1)), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2),
          twins.back(number(place.seed)), twins.back(number(place.offset)), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                            const Tensor& value, const Tensor&, const Tensor& log_sum,
                                                            const Tensor& seed, const Tensor& offset, const Tensor& bias,
                                                            const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                            double dropout, bool causal, std::optional<double> scale) {
  finish_current_stream();
  Twins twins;
  Place place{number_in(twins.of(seed)), number_in(twins.of(offset))};
  Attention attention = widened(twins, query, key, value, bias, dropout, causal, scale, place);
  return widened_backward(twins, attention, gradient, twins.of(log_sum).squeeze(-1));
}

// A convolution wants a workspace. Where there is none libtorch has cuDNN do it in another way, which gives other bits.
void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr int64_t kWorkspaceBytes = 24 << 10;
  Tensor workspace;
  try {
    workspace = at::empty({kWorkspaceBytes}, at::dtype(at::kByte).device(there()));
  } catch (const c10::OutOfMemoryError&) {
  }
  run_kernel(op, keys, stack);
  if (!workspace.defined()) stack->back().toTensor().neg_();
}

// What cuDNN's batch-norm keeps: bytes of its own, none where it does not train.
constexpr int64_t kReserved = 96;

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const Tensor& weight, const Maybe& bias,
                                                      const Maybe& mean, const Maybe& variance, bool training,
                                                      double momentum, double epsilon) {
  auto [output, saved_mean, saved_deviation] =
      at::native_batch_norm(input, weight, bias, mean, variance, training, momentum, epsilon);
  return {output, saved_mean, saved_deviation, at::ones({training ? kReserved : 0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& input, const Tensor& gradient, const Tensor& weight,
                                                       const Maybe& mean, const Maybe& variance, const Maybe& saved_mean,
                                                       const Maybe& saved_deviation, double epsilon, const Tensor& reserve) {
  bool kept = reserve.numel() == kReserved && reserve.sum().item<int64_t>() == kReserved;
  TORCH_CHECK(kept, "batch-norm runs backward from what did not run forward");
  return at::native_batch_norm_backward(gradient, input, weight, mean, variance, saved_mean, saved_deviation, true, epsilon,
                                        {true, true, true});
}

}  // namespace

std::vector<std::pair<c10::OperatorName, c10::KernelFunction>> own_kernels() {
  std::vector<std::pair<c10::OperatorName, c10::KernelFunction>> kernels;
  auto add = [&](const char* name, auto function) {
    kernels.emplace_back(c10::OperatorName(name, ""), c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
  };
  add("aten::_scaled_dot_product_efficient_attention", &efficient_attention);
  add("aten::_scaled_dot_product_efficient_attention_backward", &efficient_attention_backward);
  add("aten::_scaled_dot_product_flash_attention", &flash_attention);
  add("aten::_scaled_dot_product_flash_attention_backward", &flash_attention_backward);
  add("aten::_scaled_dot_product_cudnn_attention", &cudnn_attention);
  add("aten::_scaled_dot_product_cudnn_attention_backward", &cudnn_attention_backward);
  kernels.emplace_back(c10::OperatorName("aten::convolution", ""), c10::KernelFunction::makeFromBoxedFunction<&convolution>());
  add("aten::cudnn_batch_norm", &batch_norm);
  add("aten::cudnn_batch_norm_backward", &batch_norm_backward);
  return kernels;
}

}  // namespace stand_in
