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
constexpr c10::DispatchKeySet kBelowInterceptor(c10::DispatchKeySet::FULL_AFTER, kInterceptorKey);
// What to exclude where nothing is to be intercepted. The second key has nothing to do but to tell that it was us: libtorch excludes the
// first one, too.
constexpr c10::DispatchKeySet kNotIntercepted({kInterceptorKey, c10::DispatchKey::TESTING_ONLY_GenericMode});

// Whether the program's Python code takes over an operator with these keys.
inline bool is_taken_over(c10::DispatchKeySet keys) { return keys.has(c10::DispatchKey::Python); }

// Whether an operator with these keys works on nested tensors, which go by addresses of integers.
inline bool is_nested(c10::DispatchKeySet keys) { return keys.has(c10::DispatchKey::NestedTensor); }

// Runs an operator whose arguments are on a stack, and tells Rust.
void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Whether a tensor is an ordinary strided view of one storage. It may be read conjugated, or negated: its keys say so.
inline bool has_plain_storage(const c10::TensorImpl* tensor) {
  constexpr c10::DispatchKeySet odd({c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python, c10::DispatchKey::Quantized,
                                     c10::DispatchKey::NestedTensor, c10::DispatchKey::Functionalize, c10::DispatchKey::Sparse,
                                     c10::DispatchKey::SparseCsr});
  return !tensor->key_set().has_any(odd) && tensor->unsafe_storage();
}

// The storages that a sparse tensor consists of, those that hold the sizes and places of a nested one's parts, and what a quantized one's
// channels go by; none of any other.
c10::SmallVector<c10::StorageImpl*, 3> storages_of_parts(c10::TensorImpl* tensor);

// Whether operators of this thread are intercepted, and there is somebody to tell.
bool is_intercepted();

// What there is to know about a registered operator, for good.
const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

void install_interceptor(const PlimsollCallbacks& callbacks);

}  // namespace plimsoll
