// What there is to know about an ATen operator before it runs: which arguments are tensors, which of them it
// writes, and whether it can be rerun. Read from its schema once, with the schemas' omissions mended.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <string>
#include <vector>

namespace plimsoll {

struct Argument {
  enum Kind : uint8_t {
    Value,          // no tensor in it
    Tensor,         // a tensor, an optional one, or a list of either
    Storage,        // the storage itself: used where it is written, or read as such, or somebody has seen it
    Opaque,         // something that may hide tensors
  };
  Kind kind = Value;
  bool is_written = false;
  bool is_overwritten = false;   // all its bytes are replaced without being read, if the view covers the storage
  bool is_running_statistic = false;
  bool is_optional = false;
  bool is_of_shape = false;      // only its shape is read
};

struct OperatorFacts {
  c10::OperatorHandle handle;
  uint32_t name = 0;
  std::atomic<const c10::OperatorName*> key{nullptr};  // by which the interceptor finds these facts; null once it is registered no more
  std::string text;
  std::vector<Argument> arguments;
  std::vector<size_t> tensor_arguments;  // those of another kind than Value
  std::vector<size_t> lists;             // of an operator that works out each place of its lists by itself: those
  bool ends_with_steps = false;          // fused optimizers: the last of them is of how many steps each parameter has taken
  std::vector<size_t> outs;              // where a caller says that results are to go
  size_t returns = 0;
  int training_argument = -1;    // batch-norm: the flag that makes it write its statistics; -1 where it always does
  int generator_argument = -1;
  bool is_view = false;          // its results stand where its argument does, and it calls no other
  bool is_transparent = false;   // a view or a composite: nothing to intercept
  bool keeps_addresses = false;  // one of these that has the address of integers: see composites.h
  bool is_region = false;        // what runs it again is Python's: see region.cpp
  bool takes_objects = false;    // of C++ classes, which may hold tensors: see objects.h
  bool is_random = false;
  bool reads_storage = false;    // a storage among its arguments is read
  bool is_factory = false;       // makes its result from nothing but numbers: a program may fill it in past the dispatcher
  bool writes = false;           // any argument is written, statistics aside
  const char* not_replayable = nullptr;
  const char* locks = nullptr;   // why the storages that it uses or makes must stay from then on

  explicit OperatorFacts(const c10::OperatorHandle& operator_handle);
};

// Whether of that argument, which has a storage, only the shape is read: of what has no bytes there is no more, and it may go without
// anybody's notice.
inline bool reads_shape_only(const Argument& argument, const c10::TensorImpl& tensor) {
  return argument.is_of_shape || (!argument.is_written && tensor.unsafe_storage().nbytes() == 0);
}

}  // namespace plimsoll
