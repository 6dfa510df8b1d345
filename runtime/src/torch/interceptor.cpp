#include "interceptor.h"

#include "allocator.h"
#include "entries.h"
#include "operators.h"
#include "recipe.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <chrono>
#include <memory>

namespace plimsoll {

std::string& refusal();

namespace {

PlimsollCallbacks callbacks;

// Operator facts by dispatcher entry. Operators run one at a time per session, and the autograd engine's threads
// take turns with the one that waits for them, but programs may have several threads of their own.
class FactsTable {
 public:
  const OperatorFacts& of(const c10::OperatorHandle& handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& facts = table_[handle.operator_name()];
    if (!facts) {
      facts = std::make_unique<OperatorFacts>(handle);
      facts->name = static_cast<uint32_t>(table_.size() - 1);
      callbacks.name(facts->name, facts->text.c_str());
    }
    return *facts;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorFacts>> table_;
};

FactsTable& facts_table() {
  static auto* table = new FactsTable();
  return *table;
}

uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint32_t phase() {
  if (torch::autograd::get_current_graph_task_id() != -1) return PLIMSOLL_BACKWARD;
  return c10::GradMode::is_enabled() ? PLIMSOLL_FORWARD : PLIMSOLL_UPDATE;
}

bool covers_storage(const c10::TensorImpl* tensor) {
  const auto& storage = tensor->unsafe_storage();
  return tensor->storage_offset() == 0 && tensor->is_non_overlapping_and_dense() &&
         tensor->numel() * tensor->itemsize() == storage.nbytes();
}

// One intercepted call: what it reads and writes, and its recipe where one is wanted. `run` reads as the algorithm.
class Call {
 public:
  Call(const OperatorFacts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : facts_(facts), keys_(keys), stack_(stack), arguments_(stack->data() + (stack->size() - facts.arguments.size())) {}

  void run() {
    find_accesses();
    PlimsollOperator event = describe();
    int32_t answer = callbacks.before(&event);
    TORCH_CHECK_WITH(OutOfMemoryError, answer >= 0, refusal());
    bool wants_recipe = answer & PLIMSOLL_RECIPE, wants_watch = answer & PLIMSOLL_WATCH;
    std::unique_ptr<Recipe> recipe = wants_recipe && !not_replayable_ ? record() : nullptr;
    try {
      reset_operator_peak();
      event.start_ns = now_ns();
      facts_.handle.redispatchBoxed(keys_, stack_);
      event.end_ns = now_ns();
      event.peak_bytes = operator_peak_bytes();
    } catch (...) {
      callbacks.failed();
      throw;
    }
    find_created(wants_watch && facts_.is_factory);
    event.created = created_.data();
    event.created_count = created_.size();
    event.not_replayable = not_replayable_;
    event.recipe = reinterpret_cast<PlimsollRecipe*>(recipe.release());
    callbacks.after(&event);
  }

 private:
  // Calls `visit(tensor or null, argument)` for every tensor argument, list elements included, in order.
  template <class Visit>
  void each_tensor(Visit visit) {
    for (size_t index = 0; index < facts_.arguments.size(); ++index) each_tensor_of(index, visit);
  }

  template <class Visit>
  void each_tensor_of(size_t index, Visit visit) {
    const Argument& argument = facts_.arguments[index];
    const c10::IValue& value = arguments_[index];
    if (argument.kind == Argument::Value || value.isNone()) return;
    if (value.isTensor()) {
      visit(value.unsafeToTensorImpl(), argument);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) visit(element.unsafeToTensorImpl(), argument);
    }
  }

  bool writes_statistics() const {
    int flag = facts_.training_argument;
    return flag < 0 || arguments_[flag].toBool();
  }

  void find_accesses() {
    not_replayable_ = facts_.not_replayable;
    each_tensor([&](c10::TensorImpl* tensor, const Argument& argument) {
      if (tensor == c10::UndefinedTensorImpl::singleton() || tensor->is_wrapped_number()) return;
      if (!has_plain_storage(tensor)) {
        not_replayable_ = "an input has no plain storage";
        if (!tensor->has_storage()) return;
      }
      if (facts_.reads_shape_only) return;
      access(tensor, argument);
    });
    size_t written = 0;
    for (const auto& access : accesses_) written += access.mode == PLIMSOLL_WRITE || access.mode == PLIMSOLL_OVERWRITE;
    if (written > 1) not_replayable_ = "writes several storages at once";
  }

  void access(c10::TensorImpl* tensor, const Argument& argument) {
    c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    uint32_t mode = PLIMSOLL_READ;
    if (argument.is_running_statistic && writes_statistics()) {
      mode = PLIMSOLL_SIDE_EFFECT;
      if (!argument.is_optional) not_replayable_ = "batch-norm whose statistics cannot be left out";
    } else if (argument.is_written) {
      mode = argument.is_overwritten && covers_storage(tensor) ? PLIMSOLL_OVERWRITE : PLIMSOLL_WRITE;
    }
    for (size_t index = 0; index < storages_.size(); ++index) {
      if (storages_[index] != storage) continue;
      // Read here and written there, or overwritten: what it held matters.
      uint32_t& seen = accesses_[index].mode;
      if (seen != mode && seen != PLIMSOLL_SIDE_EFFECT && mode != PLIMSOLL_SIDE_EFFECT) seen = PLIMSOLL_WRITE;
      return;
    }
    const char* locked = nullptr;
    if (!is_ours(storage->data_ptr()) && storage->data_ptr().get() && !is_absent(storage)) {
      locked = "not allocated by libtorch's allocator";
    } else if (!has_plain_storage(tensor)) {
      locked = "not a plain strided tensor";
    }
    PlimsollEntry entry = entries().of(storage);
    uint32_t filled = !is_absent(storage) && entries().has_changed(entry, *storage);
    storages_.push_back(storage);
    accesses_.push_back({entry, mode, storage->nbytes(), locked, filled});
  }

  static bool is_absent(c10::StorageImpl* storage) {
    static const auto deleter = absent_bytes(c10::Device(c10::kCPU), 0).get_deleter();
    return storage->data_ptr().get_deleter() == deleter;
  }

  PlimsollOperator describe() const {
    return {facts_.name,     phase(), not_replayable_, accesses_.data(), accesses_.size(), nullptr, 0,
            nullptr, 0,       0,       0};
  }

  std::unique_ptr<Recipe> record() {
    auto recipe = std::make_unique<Recipe>();
    recipe->facts = &facts_;
    recipe->keys = keys_;
    recipe->grad_mode = c10::GradMode::is_enabled();
    recipe->threads = at::get_num_threads();
    for (size_t index = 0; index < accesses_.size(); ++index)
      recipe->accesses.push_back(
          {static_cast<PlimsollMode>(accesses_[index].mode), storages_[index]->nbytes(), storages_[index]->device()});
    for (size_t index = 0; index < facts_.arguments.size(); ++index) recipe->arguments.push_back(record_argument(index));
    if (facts_.is_random) record_generator(*recipe);
    return recipe;
  }

  ArgumentRecord record_argument(size_t index) {
    ArgumentRecord record;
    const c10::IValue& value = arguments_[index];
    if (facts_.arguments[index].kind == Argument::Value) {
      record.value = value;
    } else if (value.isList()) {
      record.is_list = true;
      record.is_optional_list = !value.isTensorList();
      for (const c10::IValue& element : value.toListRef()) record.tensors.push_back(record_tensor(element));
    } else {
      record.tensors.push_back(record_tensor(value));
    }
    return record;
  }

  TensorRecord record_tensor(const c10::IValue& value) {
    TensorRecord record;
    if (!value.isTensor()) return record;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      record.kind = TensorRecord::Undefined;
      return record;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    record.type = impl->dtype();
    if (impl->is_wrapped_number()) {
      record.kind = TensorRecord::Number;
      record.number = tensor.item();
      return record;
    }
    if (facts_.reads_shape_only) {
      record.kind = TensorRecord::Shape;
      record.device = impl->device();
    } else {
      record.kind = TensorRecord::View;
      auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
      record.access = static_cast<uint32_t>(std::find(storages_.begin(), storages_.end(), storage) - storages_.begin());
    }
    record.keys = impl->key_set();
    record.offset = impl->storage_offset();
    record.sizes.assign(impl->sizes().begin(), impl->sizes().end());
    record.strides.assign(impl->strides().begin(), impl->strides().end());
    return record;
  }

  void record_generator(Recipe& recipe) {
    int index = facts_.generator_argument;
    c10::Device device = storages_.empty() ? c10::Device(c10::kCPU) : storages_[0]->device();
    recipe.generator = index >= 0 && arguments_[index].isGenerator() ? arguments_[index].toGenerator()
                                                                     : at::globalContext().defaultGenerator(device);
    Uncounted uncounted;
    std::lock_guard<std::mutex> lock(recipe.generator->mutex());
    recipe.generator_state = recipe.generator->get_state();
  }

  void find_created(bool watch) {
    std::vector<Storage> created;
    bool plain = collect_created(stack_->data() + (stack_->size() - facts_.returns), facts_.returns, storages_, created);
    if (!plain) not_replayable_ = "a result has no plain storage";
    for (const auto& storage : created) {
      const char* locked = !plain ? "made by an operator with a result of no plain storage"
                           : !is_ours(storage->data_ptr()) && storage->data_ptr().get()
                               ? "not allocated by libtorch's allocator"
                               : nullptr;
      PlimsollEntry entry = entries().of(storage.get());
      if (watch) entries().watch(entry, *storage);
      created_.push_back({entry, storage->nbytes(), locked});
    }
  }

  const OperatorFacts& facts_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack* stack_;
  const c10::IValue* arguments_;
  const char* not_replayable_ = nullptr;
  std::vector<c10::StorageImpl*> storages_;
  std::vector<PlimsollAccess> accesses_;
  std::vector<PlimsollCreated> created_;
};

void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptorKey);
  const OperatorFacts& facts = facts_table().of(handle);
  if (facts.is_transparent) {
    handle.redispatchBoxed(keys, stack);
    return;
  }
  // Whatever happens from here on is the interceptor's own or inside the operator.
  c10::impl::ExcludeDispatchKeyGuard not_again(kInterceptorKey);
  Call(facts, keys, stack).run();
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

// Views and composites cost nothing: they fall through to their own kernels.
void register_fallthroughs() {
  static torch::Library library(torch::Library::IMPL, "aten", kInterceptorKey, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.compare(0, 6, "aten::") != 0) continue;
    auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle || !OperatorFacts(*handle).is_transparent) continue;
    std::string bare = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(bare.c_str(), torch::CppFunction::makeFallthrough());
  }
}

}  // namespace

bool has_plain_storage(const c10::TensorImpl* tensor) {
  static const c10::DispatchKeySet odd({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                        c10::DispatchKey::Python, c10::DispatchKey::Quantized,
                                        c10::DispatchKey::NestedTensor, c10::DispatchKey::Functionalize,
                                        c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr});
  return tensor->has_storage() && !tensor->key_set().has_any(odd);
}

void install_interceptor(const PlimsollCallbacks& given) {
  callbacks = given;
  register_fallthroughs();
}

}  // namespace plimsoll
