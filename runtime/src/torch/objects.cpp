#include "objects.h"

#include "allocator.h"
#include "composites.h"
#include "entries.h"

#include <ATen/core/function.h>
#include <torch/custom_class.h>

namespace plimsoll {

namespace {

void keep_tensors(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    // What nobody has seen is nobody else's: it was unpacked just now.
    bool is_known = tensor.defined() && tensor.has_storage() && entries().find(tensor.storage().unsafeGetStorageImpl());
    if (is_known) keep(tensor.storage());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) keep_tensors(element);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) keep_tensors(element);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) keep_tensors(entry.value());
  } else {
    keep_held(value);
  }
}

// What the object would be saved as; nothing where it cannot be.
c10::IValue state_of(const c10::IValue& object) {
  auto* state = object.toObjectRef().type()->findMethod("__getstate__");
  if (!state) return {};
  torch::jit::Stack stack{object};
  Uncounted uncounted;
  try {
    state->run(stack);
  } catch (const std::exception&) {
    return {};
  }
  return stack.back();
}

}  // namespace

void keep_held(const c10::IValue& argument) {
  if (torch::isCustomClass(argument)) keep_tensors(state_of(argument));
}

}  // namespace plimsoll
