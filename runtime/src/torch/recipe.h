// A recipe: all that a rerun of an operator needs beside the bytes it reads. It keeps no storage alive.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "entries.h"
#include "operators.h"

#include <optional>
#include <vector>

namespace plimsoll {

constexpr uint32_t kNoAccess = UINT32_MAX;

// A tensor argument as it was: which access of the operator it is a view of, and how it lies in the storage.
struct TensorRecord {
  enum Kind : uint8_t { None, Undefined, Number, Shape, View };
  Kind kind = None;
  uint32_t access = kNoAccess;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device{c10::kCPU};  // of a Shape
  int64_t offset = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::Scalar number;
};

// What an operator does with one storage.
struct AccessRecord {
  PlimsollMode mode = PLIMSOLL_READ;
  size_t bytes = 0;
  c10::Device device{c10::kCPU};
};

struct ArgumentRecord {
  c10::IValue value;  // where it holds no tensor
  bool is_list = false;
  bool is_optional_list = false;
  std::vector<TensorRecord> tensors;
};

struct Recipe {
  const OperatorFacts* facts = nullptr;
  c10::DispatchKeySet keys;
  bool grad_mode = false;
  int threads = 0;
  std::vector<AccessRecord> accesses;
  std::vector<ArgumentRecord> arguments;
  std::optional<at::Generator> generator;
  at::Tensor generator_state;

  // Runs the operator on `inputs`, one storage per access. Returns the storages it was given to write, in order of
  // access, then the storages it made, in order of appearance.
  std::vector<Storage> run(std::vector<Storage> inputs) const;
};

// Appends the storages of an operator's results that are not in `known`, each once, in order of appearance.
// Returns false where a result has no plain storage.
bool collect_created(const c10::IValue* results, size_t count, const std::vector<c10::StorageImpl*>& known,
                     std::vector<Storage>& created);

// What is excluded while the interceptor works: its own key, and everything above the backend that has had its say.
c10::DispatchKeySet keys_above_backend();

}  // namespace plimsoll
