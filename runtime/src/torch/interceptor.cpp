#include "interceptor.h"

#include "accelerator.h"
#include "allocator.h"
#include "entries.h"
#include "operators.h"
#include "recipe.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/max_pool1d_native.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_set>

namespace plimsoll {

std::string& refusal();

namespace {

PlimsollCallbacks callbacks;

// Operator facts by dispatcher entry: found without a lock, written under one.
class FactsTable {
 public:
  const OperatorFacts& of(const c10::OperatorHandle& handle) {
    // It stays where it is for as long as the operator is registered.
    const c10::OperatorName* key = &handle.operator_name();
    const Table& table = *table_.load(std::memory_order_acquire);
    for (size_t place = start(key, table);; ++place) {
      const OperatorFacts* facts = table.places[place & (table.size - 1)].load(std::memory_order_acquire);
      if (!facts) return add(handle, key);
      if (facts->key == key) return *facts;
    }
  }

 private:
  struct Table {
    explicit Table(size_t places_count) : size(places_count), places(new std::atomic<const OperatorFacts*>[places_count]()) {}
    size_t size;  // a power of two
    std::unique_ptr<std::atomic<const OperatorFacts*>[]> places;
  };

  static size_t start(const void* key, const Table& table) {
    return (reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15 >> 32) & (table.size - 1);
  }

  static void place(Table& table, const OperatorFacts* facts) {
    size_t place = start(facts->key, table);
    while (table.places[place & (table.size - 1)].load(std::memory_order_relaxed)) ++place;
    table.places[place & (table.size - 1)].store(facts, std::memory_order_release);
  }

  const OperatorFacts& add(const c10::OperatorHandle& handle, const c10::OperatorName* key) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : facts_)
      if (known->key == key) return *known;  // another thread came first
    facts_.push_back(std::make_unique<OperatorFacts>(handle));
    OperatorFacts& facts = *facts_.back();
    facts.name = static_cast<uint32_t>(facts_.size() - 1);
    facts.key = key;
    callbacks.name(facts.name, facts.text.c_str());
    Table* table = table_.load(std::memory_order_relaxed);
    if (2 * facts_.size() > table->size) {
      // Readers may be in the old table: it is left to them.
      auto* larger = new Table(2 * table->size);
      for (const auto& known : facts_) place(*larger, known.get());
      table_.store(larger, std::memory_order_release);
    } else {
      place(*table, &facts);
    }
    return facts;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<OperatorFacts>> facts_;
  std::atomic<Table*> table_{new Table(1024)};
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

// Looks for operators that do what their schema does not say.
class Search {
 public:
  std::atomic<bool> on{false};

  void found(std::string what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known_.insert(what).second) found_.push_back(std::move(what));
  }

  std::vector<std::string> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.clear();
    return std::exchange(found_, {});
  }

 private:
  std::mutex mutex_;
  std::unordered_set<std::string> known_;
  std::vector<std::string> found_;
};

Search& search() {
  static auto* search = new Search();
  return *search;
}

uint64_t generator_digest() {
  Uncounted uncounted;
  at::Generator generator = at::globalContext().defaultGenerator(counted_device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  return digest(*generator.get_state().storage().unsafeGetStorageImpl());
}

// Where to find a storage among those that an operator has used already: they are few, or else they are indexed.
class Seen {
 public:
  // The place of `storage` in `storages`, or their number.
  size_t find(c10::StorageImpl* storage, c10::ArrayRef<c10::StorageImpl*> storages) {
    if (storages.size() < kFew)
      return static_cast<size_t>(std::find(storages.begin(), storages.end(), storage) - storages.begin());
    if (!places_) places_ = std::make_unique<Places>();
    for (size_t index = places_->size(); index < storages.size(); ++index) places_->emplace(storages[index], index);
    auto found = places_->find(storage);
    return found == places_->end() ? storages.size() : found->second;
  }

 private:
  static constexpr size_t kFew = 24;
  using Places = ska::flat_hash_map<c10::StorageImpl*, size_t>;
  std::unique_ptr<Places> places_;
};

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
    bool wants_times = answer & PLIMSOLL_TIMES, searches = search().on.load(std::memory_order_relaxed);
    OwnedRecipe recipe;
    if ((answer & PLIMSOLL_RECIPE) && !not_replayable_)
      recipe = Recipe::record(facts_, keys_, arguments_, storages_, accesses_);
    std::vector<uint64_t> digests;
    std::vector<Storage> searched;  // the operator may hold the last reference to its input
    if (searches) {
      for (auto* storage : storages_) searched.push_back(Storage::reclaim_copy(storage));
      digests = digest_inputs();
    }
    try {
      reset_operator_peak();
      if (wants_times) {
        event.start_ns = now_ns();
        accelerator_operator_starts();
      }
      facts_.handle.redispatchBoxed(keys_, stack_);
      if (wants_times) {
        accelerator_operator_ends();
        event.end_ns = now_ns();
      }
      event.peak_bytes = operator_peak_bytes();
    } catch (...) {
      callbacks.failed();
      throw;
    }
    if (searches) compare_inputs(digests);
    find_created((answer & PLIMSOLL_WATCH) && facts_.is_factory);
    event.created = created_.data();
    event.created_count = created_.size();
    event.not_replayable = not_replayable_;
    event.recipe = reinterpret_cast<PlimsollRecipe*>(recipe.release());
    callbacks.after(&event);
  }

 private:
  // Calls `visit(tensor, argument)` for every tensor argument, list elements included, in order.
  template <class Visit>
  void each_tensor(Visit visit) {
    for (size_t index : facts_.tensor_arguments) {
      const Argument& argument = facts_.arguments[index];
      const c10::IValue& value = arguments_[index];
      if (value.isTensor()) {
        visit(value.unsafeToTensorImpl(), argument);
      } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef())
          if (element.isTensor()) visit(element.unsafeToTensorImpl(), argument);
      }
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
      bool plain = has_plain_storage(tensor);
      if (!plain) {
        not_replayable_ = "an input has no plain storage";
        if (!tensor->has_storage()) return;
      }
      if (facts_.reads_shape_only) return;
      access(tensor, argument, plain);
    });
    if (!facts_.writes) return;
    size_t written = 0;
    for (const auto& access : accesses_) written += access.mode == PLIMSOLL_WRITE || access.mode == PLIMSOLL_OVERWRITE;
    if (written > 1) not_replayable_ = "writes several storages at once";
  }

  void access(c10::TensorImpl* tensor, const Argument& argument, bool plain) {
    c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    uint32_t mode = PLIMSOLL_READ;
    if (argument.is_running_statistic && writes_statistics()) {
      mode = PLIMSOLL_SIDE_EFFECT;
      if (!argument.is_optional) not_replayable_ = "batch-norm whose statistics cannot be left out";
    } else if (argument.is_written) {
      mode = argument.is_overwritten && covers_storage(tensor) ? PLIMSOLL_OVERWRITE : PLIMSOLL_WRITE;
    }
    const char* locked = plain ? nullptr : "not a plain strided tensor";
    size_t index = seen_.find(storage, storages_);
    if (index < storages_.size()) {
      // Read here and written there, or overwritten: what it held matters.
      uint32_t& seen = accesses_[index].mode;
      if (seen != mode && seen != PLIMSOLL_SIDE_EFFECT && mode != PLIMSOLL_SIDE_EFFECT) seen = PLIMSOLL_WRITE;
      if (locked) accesses_[index].locked = locked;
      return;
    }
    bool absent = is_absent(storage->data_ptr());
    bool foreign = !absent && is_foreign(*storage);
    if (foreign) locked = "not allocated by libtorch's allocator";
    PlimsollEntry entry = entries().of(storage);
    uint32_t filled = !absent && entries().has_changed(entry, *storage);
    storages_.push_back(storage);
    // Bytes that our allocator does not count count nowhere.
    accesses_.push_back({entry, mode, foreign ? 0 : storage->nbytes(), locked, filled});
  }

  static bool is_foreign(const c10::StorageImpl& storage) {
    return !is_ours(storage.data_ptr()) && storage.data_ptr().get();
  }

  PlimsollOperator describe() const {
    return {facts_.name,     phase(), not_replayable_, accesses_.data(), accesses_.size(), nullptr, 0,
            nullptr, 0,       0,       0};
  }

  std::vector<uint64_t> digest_inputs() const {
    std::vector<uint64_t> digests{generator_digest()};
    for (auto* storage : storages_) digests.push_back(is_absent(storage->data_ptr()) ? 0 : digest(*storage));
    return digests;
  }

  void compare_inputs(const std::vector<uint64_t>& before) {
    auto now = digest_inputs();
    if (now[0] != before[0] && !facts_.is_random)
      search().found(facts_.text + " draws random numbers, and its schema does not say so");
    for (size_t index = 0; index < accesses_.size(); ++index) {
      if (accesses_[index].mode != PLIMSOLL_READ || now[1 + index] == before[1 + index]) continue;
      search().found(facts_.text + " writes its input " + std::to_string(index) + ", and its schema does not say so");
    }
  }

  void find_created(bool watch) {
    c10::SmallVector<c10::StorageImpl*, 8> created;
    bool plain = collect_created(stack_->data() + (stack_->size() - facts_.returns), facts_.returns, storages_, created);
    if (!plain) {
      not_replayable_ = "a result has no plain storage";
      // The result may hold them where no operator says so.
      for (auto& access : accesses_) access.locked = "used by an operator with a result of no plain storage";
    }
    for (auto* storage : created) {
      bool foreign = is_foreign(*storage);
      const char* locked = !plain    ? "made by an operator with a result of no plain storage"
                           : foreign ? "not allocated by libtorch's allocator"
                                     : nullptr;
      PlimsollEntry entry = entries().of(storage);
      // A program fills in past the dispatcher what the processor can reach.
      if (watch && storage->device().is_cpu()) entries().watch(entry, *storage);
      created_.push_back({entry, foreign ? 0 : storage->nbytes(), locked});
    }
  }

  const OperatorFacts& facts_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack* stack_;
  const c10::IValue* arguments_;
  const char* not_replayable_ = nullptr;
  Seen seen_;
  c10::SmallVector<c10::StorageImpl*, 8> storages_;
  c10::SmallVector<PlimsollAccess, 8> accesses_;
  c10::SmallVector<PlimsollCreated, 4> created_;
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

// A composite that reads bytes itself where no gradient is wanted, above the interceptor. There it is made one operator.
at::Tensor max_pool1d(const at::Tensor& input, at::IntArrayRef size, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, bool ceil_mode) {
  bool reads_bytes = !(input.requires_grad() && c10::GradMode::is_enabled());
  if (!reads_bytes || !c10::impl::tls_is_dispatch_key_included(kInterceptorKey))
    return at::native::max_pool1d(input, size, stride, padding, dilation, ceil_mode);
  static auto as_one = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("plimsoll::max_pool1d", "")
                           .typed<at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                                             at::IntArrayRef, bool)>();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return as_one.call(input, size, stride, padding, dilation, ceil_mode);
}

TORCH_LIBRARY(plimsoll, library) {
  library.def("max_pool1d(Tensor input, int[] size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor");
}
TORCH_LIBRARY_IMPL(plimsoll, CPU, library) { library.impl("max_pool1d", &at::native::max_pool1d); }
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("max_pool1d", &max_pool1d); }

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

void hash_inputs(bool on) { search().on = on; }
std::vector<std::string> take_undeclared() { return search().take(); }

void install_interceptor(const PlimsollCallbacks& given) {
  callbacks = given;
  if (const char* wanted = std::getenv("PLIMSOLL_HASH_INPUTS")) hash_inputs(std::string(wanted) == "1");
  register_fallthroughs();
}

}  // namespace plimsoll
