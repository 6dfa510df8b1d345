#include "audit.h"

#include "accelerator.h"
#include "allocator.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace plimsoll {

namespace {

// Each finding once.
class Findings {
 public:
  void add(std::string what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known_.insert(what).second) found_.push_back(std::move(what));
  }

  std::vector<std::string> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.clear();
    return std::exchange(found_, {});
  }

 private:
  std::mutex mutex_;
  std::unordered_set<std::string> known_;
  std::vector<std::string> found_;
};

Findings& findings = *new Findings();  // outlives every operator

// A storage, which may be gone by now, and a digest of what it held.
struct Held {
  const c10::StorageImpl* storage;
  uint64_t digest;
};

bool operator==(const Held& one, const Held& other) { return one.digest == other.digest; }

// What an operator was given and what it made of it.
struct Step {
  std::string name;
  uint64_t generator;
  std::vector<Held> read, written, made;
};

// Two runs of the same program, operator by operator. One that makes other bits of the same inputs is named once they make a
// difference to another operator: kernels leave results unwritten that nobody needs.
class Runs {
 public:
  void begin(int32_t audit) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_second_ && !departed_ && next_ < steps_.size()) depart("ended before " + steps_[next_].name);
    is_second_ = audit == PLIMSOLL_AUDIT_SECOND_RUN;
    if (!is_second_) steps_.clear();
    next_ = 0;
    departed_ = false;
    suspects_.clear();
  }

  void ran(Step step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_second_) return steps_.push_back(std::move(step));
    if (departed_) return;
    if (next_ == steps_.size() || steps_[next_].name != step.name) return depart("had another operator, " + step.name);
    compare(steps_[next_++], step);
  }

 private:
  void compare(const Step& before, const Step& step) {
    bool differs = before.written != step.written || before.made != step.made;
    bool by_itself = differs && before.generator == step.generator && before.read == step.read;
    if (by_itself && before.written != step.written) findings.add(step.name + " gave other bits from the same inputs");
    if (differs && !by_itself) blame_suspects(before, step);
    // What they held before is gone.
    for (const Held& held : step.written) suspects_.erase(held.storage);
    for (const Held& held : step.made) suspects_.erase(held.storage);
    bool makes_nothing = step.name.rfind("aten::empty", 0) == 0 || step.name.rfind("aten::new_empty", 0) == 0;
    for (size_t index = 0; by_itself && !makes_nothing && index < std::min(step.made.size(), before.made.size()); ++index)
      if (step.made[index].digest != before.made[index].digest) suspects_[step.made[index].storage] = step.name;
  }

  // Where all that `step` was given otherwise comes from operators that were given the same.
  void blame_suspects(const Step& before, const Step& step) {
    if (before.generator != step.generator || before.read.size() != step.read.size()) return;
    std::vector<std::string> makers;
    for (size_t index = 0; index < step.read.size(); ++index) {
      if (step.read[index].digest == before.read[index].digest) continue;
      auto suspect = suspects_.find(step.read[index].storage);
      if (suspect == suspects_.end()) return;
      makers.push_back(suspect->second);
    }
    for (const auto& maker : makers)
      findings.add(maker + " gave other bits from the same inputs, or " + step.name + ", which read them");
  }

  void depart(const std::string& how) {
    departed_ = true;
    findings.add("the two runs are not alike: the second " + how);
  }

  std::mutex mutex_;
  std::vector<Step> steps_;  // of the first
  bool is_second_ = false;
  size_t next_ = 0;
  bool departed_ = false;
  std::unordered_map<const c10::StorageImpl*, std::string> suspects_;  // what made them
};

Runs& runs = *new Runs();

uint64_t generator_digest() {
  Uncounted uncounted;
  at::Generator generator = at::globalContext().defaultGenerator(counted_device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  return digest(*generator.get_state().storage().unsafeGetStorageImpl());
}

// Of its bytes where they are; of none where a plan has taken them away.
uint64_t digest_of(const c10::StorageImpl& storage) {
  return is_absent(storage.data_ptr()) ? 0 : digest(storage);
}

}  // namespace

Audit::Audit(const OperatorFacts& facts, c10::ArrayRef<c10::StorageImpl*> storages,
             c10::ArrayRef<PlimsollAccess> accesses)
    : facts_(facts), generator_(generator_digest()) {
  for (size_t index = 0; index < storages.size(); ++index) {
    uint32_t mode = accesses[index].mode;
    uint64_t held = mode == PLIMSOLL_OVERWRITE ? 0 : digest_of(*storages[index]);
    inputs_.push_back({Storage::reclaim_copy(storages[index]), mode, held});
  }
}

void Audit::end(c10::ArrayRef<c10::StorageImpl*> created) const {
  switch (audited_for.load(std::memory_order_relaxed)) {
    case PLIMSOLL_AUDIT_EFFECTS: return look_for_effects();
    case PLIMSOLL_AUDIT_FIRST_RUN:
    case PLIMSOLL_AUDIT_SECOND_RUN: return look_for_other_bits(created);
  }
}

void Audit::look_for_effects() const {
  if (generator_digest() != generator_ && !facts_.is_random)
    findings.add(facts_.text + " draws random numbers, and its schema does not say so");
  for (size_t index = 0; index < inputs_.size(); ++index) {
    const auto& [storage, mode, digest] = inputs_[index];
    if (mode == PLIMSOLL_READ && digest_of(*storage) != digest)
      findings.add(facts_.text + " writes its input " + std::to_string(index) + ", and its schema does not say so");
  }
}

void Audit::look_for_other_bits(c10::ArrayRef<c10::StorageImpl*> created) const {
  Step step{facts_.text, generator_, {}, {}, {}};
  for (const auto& [storage, mode, digest] : inputs_) {
    auto* held = storage.get();
    if (mode != PLIMSOLL_OVERWRITE) step.read.push_back({held, digest});
    if (mode != PLIMSOLL_READ) step.written.push_back({held, digest_of(*held)});
  }
  for (auto* storage : created) step.made.push_back({storage, digest_of(*storage)});
  runs.ran(std::move(step));
}

void audit(int32_t what) {
  runs.begin(what);
  audited_for = what;
}

std::vector<std::string> take_audit_findings() { return findings.take(); }

}  // namespace plimsoll
