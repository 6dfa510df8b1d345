#include "recipe.h"

#include "allocator.h"
#include "interceptor.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace plimsoll {
namespace {

// The operator ran below these; a rerun must not pass through them again.
const c10::DispatchKeySet kAboveBackend =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({kInterceptorKey, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                         c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode});

struct ThreadCount {
  explicit ThreadCount(int wanted) : before(at::get_num_threads()) {
    if (wanted != before) at::set_num_threads(wanted);
    changed = wanted != before;
  }
  ~ThreadCount() {
    if (changed) at::set_num_threads(before);
  }
  int before;
  bool changed;
};

// The generator as it was, for the length of a rerun.
struct GeneratorRewound {
  GeneratorRewound(const std::optional<at::Generator>& rewound, const at::Tensor& state) {
    if (!rewound) return;
    generator = rewound;
    Uncounted uncounted;
    std::lock_guard<std::mutex> lock(generator->mutex());
    now = generator->get_state();
    generator->set_state(state);
  }
  ~GeneratorRewound() {
    if (!generator) return;
    Uncounted uncounted;
    std::lock_guard<std::mutex> lock(generator->mutex());
    generator->set_state(now);
  }
  std::optional<at::Generator> generator;
  at::Tensor now;
};

// A storage of the right size for a tensor of which only the shape is read.
Storage without_bytes(const TensorRecord& record) {
  int64_t elements = record.offset + 1;
  for (size_t dim = 0; dim < record.sizes.size(); ++dim) elements += (record.sizes[dim] - 1) * record.strides[dim];
  size_t bytes = std::max<int64_t>(elements, 0) * record.type.itemsize();
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               at::DataPtr(nullptr, record.device), nullptr, false);
}

at::Tensor rebuild(const TensorRecord& record, const std::vector<Storage>& storages) {
  if (record.kind == TensorRecord::Number) {
    Uncounted uncounted;
    at::Tensor tensor = at::scalar_tensor(record.number, at::dtype(record.type));
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  Storage storage;
  if (record.kind == TensorRecord::View) storage = storages[record.access];
  if (record.kind == TensorRecord::Shape) storage = without_bytes(record);
  if (!storage) return at::Tensor();
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(c10::Storage(storage), record.keys, record.type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(record.sizes, record.strides, record.offset);
  return tensor;
}

c10::IValue rebuild(const ArgumentRecord& record, const Argument& argument, const std::vector<Storage>& storages) {
  if (argument.kind == Argument::Value) return record.value;
  auto absent = [&](const TensorRecord& tensor) {
    return tensor.kind == TensorRecord::None || (tensor.kind == TensorRecord::View && !storages[tensor.access]);
  };
  if (!record.is_list) {
    if (record.tensors.empty() || absent(record.tensors[0])) return c10::IValue();
    return rebuild(record.tensors[0], storages);
  }
  if (record.is_optional_list) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : record.tensors)
      list.push_back(absent(tensor) ? std::nullopt : std::optional<at::Tensor>(rebuild(tensor, storages)));
    return list;
  }
  c10::List<at::Tensor> list;
  for (const auto& tensor : record.tensors) list.push_back(rebuild(tensor, storages));
  return list;
}

}  // namespace

c10::DispatchKeySet keys_above_backend() { return kAboveBackend; }

std::vector<Storage> Recipe::run(std::vector<Storage> storages) const {
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (size_t index = 0; index < arguments.size(); ++index)
    stack.push_back(rebuild(arguments[index], facts->arguments[index], storages));
  {
    c10::impl::ForceDispatchKeyGuard keys_guard(c10::default_included_set, kAboveBackend);
    c10::AutoGradMode grad_guard(grad_mode);
    ThreadCount threads_guard(threads);
    GeneratorRewound generator_guard(generator, generator_state);
    facts->handle.redispatchBoxed(keys, &stack);
  }
  std::vector<Storage> results;
  std::vector<c10::StorageImpl*> known;
  for (size_t index = 0; index < accesses.size(); ++index) {
    if (!storages[index]) continue;
    known.push_back(storages[index].get());
    if (accesses[index].mode == PLIMSOLL_WRITE || accesses[index].mode == PLIMSOLL_OVERWRITE)
      results.push_back(storages[index]);
  }
  bool plain = collect_created(stack.data() + (stack.size() - facts->returns), facts->returns, known, results);
  TORCH_CHECK(plain, "a rerun of ", facts->text, " gave a result without plain storage");
  return results;
}

bool collect_created(const c10::IValue* results, size_t count, const std::vector<c10::StorageImpl*>& known,
                     std::vector<Storage>& created) {
  size_t first = created.size();
  bool plain = true;
  auto one = [&](const c10::IValue& value) {
    if (!value.isTensor()) {
      plain &= !(value.isObject() || value.isCustomClass());
      return;
    }
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    if (!has_plain_storage(tensor.unsafeGetTensorImpl())) {
      plain = false;
      return;
    }
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (std::find(known.begin(), known.end(), storage) != known.end()) return;
    for (size_t index = first; index < created.size(); ++index)
      if (created[index].get() == storage) return;
    created.push_back(tensor.storage().getWeakStorageImpl().lock());
  };
  for (size_t index = 0; index < count; ++index) {
    if (results[index].isList()) {
      for (const auto& element : results[index].toListRef()) one(element);
    } else {
      one(results[index]);
    }
  }
  return plain;
}

}  // namespace plimsoll
