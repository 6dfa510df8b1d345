#include "operators.h"

#include "composites.h"
#include "entries.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace plimsoll {
namespace {

using Names = std::unordered_set<std::string>;

// They alias their input though the schema does not say so.
const Names kUndeclaredViews = {"_unsafe_view",  "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes",
                                "lift",          "sym_size",     "sym_numel",    "sym_stride",
                                "sym_storage_offset", "is_same_size"};
// They read the shape of their first argument, never its bytes.
const Names kShapeOnly = {"empty_like", "zeros_like",  "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
                          "new_empty",  "new_zeros",   "new_ones",  "new_full",  "new_empty_strided"};
// They replace what their first argument holds without reading it.
const Names kOverwriting = {"bernoulli_", "fill_", "zero_", "normal_", "uniform_", "copy_", "random_", "exponential_"};
const Names kResizing = {"resize_", "resize_as_", "set_", "_resize_output_", "resize_storage_bytes_"};
// They write running statistics, whether the schema says so or not.
const Names kBatchNorm = {"native_batch_norm",       "cudnn_batch_norm",         "miopen_batch_norm",
                          "_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_update_stats",
                          "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"};

// Arguments that they write though the schema does not say so: what libraries keep for a backward pass, or draw from.
const std::unordered_map<std::string, std::string> kUndeclaredWrites = {{"mkldnn_rnn_layer_backward", "workspace"},
                                                                        {"_cudnn_rnn", "dropout_state"},
                                                                        {"_cudnn_rnn_backward", "reserve"},
                                                                        {"_saturate_weight_to_fp16", "weight"},
                                                                        {"resize_storage_bytes_", "variable"},
                                                                        {"region", "written"},
                                                                        {"region_once", "written"},
                                                                        {"touch", "written"}};
// They return what their input, a quantized tensor, goes by itself.
const Names kOfQuantizer = {"q_per_channel_scales", "q_per_channel_zero_points"};
// Inductor's that call others by what they find in their arguments.
const Names kLikeComposites = {"accumulate_grad_"};
// They cannot be told what a rerun would have to be, or are for what happens around them.
const Names kOnce = {"record_stream", "region_once", "touch"};

// They work out each place of their lists by itself, as those do whose names begin with `_foreach_`.
const Names kByPlace = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_amp_foreach_non_finite_check_and_unscale_"};
// Their kernel has scratch space for all places together, where what one leaves free counts as nought.
const Names kNotByPlace = {"_foreach_max"};
// Nor do operators with such an argument: results that may be inputs of other places; which dimension of all of them.
const Names kOfAllPlaces = {"out", "dim"};

c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->expect<c10::OptionalType>()->getElementType() : type;
}

Argument::Kind kind_of(const c10::TypePtr& declared) {
  auto type = without_optional(declared);
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Argument::Tensor;
    case c10::TypeKind::ListType: {
      auto element = without_optional(type->expect<c10::ListType>()->getElementType());
      if (element->kind() == c10::TypeKind::TensorType) return Argument::Tensor;
      bool plain = element->kind() != c10::TypeKind::ListType && element->kind() != c10::TypeKind::ClassType;
      return plain ? Argument::Value : Argument::Opaque;
    }
    case c10::TypeKind::DictType:
    case c10::TypeKind::TupleType:
    case c10::TypeKind::ClassType:
    case c10::TypeKind::AnyType:
      return Argument::Opaque;
    case c10::TypeKind::StorageType:
      return Argument::Storage;
    default:
      return Argument::Value;
  }
}

// Whether an argument is, or has elements that are, objects of C++ classes.
bool has_objects(const c10::TypePtr& declared) {
  auto type = without_optional(declared);
  if (type->kind() == c10::TypeKind::ListType) type = without_optional(type->expect<c10::ListType>()->getElementType());
  return type->kind() == c10::TypeKind::ClassType;
}

bool is_list(const c10::TypePtr& type) {
  if (type->kind() != c10::TypeKind::ListType) return false;
  auto element = type->expect<c10::ListType>()->getElementType()->kind();
  return element == c10::TypeKind::TensorType || element == c10::TypeKind::NumberType;
}

bool works_by_place(const c10::FunctionSchema& schema, const std::string& bare) {
  if (kNotByPlace.count(bare) || (!kByPlace.count(bare) && bare.rfind("_foreach_", 0) != 0)) return false;
  for (const auto& argument : schema.arguments()) {
    // One tensor of numbers for all places.
    bool is_split = argument.name() == "scalars" && argument.type()->kind() == c10::TypeKind::TensorType;
    if (is_split || kOfAllPlaces.count(argument.name())) return false;
  }
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) { return is_list(result.type()); });
}

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& operator_handle) : handle(operator_handle) {
  const auto& schema = handle.schema();
  const std::string& qualified = schema.name();
  std::string space = qualified.substr(0, qualified.find("::"));
  std::string bare = qualified.substr(qualified.find("::") + 2);
  text = schema.overload_name().empty() ? qualified : qualified + "." + schema.overload_name();
  returns = schema.returns().size();

  bool is_batch_norm = kBatchNorm.count(bare) > 0, reads_shape = kShapeOnly.count(bare) > 0;
  bool foreign = space != "aten" && space != "prims" && space != "plimsoll";
  bool communicates = space.find("c10d") != std::string::npos || bare == "communicating_region";
  // It goes on when the operator has returned.
  if (communicates) locks = "may be on its way to other processes, or from them";
  if (kOfQuantizer.count(bare)) locks = "a part of a quantized tensor";
  if (bare == "replaced" || bare == "resize_storage_bytes_") locks = "changes its size";
  is_region = space == "plimsoll" && bare == "region";
  if (space == "plimsoll" && bare == "lend") locks = kLent;
  if (space == "plimsoll" && bare == "keep") locks = kKept;
  reads_storage = space == "plimsoll" && (bare == "read" || bare == "keep");
  auto hidden_write = kUndeclaredWrites.find(bare);
  bool opaque = false, takes_storage = false, by_place = space == "aten" && works_by_place(schema, bare);
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const auto& declared = schema.arguments()[index];
    Argument argument;
    argument.kind = kind_of(declared.type());
    argument.is_optional = declared.type()->kind() == c10::TypeKind::OptionalType;
    // A stream that is recorded changes no bytes, though it is declared so.
    bool declared_write = declared.alias_info() && declared.alias_info()->isWrite() && bare != "record_stream";
    declared_write |= hidden_write != kUndeclaredWrites.end() && hidden_write->second == declared.name();
    argument.is_of_shape = index == 0 && reads_shape;
    bool statistic = is_batch_norm && (declared.name() == "running_mean" || declared.name() == "running_var");
    argument.is_running_statistic = statistic;
    bool may_be_written = declared_write || communicates || argument.kind == Argument::Opaque;
    argument.is_written = argument.kind != Argument::Value && !statistic && may_be_written;
    argument.is_overwritten = argument.is_written && index == 0 && kOverwriting.count(bare) > 0;
    opaque |= argument.kind == Argument::Opaque;
    takes_storage |= argument.kind == Argument::Storage;
    // Those of processes that communicate hold none.
    takes_objects |= has_objects(declared.type()) && !communicates;
    writes |= argument.is_written;
    if (argument.is_written && declared.kwarg_only()) outs.push_back(index);
    if (is_batch_norm && (declared.name() == "training" || declared.name() == "train")) training_argument = static_cast<int>(index);
    if (without_optional(declared.type())->kind() == c10::TypeKind::GeneratorType) generator_argument = static_cast<int>(index);
    if (argument.kind != Argument::Value) tensor_arguments.push_back(index);
    if (by_place && is_list(declared.type())) {
      lists.push_back(index);
      ends_with_steps = declared.name() == "state_steps";
    }
    arguments.push_back(argument);
  }

  bool is_alias = kUndeclaredViews.count(bare) > 0;
  for (const auto& result : schema.returns()) is_alias |= result.alias_info() && !result.alias_info()->isWrite();
  std::string overload = text.substr(space.size() + 2);
  // Some have a kernel of their own on a GPU alone.
  bool has_kernel = handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                    (counts_accelerator() && handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA));
  bool is_composite = !runs_as_one(overload) && !has_kernel &&
                      handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  is_view = is_alias && !writes && !is_composite;
  is_transparent = is_composite || is_view || (space == "inductor" && kLikeComposites.count(bare) > 0);
  keeps_addresses = is_transparent && plimsoll::keeps_addresses(overload);
  is_random = handle.hasTag(at::Tag::nondeterministic_seeded);

  bool has_tensor = false;
  for (const auto& argument : arguments) has_tensor |= argument.kind == Argument::Tensor;
  if (foreign) {
    not_replayable = "not an ATen operator";
  } else if (communicates || kOnce.count(bare)) {
    not_replayable = "has an effect beside its tensors, or needs more than those";
  } else if (opaque) {
    not_replayable = "an argument may hide tensors";
  } else if (takes_storage || kResizing.count(bare)) {
    not_replayable = "changes the size or the identity of a storage";
  } else if (bare.find("empty") != std::string::npos) {
    not_replayable = "its bytes are undefined";
  }
  is_factory = !has_tensor || reads_shape;
}

}  // namespace plimsoll
