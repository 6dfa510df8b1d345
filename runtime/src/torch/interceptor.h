// Sees every operator after autograd and before the backend.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#include "shim.h"

namespace plimsoll {

// An out-of-tree key below autograd that no library here uses (it was torchdistx's).
constexpr c10::DispatchKey kInterceptorKey = c10::DispatchKey::Fake;

// Whether a tensor is an ordinary strided view of one storage.
bool has_plain_storage(const c10::TensorImpl* tensor);

void install_interceptor(const PlimsollCallbacks& callbacks);

}  // namespace plimsoll
