// Sees every operator after autograd and before the backend.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#include "shim.h"

#include <string>
#include <vector>

namespace plimsoll {

// An out-of-tree key below autograd that no library here uses (it was torchdistx's).
constexpr c10::DispatchKey kInterceptorKey = c10::DispatchKey::Fake;

// Whether a tensor is an ordinary strided view of one storage.
bool has_plain_storage(const c10::TensorImpl* tensor);

// Switches the search for undeclared effects on or off.
void hash_inputs(bool on);
// What it has found since the last call, one description for each finding.
std::vector<std::string> take_undeclared();

void install_interceptor(const PlimsollCallbacks& callbacks);

}  // namespace plimsoll
