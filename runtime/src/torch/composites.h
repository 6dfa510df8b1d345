// Operators of libtorch that call others, and go by the addresses of tensors themselves, which no operator tells of.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace plimsoll {

// Why integers stay that such a one has the address of.
constexpr const char* kKept = "its address is kept by an operator that calls others";

// Reads or writes bytes where it calls no operator: where no gradient is wanted it is one operator.
bool runs_as_one(const std::string& name);

// Has the address of integers among its arguments, lengths say, while it calls operators.
bool keeps_addresses(const std::string& name);

// Those integers, if there are bytes of ours, are there from now on, and stay.
void keep_integers(const c10::IValue* arguments, size_t count);

// Whether results of an operator that this thread has run are integers that such a composite has the address of. They may be.
bool are_kept(const c10::IValue& first_result);

}  // namespace plimsoll
