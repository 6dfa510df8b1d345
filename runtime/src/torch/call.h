// One intercepted call of an operator: what it reads and writes, what Rust is told of it, and its recipe where one is
// wanted. It does not know how the operator is run, nor whether its arguments came on a stack or as they were.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "accelerator.h"
#include "audit.h"
#include "bystanders.h"
#include "entries.h"
#include "operators.h"
#include "recipe.h"
#include "shim.h"

#include <memory>
#include <vector>

namespace plimsoll {

extern PlimsollCallbacks callbacks;

// Where to find a storage among those that an operator has used already: they are few, or else they are indexed.
class Seen {
 public:
  // The place of `storage` in `storages`, or their number.
  size_t find(c10::StorageImpl* storage, c10::ArrayRef<c10::StorageImpl*> storages) {
    size_t count = storages.size();
    if (count >= kFew) return find_among_many(storage, storages);
    for (size_t index = 0; index < count; ++index)
      if (storages[index] == storage) return index;
    return count;
  }

 private:
  static constexpr size_t kFew = 24;
  using Places = ska::flat_hash_map<c10::StorageImpl*, size_t>;

  size_t find_among_many(c10::StorageImpl* storage, c10::ArrayRef<c10::StorageImpl*> storages);

  std::unique_ptr<Places> places_;
};

// What there is more to an operator of a bystander's.
struct Beside {
  ~Beside() {
    for (auto* storage : borrowed) entries().give_back(storage);
  }
  bool is_heard = false;  // somebody is listening
  bool is_known = false;  // who knows some of its storages
  Unheard unheard;        // where nobody is
  c10::SmallVector<c10::StorageImpl*, 8> borrowed;  // those that nobody knows, and that stay unknown meanwhile
};

class Call {
 public:
  // There is one argument for each of the schema's.
  Call(const OperatorFacts& facts, c10::DispatchKeySet keys, const c10::IValue* arguments)
      : facts_(facts), keys_(keys), arguments_(arguments) {}

  // `complete` puts in the arguments that only a recipe needs; `invoke` runs the operator and returns its results.
  template <class Complete, class Invoke>
  void run(Complete complete, Invoke invoke) {
    start(complete);
    const c10::IValue* results;
    or_fail([&] { results = invoke(); });
    finish(results);
  }

  // Tells Rust what is about to run. Throws where it refuses; then there is nothing to end.
  template <class Complete>
  void start(Complete complete) {
    answer_ = ask();
    or_fail([&] {
      if (C10_UNLIKELY(facts_.is_random) && (!beside_ || beside_->is_heard)) {
        draws_ = draws();
        drawn_aside_ = drawn_aside();
      }
      if ((answer_ & PLIMSOLL_RECIPE) && !not_replayable_) {
        complete();
        recipe_ = Recipe::record(facts_, keys_, arguments_, storages_, accesses_, c10::GradMode::is_enabled());
        if (C10_UNLIKELY(!recipe_)) not_replayable_ = "of more kinds of tensors, or ways to set libtorch's switches, than are told apart";
      }
      begin();
    });
  }
  // Tells Rust what has run; throws where it did with less memory than it asked for. The arguments may be gone.
  void finish(const c10::IValue* results);
  // Tells Rust that it has failed.
  void fail();

 private:
  // Rust has been told what is about to run: it is told, too, where that cannot be.
  template <class Do>
  void or_fail(Do work) {
    try {
      work();
    } catch (...) {
      fail();
      throw;
    }
  }
  // What Rust wants of it: the sum of PlimsollWish.
  int32_t ask();
  void ask_for_bystander();
  // Whether there was anybody to tell.
  bool tell_of_bystander();
  void begin();
  void complete(const c10::IValue* results);
  void end_for_bystander();
  // What Rust is told of it before it runs.
  void describe();
  void find_accesses();
  void access(c10::StorageImpl* storage, uint32_t mode, const char* locked);
  uint32_t mode_of(c10::TensorImpl* tensor, const Argument& argument);
  bool writes_statistics() const;
  using Storages = c10::SmallVector<c10::StorageImpl*, 8>;
  Storages find_created(const c10::IValue* results, bool watch);

  const OperatorFacts& facts_;
  c10::DispatchKeySet keys_;
  const c10::IValue* arguments_;
  const char* not_replayable_ = nullptr;
  PlimsollOperator event_;
  OwnedRecipe recipe_;
  Seen seen_;
  int32_t answer_ = 0;                  // what Rust wants of it
  uint64_t refusals_ = 0;               // before it ran
  std::unique_ptr<Beside> beside_;      // where it is a bystander's
  Draws draws_;                         // where it draws
  uint64_t drawn_aside_ = 0;            // of this thread, before it did
  std::unique_ptr<Audit> audit_;        // where there is one
  Storages storages_;
  c10::SmallVector<PlimsollAccess, 8> accesses_;
  c10::SmallVector<PlimsollCreated, 4> created_;
};

// Where a backward pass has failed in an operator, libtorch keeps what was yet to be done, and the graph that goes with it, until this
// thread begins another one: one of nothing is run.
void forget_failed_backward();

// What this thread's operators are for: PlimsollPhase.
uint32_t phase();

}  // namespace plimsoll
