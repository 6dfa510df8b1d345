#include "call.h"

#include "accelerator.h"
#include "allocator.h"
#include "entries.h"
#include "interceptor.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace plimsoll {

std::string& refusal();

PlimsollCallbacks callbacks;

// A storage, which may be gone by now, and a digest of what it held.
struct Held {
  const c10::StorageImpl* storage;
  uint64_t digest;
};

bool operator==(const Held& one, const Held& other) { return one.digest == other.digest; }

// What an operator was given and what it made of it.
struct Step {
  std::string name;
  uint64_t generator = 0;
  std::vector<Held> read, written, made;
};

namespace {

uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool covers_storage(const c10::TensorImpl* tensor) {
  const auto& storage = tensor->unsafe_storage();
  return tensor->storage_offset() == 0 && tensor->is_non_overlapping_and_dense() &&
         tensor->numel() * tensor->itemsize() == storage.nbytes();
}

bool is_foreign(const c10::StorageImpl& storage) {
  return !is_ours(storage.data_ptr()) && storage.data_ptr().get();
}

// Looks for operators that do what their schema does not say.
class Search {
 public:
  std::atomic<bool> on{false};

  void found(std::string what) {
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

Search& search = *new Search();  // outlives every operator

// Compares two runs of the same program, operator by operator. One that makes other bits from the same inputs is named once they
// make a difference to another operator: kernels leave results unwritten that nobody needs.
class Repeats {
 public:
  std::atomic<int32_t> run{PLIMSOLL_REPEATS_OFF};

  void begin(int32_t which) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (run == PLIMSOLL_REPEATS_COMPARE && !departed_ && next_ < steps_.size()) depart("ended before " + steps_[next_].name);
    if (which != PLIMSOLL_REPEATS_COMPARE) steps_.clear();
    next_ = 0;
    departed_ = false;
    suspects_.clear();
    run = which;
  }

  void ran(Step step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (run == PLIMSOLL_REPEATS_REMEMBER) return steps_.push_back(std::move(step));
    if (departed_) return;
    if (next_ == steps_.size() || steps_[next_].name != step.name) return depart("had another operator, " + step.name);
    compare(steps_[next_++], step);
  }

 private:
  void compare(const Step& before, const Step& step) {
    bool differs = before.written != step.written || before.made != step.made;
    bool by_itself = differs && before.generator == step.generator && before.read == step.read;
    if (by_itself && before.written != step.written) search.found(step.name + " gave other bits from the same inputs");
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
      search.found(maker + " gave other bits from the same inputs, or " + step.name + ", which read them");
  }

  void depart(const std::string& how) {
    departed_ = true;
    search.found("the two runs are not alike: the second " + how);
  }

  std::mutex mutex_;
  std::vector<Step> steps_;  // of the run that is remembered
  size_t next_ = 0;
  bool departed_ = false;
  std::unordered_map<const c10::StorageImpl*, std::string> suspects_;  // what made them
};

Repeats& repeats = *new Repeats();

uint64_t generator_digest() {
  Uncounted uncounted;
  at::Generator generator = at::globalContext().defaultGenerator(counted_device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  return digest(*generator.get_state().storage().unsafeGetStorageImpl());
}

}  // namespace

size_t Seen::find_among_many(c10::StorageImpl* storage, c10::ArrayRef<c10::StorageImpl*> storages) {
  if (!places_) places_ = std::make_unique<Places>();
  for (size_t index = places_->size(); index < storages.size(); ++index) places_->emplace(storages[index], index);
  auto found = places_->find(storage);
  return found == places_->end() ? storages.size() : found->second;
}

struct Call::Searched {
  std::vector<uint64_t> digests;
  std::vector<Storage> storages;  // the operator may hold the last reference to its input
  Step step;                      // where it is asked whether the operator does the same again
};

void Call::SearchedDeleter::operator()(Searched* searched) const { delete searched; }

int32_t Call::ask() {
  find_accesses();
  event_ = {facts_.name, not_replayable_, accesses_.data(), accesses_.size(), nullptr, 0, nullptr, 0, 0, 0};
  int32_t answer = callbacks.before(&event_);
  TORCH_CHECK_WITH(OutOfMemoryError, answer >= 0, refusal());
  return answer;
}

void Call::begin(bool wants_times) {
  bool seeks_repeats = repeats.run.load(std::memory_order_relaxed) != PLIMSOLL_REPEATS_OFF;
  if (C10_UNLIKELY(seeks_repeats || search.on.load(std::memory_order_relaxed))) {
    searched_.reset(new Searched());
    for (auto* storage : storages_) searched_->storages.push_back(Storage::reclaim_copy(storage));
    if (seeks_repeats) {
      searched_->step.name = facts_.text;
      searched_->step.generator = generator_digest();
      for (size_t index = 0; index < storages_.size(); ++index)
        if (accesses_[index].mode != PLIMSOLL_OVERWRITE)
          searched_->step.read.push_back({storages_[index], quick_digest(*storages_[index])});
    } else {
      searched_->digests = digest_inputs();
    }
  }
  reset_operator_peak();
  if (wants_times) {
    event_.start_ns = now_ns();
    accelerator_operator_starts();
  }
}

void Call::end(int32_t answer, const c10::IValue* results) {
  if (answer & PLIMSOLL_TIMES) {
    accelerator_operator_ends();
    event_.end_ns = now_ns();
  }
  event_.peak_bytes = operator_peak_bytes();
  auto created = find_created(results, (answer & PLIMSOLL_WATCH) && facts_.is_factory);
  if (C10_UNLIKELY(searched_ != nullptr)) searched_->digests.empty() ? compare_runs(created) : compare_inputs(searched_->digests);
  event_.created = created_.data();
  event_.created_count = created_.size();
  event_.not_replayable = not_replayable_;
  event_.recipe = reinterpret_cast<PlimsollRecipe*>(recipe_.release());
  callbacks.after(&event_);
}

void Call::find_accesses() {
  not_replayable_ = facts_.not_replayable;
  auto one = [&](c10::TensorImpl* tensor, const Argument& argument) {
    if (tensor == c10::UndefinedTensorImpl::singleton() || tensor->is_wrapped_number()) return;
    bool plain = has_plain_storage(tensor);
    if (!plain) {
      not_replayable_ = "an input has no plain storage";
      if (!tensor->has_storage()) return;
    }
    if (!facts_.reads_shape_only) access(tensor, argument, plain);
  };
  for (size_t index : facts_.tensor_arguments) {
    const Argument& argument = facts_.arguments[index];
    const c10::IValue& value = arguments_[index];
    if (value.isTensor()) {
      one(value.unsafeToTensorImpl(), argument);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) one(element.unsafeToTensorImpl(), argument);
    }
  }
  if (!facts_.writes) return;
  size_t written = 0;
  for (const auto& access : accesses_) written += access.mode == PLIMSOLL_WRITE || access.mode == PLIMSOLL_OVERWRITE;
  if (written > 1) not_replayable_ = "writes several storages at once";
}

bool Call::writes_statistics() const {
  int flag = facts_.training_argument;
  return flag < 0 || arguments_[flag].toBool();
}

void Call::access(c10::TensorImpl* tensor, const Argument& argument, bool plain) {
  c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  uint32_t mode = PLIMSOLL_READ;
  if (argument.is_running_statistic && writes_statistics()) {
    mode = PLIMSOLL_SIDE_EFFECT;
    if (!argument.is_optional) not_replayable_ = "batch-norm whose statistics cannot be left out";
  } else if (argument.is_written) {
    mode = argument.is_overwritten && covers_storage(tensor) ? PLIMSOLL_OVERWRITE : PLIMSOLL_WRITE;
  }
  const char* locked = plain ? nullptr : "not a plain strided tensor";
  size_t index = seen_.find(storage, storages_);
  if (index < storages_.size()) {
    // Read here and written there, or overwritten: what it held matters.
    uint32_t& seen = accesses_[index].mode;
    if (seen != mode && seen != PLIMSOLL_SIDE_EFFECT && mode != PLIMSOLL_SIDE_EFFECT) seen = PLIMSOLL_WRITE;
    if (locked) accesses_[index].locked = locked;
    return;
  }
  bool absent = is_absent(storage->data_ptr());
  bool foreign = !absent && is_foreign(*storage);
  if (foreign) {
    locked = "not allocated by libtorch's allocator";
    // Nobody tells when its owner changes it, or when it is gone: a batch on the host that goes to another device.
    not_replayable_ = "uses memory that libtorch's allocator did not give out";
  }
  PlimsollEntry entry = entries().of(storage);
  uint32_t filled = absent                                           ? PLIMSOLL_WAS_AWAY
                    : entries().has_changed(entry, *storage, true) ? PLIMSOLL_FILLED
                                                                   : PLIMSOLL_NOT_FILLED;
  storages_.push_back(storage);
  // Bytes that our allocator does not count count nowhere.
  accesses_.push_back({entry, mode, foreign ? 0 : storage->nbytes(), locked, filled});
}

std::vector<uint64_t> Call::digest_inputs() const {
  std::vector<uint64_t> digests{generator_digest()};
  for (auto* storage : storages_) digests.push_back(is_absent(storage->data_ptr()) ? 0 : digest(*storage));
  return digests;
}

void Call::compare_inputs(const std::vector<uint64_t>& before) {
  auto now = digest_inputs();
  if (now[0] != before[0] && !facts_.is_random)
    search.found(facts_.text + " draws random numbers, and its schema does not say so");
  for (size_t index = 0; index < accesses_.size(); ++index) {
    if (accesses_[index].mode != PLIMSOLL_READ || now[1 + index] == before[1 + index]) continue;
    search.found(facts_.text + " writes its input " + std::to_string(index) + ", and its schema does not say so");
  }
}

Call::Storages Call::find_created(const c10::IValue* results, bool watch) {
  Storages created;
  bool plain = collect_created(results, facts_.returns, storages_, created);
  if (!plain) {
    not_replayable_ = "a result has no plain storage";
    // The result may hold them where no operator says so.
    for (auto& access : accesses_) access.locked = "used by an operator with a result of no plain storage";
  }
  for (auto* storage : created) {
    bool foreign = is_foreign(*storage);
    const char* locked = !plain    ? "made by an operator with a result of no plain storage"
                         : foreign ? "not allocated by libtorch's allocator"
                                   : nullptr;
    PlimsollEntry entry = entries().of(storage);
    // A program fills in past the dispatcher what the processor can reach.
    if (watch && storage->device().is_cpu()) entries().watch(entry, *storage);
    created_.push_back({entry, foreign ? 0 : storage->nbytes(), locked});
  }
  return created;
}

void Call::compare_runs(const Storages& created) {
  Step& step = searched_->step;
  for (size_t index = 0; index < accesses_.size(); ++index)
    if (accesses_[index].mode != PLIMSOLL_READ) step.written.push_back({storages_[index], quick_digest(*storages_[index])});
  for (auto* storage : created) step.made.push_back({storage, quick_digest(*storage)});
  repeats.ran(std::move(step));
}

uint32_t phase() {
  if (torch::autograd::get_current_graph_task_id() != -1) return PLIMSOLL_BACKWARD;
  return c10::GradMode::is_enabled() ? PLIMSOLL_FORWARD : PLIMSOLL_UPDATE;
}

void hash_inputs(bool on) { search.on = on; }
void look_for_repeats(int32_t run) { repeats.begin(run); }
std::vector<std::string> take_undeclared() { return search.take(); }

}  // namespace plimsoll
