#include "recipe.h"

#include "allocator.h"
#include "bystanders.h"
#include "interceptor.h"
#include "numbered.h"
#include "streams.h"
#include "switches.h"
#include "untold.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace plimsoll {
namespace {

// The operator ran below these; a rerun must not pass through them again.
const c10::DispatchKeySet kAboveBackend =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | kNotIntercepted |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                         c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// The key sets that tensors have: a few dozen in a program.
auto& key_sets = *new Numbered<c10::DispatchKeySet, 4096>();  // outlives every recipe

enum Kind : uint64_t {
  Nothing,       // an optional tensor that is not given
  Undefined,     // a tensor that is not defined
  Number,        // a number that was wrapped as a tensor: the next value
  Shape,         // a tensor of which only the shape is read; the device follows
  View,          // of the storage of an access
  List,          // as many tensors follow as `access` says
  OptionalList,  // as many optional tensors follow
};

// Before the sizes of a tensor, and its strides and offset where it is not contiguous.
struct Head {
  uint64_t kind : 3;
  uint64_t is_contiguous : 1;
  uint64_t dims : 12;
  uint64_t type : 8;   // c10::ScalarType
  uint64_t keys : 12;  // in the table of key sets
  uint64_t access : 28;
};
static_assert(sizeof(Head) == sizeof(uint64_t));

uint64_t as_word(const Head& head) {
  uint64_t word;
  std::memcpy(&word, &head, sizeof word);
  return word;
}

// Row-major. Strides of dimensions of size one matter too: kernels read memory formats from them.
c10::SmallVector<int64_t, 8> plain_strides(c10::IntArrayRef sizes) {
  c10::SmallVector<int64_t, 8> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  return strides;
}

bool is_plain(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1))
    if (strides[dim] != stride) return false;
  return true;
}

at::Scalar number_in(const at::Tensor& tensor) {
  if (tensor.device().is_cpu() && tensor.dim() == 0) {
    switch (tensor.scalar_type()) {
      case at::kDouble: return *static_cast<const double*>(tensor.const_data_ptr());
      case at::kLong: return *static_cast<const int64_t*>(tensor.const_data_ptr());
      case at::kBool: return *static_cast<const bool*>(tensor.const_data_ptr());
      default: break;
    }
  }
  return tensor.item();
}

// Words without a block of memory of their own, unless they are many.
class Words {
 public:
  // Room for so many more.
  uint64_t* room(size_t count) {
    if (C10_UNLIKELY(size_ + count > capacity_)) grow(size_ + count);
    return start_ + size_;
  }
  void took(size_t count) { size_ += count; }
  void add(uint64_t word) {
    *room(1) = word;
    took(1);
  }
  const uint64_t* begin() const { return start_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kFew = 64;

  void grow(size_t wanted) {
    std::vector<uint64_t> larger(2 * wanted);
    std::copy_n(start_, size_, larger.begin());
    many_ = std::move(larger);
    start_ = many_.data();
    capacity_ = many_.size();
  }

  size_t size_ = 0, capacity_ = kFew;
  uint64_t few_[kFew];
  uint64_t* start_ = few_;
  std::vector<uint64_t> many_;
};

// Writes down how the tensor arguments of one operator lie in their storages.
class Geometry {
 public:
  Geometry(const OperatorFacts& facts, c10::ArrayRef<c10::StorageImpl*> storages) : facts_(facts), storages_(storages) {}

  void argument(const c10::IValue& value, const Argument& argument) {
    if (C10_UNLIKELY(value.isList())) {
      auto elements = value.toListRef();
      words.add(as_word({value.isTensorList() ? List : OptionalList, 0, 0, 0, 0, elements.size()}));
      for (const c10::IValue& element : elements) tensor(element, argument);
    } else {
      tensor(value, argument);
    }
  }

  Words words;
  // Numbers that were wrapped as tensors.
  size_t numbers = 0;
  bool knows_keys = true;  // whether those of all tensors have a number

 private:
  void tensor(const c10::IValue& value, const Argument& argument) {
    if (!value.isTensor()) return words.add(as_word({Nothing, 0, 0, 0, 0, 0}));
    auto* tensor = value.unsafeToTensorImpl();
    if (tensor == c10::UndefinedTensorImpl::singleton()) return words.add(as_word({Undefined, 0, 0, 0, 0, 0}));
    auto type = static_cast<uint64_t>(c10::typeMetaToScalarType(tensor->dtype()));
    if (tensor->is_wrapped_number()) {
      ++numbers;
      return words.add(as_word({Number, 0, 0, type, 0, 0}));
    }
    auto sizes = tensor->sizes(), strides = tensor->strides();
    size_t dims = sizes.size();
    bool contiguous = tensor->storage_offset() == 0 && is_plain(sizes, strides);
    bool shape = reads_shape_only(argument, *tensor);
    std::optional<uint16_t> keys = key_sets.number(tensor->key_set());
    knows_keys &= keys.has_value();
    uint64_t* start = words.room(2 * dims + 3);
    uint64_t* word = start;
    *word++ = as_word({shape ? Shape : View, contiguous, dims, type, keys.value_or(0),
                       shape ? 0 : access_of(tensor->unsafe_storage().unsafeGetStorageImpl())});
    if (shape) {
      auto device = tensor->device();
      *word++ = static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index());
    }
    for (size_t dim = 0; dim < dims; ++dim) *word++ = static_cast<uint64_t>(sizes[dim]);
    if (!contiguous) {
      for (size_t dim = 0; dim < dims; ++dim) *word++ = static_cast<uint64_t>(strides[dim]);
      *word++ = static_cast<uint64_t>(tensor->storage_offset());
    }
    words.took(static_cast<size_t>(word - start));
  }

  // Arguments mostly come in the order in which their storages were found.
  uint64_t access_of(c10::StorageImpl* storage) {
    if (next_ < storages_.size() && storages_[next_] == storage) return next_++;
    return static_cast<uint64_t>(std::find(storages_.begin(), storages_.end(), storage) - storages_.begin());
  }

  const OperatorFacts& facts_;
  c10::ArrayRef<c10::StorageImpl*> storages_;
  size_t next_ = 0;
};

// Calls `one` for every number among the tensor arguments that was wrapped as a tensor, in order.
template <class One>
void each_wrapped_number(const c10::IValue& value, One one) {
  auto visit = [&](const c10::IValue& element) {
    if (element.isTensor() && element.unsafeToTensorImpl()->is_wrapped_number()) one(element.toTensor());
  };
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) visit(element);
  } else {
    visit(value);
  }
}

// A value as it is now. A script may go on to change a list that it gave.
c10::IValue lasting(const c10::IValue& value) {
  if (C10_LIKELY(!value.isList())) return value;
  auto list = value.toList();  // has it once more
  return list.use_count() > 2 ? list.copy() : list;
}

// A storage of the right size for a tensor of which only the shape is read.
Storage without_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, size_t item_bytes, c10::Device device) {
  int64_t elements = offset + 1;
  bool is_empty = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    elements += (sizes[dim] - 1) * strides[dim];
    is_empty |= sizes[dim] == 0;
  }
  size_t bytes = is_empty ? 0 : static_cast<size_t>(elements) * item_bytes;
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, device),
                                               nullptr, false);
}

// Reads the arguments back.
class Playback {
 public:
  Playback(const uint64_t* words, const c10::IValue* values, const std::vector<Storage>& storages)
      : words_(words), values_(values), storages_(storages) {}

  c10::IValue argument(const Argument& argument) {
    if (argument.kind == Argument::Value) return *values_++;
    Head head = next_head();
    if (head.kind == List) {
      c10::List<at::Tensor> list;
      list.reserve(head.access);
      for (uint64_t count = head.access; count > 0; --count) list.push_back(tensor(next_head()).value_or(at::Tensor()));
      return list;
    }
    if (head.kind == OptionalList) {
      c10::List<std::optional<at::Tensor>> list;
      for (uint64_t count = head.access; count > 0; --count) list.push_back(tensor(next_head()));
      return list;
    }
    auto one = tensor(head);
    return one ? c10::IValue(*one) : c10::IValue();
  }

 private:
  Head next_head() {
    Head head;
    std::memcpy(&head, words_++, sizeof head);
    return head;
  }

  // None for a tensor that is not given, or whose storage the rerun leaves out.
  std::optional<at::Tensor> tensor(const Head& head) {
    auto type = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(head.type));
    switch (head.kind) {
      case Nothing:
        return std::nullopt;
      case Undefined:
        return at::Tensor();
      case Number: {
        Uncounted uncounted;
        at::Tensor number = at::scalar_tensor((values_++)->toScalar(), at::dtype(type));
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return number;
      }
      default:
        return view(head, type);
    }
  }

  std::optional<at::Tensor> view(const Head& head, caffe2::TypeMeta type) {
    c10::Device device(c10::kCPU);
    if (head.kind == Shape) {
      device = c10::Device(static_cast<c10::DeviceType>(*words_ >> 8), static_cast<c10::DeviceIndex>(*words_ & 0xff));
      ++words_;
    }
    size_t dims = head.dims;
    c10::SmallVector<int64_t, 8> sizes(words_, words_ + dims), strides = plain_strides(sizes);
    words_ += dims;
    int64_t offset = 0;
    if (!head.is_contiguous) {
      strides.assign(words_, words_ + dims);
      offset = static_cast<int64_t>(words_[dims]);
      words_ += dims + 1;
    }
    Storage storage =
        head.kind == Shape ? without_bytes(sizes, strides, offset, type.itemsize(), device) : storages_[head.access];
    if (!storage) return std::nullopt;
    auto keys = key_sets.value(static_cast<uint16_t>(head.keys));
    auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(c10::Storage(std::move(storage)), keys, type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
  }

  const uint64_t* words_;
  const c10::IValue* values_;
  const std::vector<Storage>& storages_;
};

// Another generator, in the state that one had.
at::Generator as_it_was(const c10::IValue* generator_and_state) {
  Uncounted uncounted;
  at::Generator another = generator_and_state[0].toGenerator().clone();
  std::lock_guard<std::mutex> lock(another.mutex());
  another.set_state(generator_and_state[1].toTensor());
  return another;
}

// The generator as it was, for the length of a rerun of what takes no other.
struct GeneratorRewound {
  explicit GeneratorRewound(const c10::IValue* generator_and_state) {
    if (!generator_and_state) return;
    draws_guard = draws();
    generator = generator_and_state[0].toGenerator();
    Uncounted uncounted;
    std::lock_guard<std::mutex> lock(generator->mutex());
    if (generator->device().is_cpu()) {
      now = generator->get_state();
      generator->set_state(generator_and_state[1].toTensor());
    } else {
      // To set it anew would have cuDNN make the masks of a recurrent network's dropout anew, too.
      kept = generator->graphsafe_get_state();
      generator->graphsafe_set_state(as_it_was(generator_and_state));
    }
  }
  ~GeneratorRewound() {
    if (!generator) return;
    Uncounted uncounted;
    std::lock_guard<std::mutex> lock(generator->mutex());
    if (kept) {
      generator->graphsafe_set_state(*kept);
    } else {
      generator->set_state(now);
    }
  }
  Draws draws_guard;
  std::optional<at::Generator> generator;
  // What the generator is to go back to: its state, or what keeps that.
  at::Tensor now;
  std::optional<at::Generator> kept;
};

}  // namespace

AccessRecord::AccessRecord(PlimsollMode how, const c10::StorageImpl& storage)
    : bytes(storage.nbytes()),
      mode(how),
      device_type(static_cast<uint8_t>(storage.data_ptr().device().type())),
      device_index(static_cast<uint8_t>(storage.data_ptr().device().index())) {}

c10::Device AccessRecord::device() const {
  return c10::Device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index));
}

// A block is as aligned as the most aligned that it holds.
static_assert(sizeof(Recipe) % alignof(uint64_t) == 0 && alignof(c10::IValue) <= alignof(uint64_t));

AccessRecord* Recipe::access_begin() const {
  return reinterpret_cast<AccessRecord*>(const_cast<char*>(reinterpret_cast<const char*>(this)) + sizeof(Recipe));
}
uint64_t* Recipe::word_begin() const { return reinterpret_cast<uint64_t*>(access_begin() + access_count_); }
c10::IValue* Recipe::value_begin() const { return reinterpret_cast<c10::IValue*>(word_begin() + word_count_); }
size_t Recipe::bytes() const {
  return sizeof(Recipe) + (access_count_ + word_count_) * sizeof(uint64_t) + value_count_ * sizeof(c10::IValue);
}

OwnedRecipe Recipe::record(const OperatorFacts& facts, c10::DispatchKeySet keys, const c10::IValue* arguments,
                           c10::ArrayRef<c10::StorageImpl*> storages, c10::ArrayRef<PlimsollAccess> accesses,
                           bool grad_mode) {
  Geometry geometry(facts, storages);
  for (size_t index : facts.tensor_arguments) geometry.argument(arguments[index], facts.arguments[index]);
  std::optional<uint16_t> switches = switches_now();
  if (C10_UNLIKELY(!geometry.knows_keys || !switches)) return nullptr;
  size_t words = geometry.words.size();
  size_t values = facts.arguments.size() - facts.tensor_arguments.size() + geometry.numbers + (facts.is_random ? 2 : 0);

  void* block = ::operator new(sizeof(Recipe) + (accesses.size() + words) * sizeof(uint64_t) + values * sizeof(c10::IValue));
  OwnedRecipe recipe(new (block) Recipe());
  recipe->facts_ = &facts;
  recipe->keys_ = keys;
  recipe->access_count_ = static_cast<uint32_t>(accesses.size());
  recipe->word_count_ = static_cast<uint32_t>(words);
  recipe->stream_ = noted_stream();
  recipe->switches_ = *switches;
  recipe->grad_mode_ = grad_mode;
  recipe->has_generator_ = facts.is_random;
  AccessRecord* access = recipe->access_begin();
  for (size_t index = 0; index < accesses.size(); ++index)
    new (access++) AccessRecord(static_cast<PlimsollMode>(accesses[index].mode), *storages[index]);
  std::copy_n(geometry.words.begin(), words, recipe->word_begin());
  recipe->add_values(arguments, geometry.numbers > 0);
  return recipe;
}

void Recipe::add_values(const c10::IValue* arguments, bool has_numbers) {
  auto* place = value_begin();
  auto add = [&](auto&& value) {
    new (place++) c10::IValue(std::forward<decltype(value)>(value));
    ++value_count_;
  };
  for (size_t index = 0; index < facts_->arguments.size(); ++index) {
    if (facts_->arguments[index].kind == Argument::Value) {
      add(lasting(arguments[index]));
    } else if (C10_UNLIKELY(has_numbers)) {
      each_wrapped_number(arguments[index], [&](const at::Tensor& number) { add(number_in(number)); });
    }
  }
  if (!has_generator_) return;
  int index = facts_->generator_argument;
  // What makes random numbers from nothing says on which device, or takes that of the tensor whose shape it reads.
  c10::Device device = access_count_ ? access_begin()->device() : c10::Device(c10::kCPU);
  for (size_t argument = 0; !access_count_ && argument < facts_->arguments.size(); ++argument) {
    const c10::IValue& given = arguments[argument];
    if (given.isDevice()) device = given.toDevice();
    if (facts_->arguments[argument].kind == Argument::Tensor && given.isTensor()) device = given.toTensor().device();
  }
  has_generator_ = !device.is_meta();  // there, nothing has a value
  if (!has_generator_) return;
  at::Generator generator = index >= 0 && arguments[index].isGenerator() ? arguments[index].toGenerator()
                                                                         : at::globalContext().defaultGenerator(device);
  Uncounted uncounted;
  std::lock_guard<std::mutex> lock(generator.mutex());
  add(generator);
  add(generator.get_state());
}

void RecipeDeleter::operator()(Recipe* recipe) const {
  std::destroy_n(recipe->value_begin(), recipe->value_count_);
  ::operator delete(recipe);
}

std::vector<Storage> Recipe::run(std::vector<Storage> storages) const {
  TORCH_CHECK(facts_->key.load(), facts_->text, " cannot be run again: it is registered no more");
  torch::jit::Stack stack;
  stack.reserve(facts_->arguments.size());
  {
    c10::impl::ForceDispatchKeyGuard keys_guard(c10::default_included_set, kAboveBackend);
    c10::AutoGradMode grad_guard(grad_mode_);
    Playback playback(word_begin(), value_begin(), storages);
    for (const Argument& argument : facts_->arguments) stack.push_back(playback.argument(argument));
    const c10::IValue* generator = has_generator_ ? value_begin() + value_count_ - 2 : nullptr;
    bool takes_another = generator && facts_->generator_argument >= 0;
    if (takes_another) stack[facts_->generator_argument] = as_it_was(generator);
    GeneratorRewound generator_guard(takes_another ? nullptr : generator);
    // The program has been told when it ran.
    Untold untold;
    // Last: whoever is waited for before may throw some.
    Switched switches_guard(switches_);
    try {
      facts_->handle.redispatchBoxed(keys_, &stack);
    } catch (...) {
      join_streams();  // a part of it may have been queued
      throw;
    }
  }
  join_streams();
  std::vector<Storage> results;
  c10::SmallVector<c10::StorageImpl*, 8> known, created;
  for (size_t index = 0; index < access_count_; ++index) {
    if (!storages[index]) continue;
    known.push_back(storages[index].get());
    auto mode = access_begin()[index].mode;
    if (mode == PLIMSOLL_WRITE || mode == PLIMSOLL_OVERWRITE) results.push_back(storages[index]);
  }
  bool plain = collect_created(stack.data() + (stack.size() - facts_->returns), facts_->returns, known, created);
  TORCH_CHECK(plain, "a rerun of ", facts_->text, " gave a result without plain storage");
  for (c10::StorageImpl* storage : created) results.push_back(Storage::reclaim_copy(storage));
  return results;
}

bool collect_created(const c10::IValue* results, size_t count, c10::ArrayRef<c10::StorageImpl*> known,
                     c10::SmallVectorImpl<c10::StorageImpl*>& created) {
  bool plain = true;
  auto add = [&](c10::StorageImpl* storage) {
    for (auto* one : known)
      if (one == storage) return;
    for (auto* one : created)
      if (one == storage) return;
    created.push_back(storage);
  };
  auto one = [&](const c10::IValue& value) {
    if (value.isStorage()) return add(value.toStorage().unsafeGetStorageImpl());
    if (!value.isTensor()) {
      plain &= !(value.isObject() || value.isCustomClass());
      return;
    }
    auto* tensor = value.unsafeToTensorImpl();
    // One of the meta device has a shape, symbolic perhaps, and no bytes.
    if (tensor == c10::UndefinedTensorImpl::singleton() || tensor->is_meta()) return;
    if (!has_plain_storage(tensor)) {
      plain = false;
      for (auto* part : storages_of_parts(tensor)) add(part);
      return;
    }
    add(tensor->unsafe_storage().unsafeGetStorageImpl());
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
