// Sees every operator after autograd and before the backend.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#include "operators.h"
#include "shim.h"

namespace plimsoll {

// An out-of-tree key below autograd that no library here uses (it was torchdistx's).
constexpr c10::DispatchKey kInterceptorKey = c10::DispatchKey::Fake;

// Whether a tensor is an ordinary strided view of one storage.
inline bool has_plain_storage(const c10::TensorImpl* tensor) {
  constexpr c10::DispatchKeySet odd({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                     c10::DispatchKey::Python, c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor,
                                     c10::DispatchKey::Functionalize, c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr});
  return !tensor->key_set().has_any(odd) && tensor->unsafe_storage();
}

// What there is to know about a registered operator, for good.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

void install_interceptor(const PlimsollCallbacks& callbacks);

}  // namespace plimsoll
