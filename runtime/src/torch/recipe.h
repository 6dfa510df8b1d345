// A recipe: all that a rerun of an operator needs beside the bytes it reads. Of storages it keeps alive the saved state of a generator alone.
//
// There is one for every operator that may have to be rerun, so it is one small block of memory: how each tensor
// argument lies in its storage stands in a stream of words, every other argument beside it as it was given.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "entries.h"
#include "operators.h"

#include <atomic>
#include <memory>
#include <vector>

namespace plimsoll {

// What an operator does with one storage.
struct AccessRecord {
  uint64_t bytes : 44;
  uint64_t mode : 4;  // PlimsollMode
  uint64_t device_type : 8;
  uint64_t device_index : 8;

  AccessRecord(PlimsollMode mode, const c10::StorageImpl& storage);
  c10::Device device() const;
};
static_assert(sizeof(AccessRecord) == 8);

class Recipe;
struct RecipeDeleter {
  void operator()(Recipe* recipe) const;
};
using OwnedRecipe = std::unique_ptr<Recipe, RecipeDeleter>;

class Recipe {
 public:
  // The recipe of an operator that is about to run: `accesses` says how it uses each of `storages`, `grad_mode` whether
  // operators inside it would be recorded for a backward pass.
  static OwnedRecipe record(const OperatorFacts& facts, c10::DispatchKeySet keys, const c10::IValue* arguments,
                            c10::ArrayRef<c10::StorageImpl*> storages, c10::ArrayRef<PlimsollAccess> accesses,
                            bool grad_mode);

  // Runs the operator on `inputs`, one storage per access, in the current stream: that should be its own. Returns the
  // storages it was given to write, in order of access, then the storages it made, in order of appearance.
  std::vector<Storage> run(std::vector<Storage> inputs) const;

  // The stream that the operator was queued in, for what is allocated for its rerun.
  void* stream() const { return stream_; }
  const OperatorFacts& facts() const { return *facts_; }
  c10::ArrayRef<AccessRecord> accesses() const { return {access_begin(), access_count_}; }
  // Bytes that it takes.
  size_t bytes() const;

  // One owner more, and one less: the last one's end is the recipe's.
  void share() { owners_.fetch_add(1, std::memory_order_relaxed); }
  void free() {
    if (owners_.load(std::memory_order_acquire) == 1 || owners_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      RecipeDeleter()(this);
  }

 private:
  friend struct RecipeDeleter;

  Recipe() = default;

  // Copies what is no tensor, and the generator where there is one.
  void add_values(const c10::IValue* arguments, bool has_numbers);

  AccessRecord* access_begin() const;
  uint64_t* word_begin() const;
  c10::IValue* value_begin() const;

  // In the same block follow the accesses, the words and the values.
  const OperatorFacts* facts_ = nullptr;
  c10::DispatchKeySet keys_;
  uint32_t value_count_ = 0, access_count_ = 0, word_count_ = 0;
  std::atomic<uint32_t> owners_{1};
  void* stream_ = nullptr;
  uint16_t switches_ = 0;  // the number of those that it ran by
  bool grad_mode_ = false;
  bool has_generator_ = false;  // then the last two values are the generator and the state that it had
};

// Appends the storages of an operator's results that are not in `known`, each once, in order of appearance.
// Returns false where a result has no plain storage.
bool collect_created(const c10::IValue* results, size_t count, c10::ArrayRef<c10::StorageImpl*> known,
                     c10::SmallVectorImpl<c10::StorageImpl*>& created);

}  // namespace plimsoll
