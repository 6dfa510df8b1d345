#include "objects.h"

#include "allocator.h"
#include "composites.h"
#include "entries.h"
#include "leaves.h"
#include "untold.h"

#include <ATen/core/function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace plimsoll {

namespace {

using HeldStorages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;
using CustomObject = c10::intrusive_ptr_target;

// Those whose objects are made once, and then only read.
constexpr const char* kUnchanging[] = {"quantized.", "mkldnn.", "xnnpack.", "sparse.", "rnn."};

bool is_unchanging(const c10::IValue& object) {
  static const std::string space = "__torch__.torch.classes.";
  auto name = object.toObjectRef().type()->name();
  std::string qualified = name ? name->qualifiedName() : std::string();
  return std::any_of(std::begin(kUnchanging), std::end(kUnchanging),
                     [&](const char* kind) { return qualified.rfind(space + kind, 0) == 0; });
}

// What the object would be saved as tells; nothing where it cannot be.
void add_held_by(const c10::IValue& object, HeldStorages& held) {
  auto* state = object.toObjectRef().type()->findMethod("__getstate__");
  if (!state) return;
  torch::jit::Stack stack{object};
  Uncounted uncounted;
  Untold untold;
  try {
    state->run(stack);
  } catch (const std::exception&) {
    return;
  }
  for_each_leaf(stack.back(), [&](const c10::IValue& leaf) {
    if (leaf.isTensor()) {
      const at::Tensor& tensor = leaf.toTensor();
      if (tensor.defined() && tensor.has_storage()) held.emplace_back(tensor.storage().getWeakStorageImpl());
    } else if (torch::isCustomClass(leaf)) {
      add_held_by(leaf, held);
    }
  });
}

// What unchanging objects hold. One that is known here is destroyed when the next iteration begins, at the latest.
struct KnownObjects {
  struct Known {
    c10::weak_intrusive_ptr<CustomObject> itself;
    HeldStorages held;
  };
  std::mutex mutex;
  std::unordered_map<CustomObject*, Known> known;
};
KnownObjects& known_objects() {
  static auto& objects = *new KnownObjects();
  return objects;
}

HeldStorages held_by(const c10::IValue& object) {
  HeldStorages held;
  if (!is_unchanging(object)) {
    add_held_by(object, held);
    return held;
  }
  auto itself = object.toObjectRef().getSlot(0).toCapsule();
  auto& [mutex, known] = known_objects();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known.find(itself.get()); found != known.end()) return found->second.held;
  }
  add_held_by(object, held);
  // What was unpacked just now is nobody else's, and gone.
  held.erase(std::remove_if(held.begin(), held.end(), [](const auto& one) { return one.expired(); }), held.end());
  std::lock_guard<std::mutex> lock(mutex);
  known.emplace(itself.get(), KnownObjects::Known{c10::weak_intrusive_ptr<CustomObject>(itself), held});
  return held;
}

}  // namespace

void keep_held(const c10::IValue& argument) {
  for_each_leaf(argument, [](const c10::IValue& value) {
    if (!torch::isCustomClass(value)) return;
    for (const auto& one : held_by(value)) {
      auto storage = one.lock();
      // What nobody has seen is nobody else's.
      if (storage && entries().find(storage.get())) keep(at::Storage(std::move(storage)));
    }
  });
}

void forget_objects() {
  auto& [mutex, known] = known_objects();
  std::lock_guard<std::mutex> lock(mutex);
  for (auto one = known.begin(); one != known.end();) one = one->second.itself.expired() ? known.erase(one) : std::next(one);
}

}  // namespace plimsoll
