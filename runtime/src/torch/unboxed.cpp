#include "unboxed.h"

#include "call.h"
#include "interceptor.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>

namespace plimsoll {
namespace {

// Values that stand for arguments or results for as long as those live. Every tensor among them is borrowed: no
// reference is counted.
template <size_t kCount>
class Borrowed {
 public:
  Borrowed() = default;
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    for (auto& one : places_)
      if (one.value.isPtrType() && !one.value.isTensor()) one.value.~IValue();
  }

  c10::IValue& operator[](size_t index) { return places_[index].value; }
  const c10::IValue* data() const { return &places_[0].value; }

 private:
  // Not destroyed by itself: a borrowed tensor must not be.
  union Place {
    Place() : value() {}
    ~Place() {}
    c10::IValue value;
  };
  static_assert(sizeof(Place) == sizeof(c10::IValue));

  Place places_[kCount];
};

// `to` is nothing yet.
void lend(c10::IValue& to, const at::Tensor& tensor) {
  new (&to) c10::IValue(c10::MaybeOwnedTraits<at::TensorBase>::createBorrow(tensor));
}

// Which arguments can be put into a value without a stack: those that hold no tensor but the ones that they are.
template <class Value>
constexpr bool kIsSimple = std::is_arithmetic_v<Value> || std::is_enum_v<Value>;
template <>
constexpr bool kIsSimple<at::Scalar> = true;
template <>
constexpr bool kIsSimple<c10::SymInt> = true;
template <>
constexpr bool kIsSimple<c10::Device> = true;
template <>
constexpr bool kIsSimple<at::Generator> = true;
template <>
constexpr bool kIsSimple<std::string_view> = true;
template <class Number>
constexpr bool kIsSimple<c10::ArrayRef<Number>> = kIsSimple<Number>;
template <class Number>
constexpr bool kIsSimple<c10::OptionalArrayRef<Number>> = kIsSimple<Number>;
template <size_t kLength>
constexpr bool kIsSimple<std::array<bool, kLength>> = true;
template <class Value>
constexpr bool kIsSimple<std::optional<Value>> = kIsSimple<Value>;

// What says how an operator uses its tensors: those, and flags.
template <class Value>
void lend_argument(c10::IValue& to, const Value& value) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    lend(to, value);
  } else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) {
    if (value) lend(to, *value);
  } else {
    static_assert(kIsSimple<Value>, "an argument of this kind goes the boxed way");
    if constexpr (std::is_same_v<Value, bool>) new (&to) c10::IValue(value);
  }
}

// The rest, which a recipe alone needs. `to` is nothing yet.
template <class Value>
void complete_argument(c10::IValue& to, const Value& value) {
  constexpr bool is_tensor = std::is_same_v<Value, at::Tensor> || std::is_same_v<Value, std::optional<at::Tensor>>;
  if constexpr (!is_tensor && !std::is_same_v<Value, bool>) new (&to) c10::IValue(value);
}

template <class Result>
void lend_results(Borrowed<1>& to, const Result& result) {
  lend(to[0], result);
}
template <class... Results>
void lend_results(Borrowed<sizeof...(Results)>& to, const std::tuple<Results...>& results) {
  size_t index = 0;
  std::apply([&](const auto&... result) { (lend(to[index++], result), ...); }, results);
}

template <class Result>
constexpr size_t kResults = 1;
template <class... Results>
constexpr size_t kResults<std::tuple<Results...>> = sizeof...(Results);

// The kernel of one operator.
template <class Operator, class Signature>
struct Kernel;

template <class Operator, class Result, class... Arguments>
struct Kernel<Operator, Result(Arguments...)> {
  static const OperatorFacts& facts() {
    static const OperatorFacts& facts =
        facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(Operator::name, Operator::overload_name));
    return facts;
  }

  // The other way, for what is not to be taken at its word: see intercept().
  static Result run_boxed(c10::DispatchKeySet keys, Arguments... arguments) {
    static const auto boxed = c10::BoxedKernel::makeFromFunction<&intercept>();
    return c10::impl::BoxedKernelWrapper<Result(Arguments...)>::call(boxed, facts().handle, keys,
                                                                     std::forward<Arguments>(arguments)...);
  }

  // Of what has nothing to be intercepted.
  static Result pass(c10::DispatchKeySet keys, Arguments... arguments) {
    if (C10_UNLIKELY(is_taken_over(keys) || is_nested(keys))) return run_boxed(keys, std::forward<Arguments>(arguments)...);
    return Operator::redispatch(keys & kBelowInterceptor, std::forward<Arguments>(arguments)...);
  }

  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    if (C10_UNLIKELY(is_taken_over(keys))) return run_boxed(keys, std::forward<Arguments>(arguments)...);
    keys = keys & kBelowInterceptor;
    // Whatever happens from here on is the interceptor's own or inside the operator.
    c10::impl::ExcludeDispatchKeyGuard not_again(kNotIntercepted);
    Borrowed<sizeof...(Arguments)> values;
    size_t index = 0;
    (lend_argument(values[index++], arguments), ...);
    auto complete = [&] {
      size_t at = 0;
      (complete_argument(values[at++], arguments), ...);
    };
    Borrowed<kResults<std::decay_t<Result>>> lent;
    Call call(facts(), keys, values.data());
    if constexpr (std::is_reference_v<Result>) {
      at::Tensor* written = nullptr;
      call.run(complete, [&] {
        written = &Operator::redispatch(keys, std::forward<Arguments>(arguments)...);
        lend_results(lent, *written);
        return lent.data();
      });
      return *written;
    } else {
      Result result;
      call.run(complete, [&] {
        result = Operator::redispatch(keys, std::forward<Arguments>(arguments)...);
        lend_results(lent, result);
        return lent.data();
      });
      return result;
    }
  }

  static std::string name() {
    return std::string(Operator::name) + (*Operator::overload_name ? "." : "") + Operator::overload_name;
  }
};

template <class... Operators>
void add_views(torch::Library& library) {
  auto add = [&](auto kernel) {
    TORCH_CHECK(kernel.facts().is_transparent, kernel.name(), " is intercepted");
    library.impl(kernel.name().c_str(), TORCH_FN(&decltype(kernel)::pass));
  };
  (add(Kernel<Operators, typename Operators::schema>()), ...);
}

template <class... Operators>
void add_all(torch::Library& library) {
  auto add = [&](auto kernel) {
    TORCH_CHECK(!kernel.facts().is_transparent, kernel.name(), " is not intercepted");
    library.impl(kernel.name().c_str(), TORCH_FN(&decltype(kernel)::run));
  };
  (add(Kernel<Operators, typename Operators::schema>()), ...);
}

}  // namespace

void register_unboxed(torch::Library& library) {
  namespace ops = at::_ops;
  // Views.
  add_views<ops::_reshape_alias, ops::_unsafe_view, ops::alias, ops::as_strided, ops::detach, ops::diagonal, ops::expand,
            ops::lift_fresh, ops::permute, ops::select_int, ops::slice_Tensor, ops::split_Tensor, ops::split_with_sizes,
            ops::squeeze, ops::squeeze_dim, ops::squeeze_dims, ops::t, ops::transpose_int, ops::unbind_int, ops::unfold,
            ops::unsqueeze, ops::view, ops::view_dtype>(library);
  // Arithmetic.
  add_all<ops::add_Tensor, ops::add__Tensor, ops::add_Scalar, ops::add__Scalar, ops::sub_Tensor, ops::sub__Tensor,
          ops::sub_Scalar, ops::mul_Tensor, ops::mul__Tensor, ops::mul_Scalar, ops::mul__Scalar, ops::div_Tensor,
          ops::div__Tensor, ops::div_Scalar, ops::div__Scalar, ops::neg, ops::exp, ops::sqrt, ops::sqrt_, ops::rsqrt,
          ops::reciprocal, ops::pow_Tensor_Scalar, ops::addcmul, ops::addcmul_, ops::addcdiv, ops::addcdiv_,
          ops::lerp__Scalar, ops::clamp, ops::eq_Tensor, ops::eq_Scalar, ops::gt_Scalar, ops::ge_Scalar,
          ops::where_self, ops::masked_fill_Scalar>(library);
  // Products.
  add_all<ops::mm, ops::bmm, ops::addmm, ops::baddbmm, ops::convolution, ops::convolution_backward>(library);
  // Activations and dropout.
  add_all<ops::relu, ops::relu_, ops::threshold_backward, ops::sigmoid, ops::sigmoid_backward, ops::tanh,
          ops::tanh_backward, ops::silu, ops::silu_backward, ops::gelu, ops::gelu_backward, ops::_softmax,
          ops::_softmax_backward_data, ops::_log_softmax, ops::_log_softmax_backward_data, ops::native_dropout,
          ops::native_dropout_backward, ops::bernoulli__float>(library);
  // Normalisation, pooling and sums.
  add_all<ops::native_layer_norm, ops::native_layer_norm_backward, ops::native_batch_norm,
          ops::native_batch_norm_backward, ops::sum, ops::sum_dim_IntList, ops::mean, ops::mean_dim,
          ops::max_pool2d_with_indices, ops::max_pool2d_with_indices_backward, ops::_adaptive_avg_pool2d,
          ops::_adaptive_avg_pool2d_backward>(library);
  // Embeddings and losses.
  add_all<ops::embedding, ops::embedding_dense_backward, ops::nll_loss_forward, ops::nll_loss_backward>(library);
  // Storages made, copied and filled.
  add_all<ops::empty_memory_format, ops::zeros, ops::ones, ops::zeros_like, ops::ones_like, ops::clone, ops::_to_copy,
          ops::copy_, ops::zero_, ops::fill__Scalar>(library);
}

}  // namespace plimsoll
