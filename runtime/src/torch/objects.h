// Objects of C++ classes among an operator's arguments, such as the packed weights of quantized layers: they may hold tensors that others
// know, too, and no operator tells which.
#pragma once

#include <ATen/core/ivalue.h>

namespace plimsoll {

// Has what such an object holds stay for good, where there is one in the argument, and as far as its `__getstate__` tells. Of libtorch's own
// classes, whose objects do not change, each is asked once, for it unpacks all that it holds; others each time.
void keep_held(const c10::IValue& argument);

// Lets go of what is known of objects that are gone.
void forget_objects();

}  // namespace plimsoll
