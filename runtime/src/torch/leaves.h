// What an argument consists of.
#pragma once

#include <ATen/core/ivalue.h>

namespace plimsoll {

// Visits a value, or the elements of a list, and what hides in lists of lists, as of a collective operation that gathers, in tuples and in
// dictionaries.
template <class Visit>
void for_each_leaf(const c10::IValue& value, const Visit& visit) {
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_leaf(element, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) for_each_leaf(element, visit);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) for_each_leaf(entry.value(), visit);
  } else {
    visit(value);
  }
}

}  // namespace plimsoll
