#include "interceptor.h"

#include "call.h"
#include "composites.h"
#include "entries.h"
#include "lists.h"
#include "objects.h"
#include "operators.h"
#include "unboxed.h"

#include <ATen/ATen.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace plimsoll {

namespace {

// Operator facts by dispatcher entry: found without a lock, written under one.
class FactsTable {
 public:
  const OperatorFacts& of(const c10::OperatorHandle& handle) {
    // It stays where it is for as long as the operator is registered.
    const c10::OperatorName* key = &handle.operator_name();
    const OperatorFacts* known = find(key);
    return C10_LIKELY(known != nullptr) ? *known : add(handle, key);
  }

  // The operator is registered no more. Another one may get its place.
  void retire(const c10::OperatorHandle& handle) {
    if (OperatorFacts* known = find(&handle.operator_name())) known->key.store(nullptr, std::memory_order_relaxed);
  }

 private:
  struct Table {
    explicit Table(size_t places_count) : size(places_count), places(new std::atomic<OperatorFacts*>[places_count]()) {}
    size_t size;  // a power of two
    std::unique_ptr<std::atomic<OperatorFacts*>[]> places;
  };

  OperatorFacts* find(const c10::OperatorName* key) const {
    const Table& table = *table_.load(std::memory_order_acquire);
    for (size_t place = start(key, table);; ++place) {
      OperatorFacts* facts = table.places[place & (table.size - 1)].load(std::memory_order_acquire);
      if (!facts || facts->key.load(std::memory_order_relaxed) == key) return facts;
    }
  }

  static size_t start(const void* key, const Table& table) {
    return (reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15 >> 32) & (table.size - 1);
  }

  static void place(Table& table, OperatorFacts* facts) {
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

FactsTable& facts_table = *new FactsTable();  // outlives every operator

class Retiring : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override { facts_table.retire(handle); }
};
[[maybe_unused]] auto& retiring =
    *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Retiring>()));

// What libtorch's own fallback for Python excludes while the program's Python code runs an operator, but for the interceptor.
constexpr c10::DispatchKeySet kAbovePython =
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
     c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python)) -
    c10::DispatchKeySet({c10::DispatchKey::Python, kInterceptorKey, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate,
                         c10::DispatchKey::Negative});

// Has the program run an operator that it takes over: in a dispatch mode, or with tensors of a class of its own. The operators
// that this takes are intercepted, not the one that it stands for.
void run_in_python(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (handle.hasKernelForDispatchKey(c10::DispatchKey::Python)) return handle.redispatchBoxed(keys, stack);
  c10::impl::ExcludeDispatchKeyGuard below(kAbovePython);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(handle, stack);
}

// A view, or a composite, which calls others. What nested tensors go by stays from when they are made, or seen.
void run_transparent(const OperatorFacts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(*stack, facts.arguments.size());
  std::optional<KeptAddresses> kept;
  if (C10_UNLIKELY(facts.keeps_addresses)) kept.emplace(facts.handle, arguments.data());
  if (C10_UNLIKELY(is_nested(keys)))
    for (const c10::IValue& argument : arguments) keep_parts(argument);
  {
    std::optional<c10::impl::ExcludeDispatchKeyGuard> by_itself;
    if (C10_UNLIKELY(facts.is_view && is_nested(keys))) by_itself.emplace(kNotIntercepted);
    facts.handle.redispatchBoxed(keys, stack);
  }
  for (const c10::IValue& result : torch::jit::last(*stack, facts.returns)) keep_parts(result);
}

void run_whole(const OperatorFacts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::IValue* arguments = torch::jit::last(*stack, facts.arguments.size()).data();
  Call(facts, keys, arguments).run([] {}, [&] {
    facts.handle.redispatchBoxed(keys, stack);
    return stack->data() + (stack->size() - facts.returns);
  });
}

void run_in_pieces(const OperatorFacts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack, c10::ArrayRef<size_t> ends) {
  std::vector<c10::impl::GenericList> results;
  for (size_t index = 0; index < facts.returns; ++index) results.emplace_back(c10::TensorType::get());
  const c10::IValue* arguments = torch::jit::last(*stack, facts.arguments.size()).data();
  size_t begin = 0;
  for (size_t end : ends) {
    auto piece = piece_of(facts, arguments, begin, end);
    run_whole(facts, keys, &piece);
    for (size_t index = 0; index < facts.returns; ++index)
      for (const c10::IValue& result : piece[index].toListRef()) results[index].push_back(result);
    begin = end;
  }
  torch::jit::drop(*stack, facts.arguments.size());
  for (auto& result : results) stack->emplace_back(std::move(result));
}

}  // namespace

void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & kBelowInterceptor;
  if (C10_UNLIKELY(is_taken_over(keys))) return run_in_python(handle, keys, stack);
  if (C10_UNLIKELY(!is_in_use())) return handle.redispatchBoxed(keys, stack);
  const OperatorFacts& facts = facts_table.of(handle);
  if (facts.is_transparent) return run_transparent(facts, keys, stack);
  // Whatever happens from here on is the interceptor's own or inside the operator.
  c10::impl::ExcludeDispatchKeyGuard not_again(kNotIntercepted);
  if (C10_UNLIKELY(facts.takes_objects))
    for (const c10::IValue& argument : torch::jit::last(*stack, facts.arguments.size())) keep_held(argument);
  if (C10_UNLIKELY(!facts.lists.empty())) {
    auto ends = pieces(facts, torch::jit::last(*stack, facts.arguments.size()).data());
    if (!ends.empty()) return run_in_pieces(facts, keys, stack, ends);
  }
  run_whole(facts, keys, stack);
}

namespace {

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

// A copy that is made when somebody writes would take the bytes of what it is a copy of into its keeping, where nothing can evict them
// or tell whose they are: it is made now. It lies in its storage as that does.
void clone_at_once(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_taken_over(keys & kBelowInterceptor) || !is_in_use()) return intercept(handle, keys, stack);
  at::Tensor source = torch::jit::pop(*stack).toTensor();
  auto elements = static_cast<int64_t>(source.storage().nbytes() / source.element_size());
  at::Tensor all = source.as_strided({elements}, {1}, 0).clone();
  torch::jit::push(*stack, all.as_strided(source.sizes(), source.strides(), source.storage_offset()));
}

class InterceptedAgain {
 public:
  InterceptedAgain() { c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, false); }
  ~InterceptedAgain() { c10::impl::tls_set_dispatch_key_excluded(kInterceptorKey, true); }
};

// Where libtorch makes a tensor of a list it leaves the interceptor out, and reads the tensors in the list all the same.
at::Scalar local_scalar_dense(c10::DispatchKeySet keys, const at::Tensor& tensor) {
  auto local = c10::impl::tls_local_dispatch_key_set();
  if (local.included_.has(kInterceptorKey) && local.excluded_.has(kInterceptorKey) && !local.excluded_.has_all(kNotIntercepted)) {
    InterceptedAgain again;
    return at::_ops::_local_scalar_dense::call(tensor);
  }
  return at::_ops::_local_scalar_dense::redispatch(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), tensor);
}

// What no operator does is announced: the bytes of a storage are about to be replaced; or they are about to be read by their
// address, or for longer: see composites.h.
void announce(const at::Storage&) {}
// Or they are, and written, whenever somebody likes, who shares them from then on.
void lend_storage(const at::Storage& storage) { entries().lend(storage.unsafeGetStorageImpl()); }
// It has got others.
at::Storage replaced(const at::Storage& storage) { return storage; }

// Announces that tensors are about to be used by their addresses.
void touch(at::TensorList, at::TensorList) {}

TORCH_LIBRARY(plimsoll, library) {
  library.def("replaces(Storage(a!) storage) -> ()");
  library.def("replaced(Storage storage) -> Storage");
  library.def("read(Storage storage) -> ()");
  library.def("keep(Storage storage) -> ()");
  library.def("lend(Storage(a!) storage) -> ()");
  library.def("touch(Tensor[] read, Tensor[] written) -> ()");
}
TORCH_LIBRARY_IMPL(plimsoll, CompositeExplicitAutograd, library) {
  library.impl("replaces", &announce);
  library.impl("replaced", &replaced);
  library.impl("read", &announce);
  library.impl("keep", &announce);
  library.impl("lend", &lend_storage);
  library.impl("touch", &touch);
}
// By no dispatch mode, and no class of tensors: the program has not called them.
void run_unseen(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard unseen(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch}));
  handle.callBoxed(stack);
}
void be_unseen(torch::Library& library) {
  for (const char* name : {"replaces", "replaced", "read", "keep", "lend", "touch"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_unseen>());
}
TORCH_LIBRARY_IMPL(plimsoll, Python, library) { be_unseen(library); }
TORCH_LIBRARY_IMPL(plimsoll, PreDispatch, library) { be_unseen(library); }
// A program that is traced has not either.
TORCH_LIBRARY_IMPL(plimsoll, Tracer, library) {
  for (const char* name : {"replaces", "replaced", "read", "lend", "touch"}) library.impl(name, torch::CppFunction::makeFallthrough());
}
// A key that every call has, and that comes after the interceptor's.
TORCH_LIBRARY_IMPL(aten, BackendSelect, library) { library.impl("_local_scalar_dense", &local_scalar_dense); }

}  // namespace

c10::SmallVector<c10::StorageImpl*, 3> storages_of_parts(c10::TensorImpl* tensor) {
  c10::SmallVector<c10::StorageImpl*, 3> storages;
  auto add = [&](const at::Tensor& part) {
    if (part.defined() && part.has_storage()) storages.push_back(part.storage().unsafeGetStorageImpl());
  };
  // What has the keys of one need not be one, but a class of the program's that stands for it.
  if (auto* sparse = dynamic_cast<at::SparseTensorImpl*>(tensor)) {
    add(sparse->indices());
    add(sparse->values());
  } else if (auto* compressed = dynamic_cast<at::SparseCsrTensorImpl*>(tensor)) {
    add(compressed->compressed_indices());
    add(compressed->plain_indices());
    add(compressed->values());
  } else if (auto* nested = dynamic_cast<at::native::NestedTensorImpl*>(tensor)) {
    add(nested->get_nested_sizes());
    add(nested->get_nested_strides());
    add(nested->get_storage_offsets());
  } else if (auto* quantized = dynamic_cast<at::QTensorImpl*>(tensor)) {
    if (auto* channels = dynamic_cast<at::PerChannelAffineQuantizer*>(quantized->quantizer().get())) {
      add(channels->scales());
      add(channels->zero_points());
    }
  }
  return storages;
}

bool is_intercepted() {
  auto local = c10::impl::tls_local_dispatch_key_set();
  return is_in_use() && local.included_.has(kInterceptorKey) && !local.excluded_.has(kInterceptorKey);
}

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) { return facts_table.of(handle); }

void install_interceptor(const PlimsollCallbacks& given) {
  callbacks = given;
  static torch::Library library(torch::Library::IMPL, "aten", kInterceptorKey, __FILE__, __LINE__);
  register_unboxed(library);
  library.impl("_lazy_clone", torch::CppFunction::makeFromBoxedFunction<&clone_at_once>());
}

}  // namespace plimsoll
