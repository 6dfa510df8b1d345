// Operators of libtorch that go by the addresses of tensors themselves, most of them while they call others: no operator tells of that.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace plimsoll {

// Why a storage of integers stays: a composite has its address while it calls operators.
constexpr const char* kKept = "its address is kept by an operator that calls others";

// Reads or writes bytes where it calls no operator: it is made one operator.
bool runs_as_one(const std::string& name);

// Has the address of integers among its arguments, lengths say, while it calls operators, or has what it is told to write grow then.
bool keeps_addresses(const std::string& name);

// As long as there is one, this thread is in such an operator, of these arguments: the integers that it has the address of, and what may
// grow, are brought back if they are away, and stay for good. So do integers that are made meanwhile.
class KeptAddresses {
 public:
  KeptAddresses(const c10::OperatorHandle& composite, const c10::IValue* arguments);
  ~KeptAddresses();
  KeptAddresses(const KeptAddresses&) = delete;
  KeptAddresses& operator=(const KeptAddresses&) = delete;
};

// Has a storage stay for good.
void keep(const at::Storage& storage);

// Has what a nested tensor goes by stay for good, where there is one in it.
void keep_parts(const c10::IValue& made);

// Whether what an operator of this thread has made is to stay: a composite may have its address. By the first of its results.
bool are_kept(const c10::IValue& first_result);

}  // namespace plimsoll
