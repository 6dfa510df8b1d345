// Objects of C++ classes among an operator's arguments, such as the packed weights of quantized layers: they may hold tensors that others
// know, too, and no operator tells which.
#pragma once

#include <ATen/core/ivalue.h>

namespace plimsoll {

// Has what such an object holds stay for good, where there is one in the argument, and as far as its `__getstate__` tells. Asked each time,
// for an object may come to hold something else, and nothing tells one from another that stands where it stood.
void keep_held(const c10::IValue& argument);

}  // namespace plimsoll
