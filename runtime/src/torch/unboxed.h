// The commonest operators, intercepted without a stack of values: their arguments stay where the caller has them.
#pragma once

#include <torch/library.h>

namespace plimsoll {

// Registers a kernel for each of them. Every other operator goes through the boxed fallback, to the same effect.
void register_unboxed(torch::Library& library);

}  // namespace plimsoll
