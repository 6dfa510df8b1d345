#include "call.h"

#include "allocator.h"
#include "composites.h"
#include "entries.h"
#include "interceptor.h"
#include "leaves.h"
#include "streams.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <chrono>

namespace plimsoll {

std::string& refusal();

PlimsollCallbacks callbacks;

namespace {

// Whether an operator of a backward pass was refused, or failed, since somebody asked.
std::atomic<bool> backward_has_failed{false};

void note_failure() {
  if (phase() == PLIMSOLL_BACKWARD) backward_has_failed = true;
}

uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool covers_storage(const c10::TensorImpl* tensor) {
  const auto& storage = tensor->unsafe_storage();
  return tensor->storage_offset() == 0 && tensor->is_non_overlapping_and_dense() &&
         tensor->numel() * tensor->itemsize() == storage.nbytes();
}

}  // namespace

size_t Seen::find_among_many(c10::StorageImpl* storage, c10::ArrayRef<c10::StorageImpl*> storages) {
  if (!places_) places_ = std::make_unique<Places>();
  for (size_t index = places_->size(); index < storages.size(); ++index) places_->emplace(storages[index], index);
  auto found = places_->find(storage);
  return found == places_->end() ? storages.size() : found->second;
}

int32_t Call::ask() {
  if (C10_UNLIKELY(is_bystander())) {
    beside_ = std::make_unique<Beside>();
    if (is_in_use()) ask_for_bystander();
    return 0;
  }
  note_stream();
  describe();
  int32_t answer = callbacks.before(&event_);
  if (C10_UNLIKELY(answer < 0)) note_failure();
  TORCH_CHECK_WITH(OutOfMemoryError, answer >= 0, refusal());
  return answer;
}

void Call::ask_for_bystander() {
  note_stream();
  if (!beside_->unheard.begin()) {
    beside_->is_heard = true;
    describe();
    // Who has listened may have stopped when it is told.
    while (!accesses_.empty() && !tell_of_bystander() && !beside_->unheard.begin()) {
    }
  }
  // One that waits for other processes may wait for what an iteration is yet to do.
  if (facts_.locks) beside_->unheard.end();
}

bool Call::tell_of_bystander() {
  WithoutPython others_go_on;
  OnCountedDevice device_guard;
  int32_t answer = callbacks.before_bystander(&event_);
  TORCH_CHECK_WITH(OutOfMemoryError, answer >= 0, refusal());
  beside_->is_known = answer > 0;
  return beside_->is_known;
}

void Call::begin() {
  refusals_ = refusals.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(beside_ != nullptr)) return;
  if (C10_UNLIKELY(audited_for.load(std::memory_order_relaxed) != PLIMSOLL_NO_AUDIT))
    audit_ = std::make_unique<Audit>(facts_, storages_, accesses_);
  reset_operator_peak();
  if (answer_ & PLIMSOLL_TIMES) {
    event_.start_ns = now_ns();
    accelerator_operator_starts();
  }
}

void Call::finish(const c10::IValue* results) {
  or_fail([&] {
    if (C10_UNLIKELY(refusals.load(std::memory_order_relaxed) != refusals_)) throw_refusal_after(refusals_);
    if (!beside_) complete(results);
  });
  if (C10_UNLIKELY(beside_ != nullptr)) return end_for_bystander();
  event_.recipe = reinterpret_cast<PlimsollRecipe*>(recipe_.release());
  callbacks.after(&event_);
}

void Call::complete(const c10::IValue* results) {
  if (answer_ & PLIMSOLL_TIMES) {
    accelerator_operator_ends();
    event_.end_ns = now_ns();
  }
  event_.peak_bytes = operator_peak_bytes();
  auto created = find_created(results, (answer_ & PLIMSOLL_WATCH) && facts_.is_factory);
  if (C10_UNLIKELY(facts_.is_random && drawn_aside_ != drawn_aside()))
    not_replayable_ = "others drew random numbers meanwhile, on its own thread or another";
  if (C10_UNLIKELY(audit_ != nullptr)) audit_->end(created);
  event_.created = created_.data();
  event_.created_count = created_.size();
  event_.not_replayable = not_replayable_;
}

void Call::fail() {
  note_failure();
  if (C10_UNLIKELY(beside_ != nullptr)) return end_for_bystander();
  callbacks.failed(&event_);
}

void Call::end_for_bystander() {
  if (beside_->is_known) {
    WithoutPython others_go_on;
    OnCountedDevice device_guard;
    callbacks.after_bystander(&event_);
  }
  beside_ = nullptr;
}

void Call::describe() {
  find_accesses();
  event_ = {facts_.name, not_replayable_, accesses_.data(), accesses_.size(), nullptr, 0, nullptr, 0, 0, 0};
}

void Call::find_accesses() {
  not_replayable_ = facts_.not_replayable;
  auto one = [&](c10::TensorImpl* tensor, const Argument& argument) {
    if (tensor == c10::UndefinedTensorImpl::singleton() || tensor->is_wrapped_number()) return;
    if (C10_UNLIKELY(tensor->is_meta())) {
      not_replayable_ = "an input has a shape and no bytes";
      return;
    }
    bool plain = has_plain_storage(tensor);
    if (C10_UNLIKELY(!plain)) {
      not_replayable_ = "an input has no plain storage";
      uint32_t mode = argument.is_written ? PLIMSOLL_WRITE : PLIMSOLL_READ;
      for (auto* part : storages_of_parts(tensor)) access(part, mode, "a part of a tensor that is no plain one");
      if (!tensor->has_storage()) return;
    }
    if (reads_shape_only(argument, *tensor)) return;
    access(tensor->unsafe_storage().unsafeGetStorageImpl(), mode_of(tensor, argument),
           plain ? facts_.locks : "not a plain strided tensor");
  };
  for (size_t index : facts_.tensor_arguments) {
    const Argument& argument = facts_.arguments[index];
    const c10::IValue& value = arguments_[index];
    if (C10_LIKELY(value.isTensor())) {
      one(value.unsafeToTensorImpl(), argument);
    } else if (value.isStorage()) {
      auto* storage = value.toStorage().unsafeGetStorageImpl();
      // One that nobody has seen is made by the operator that gives it to a tensor.
      if (argument.is_written || facts_.reads_storage || entries().find(storage))
        access(storage, argument.is_written ? PLIMSOLL_WRITE : PLIMSOLL_READ, facts_.locks);
    } else {
      for_each_leaf(value, [&](const c10::IValue& leaf) {
        if (leaf.isTensor()) one(leaf.unsafeToTensorImpl(), argument);
      });
    }
  }
  if (!facts_.writes) return;
  for (size_t out : facts_.outs) {
    for (size_t other : facts_.tensor_arguments) {
      bool are_tensors = arguments_[out].isTensor() && arguments_[other].isTensor() && other != out;
      if (are_tensors && arguments_[out].unsafeToTensorImpl() == arguments_[other].unsafeToTensorImpl())
        not_replayable_ = "may change the sizes of what it reads";
    }
  }
  size_t written = 0;
  for (const auto& access : accesses_) written += access.mode == PLIMSOLL_WRITE || access.mode == PLIMSOLL_OVERWRITE;
  if (written > 1) not_replayable_ = "writes several storages at once";
}

bool Call::writes_statistics() const {
  int flag = facts_.training_argument;
  return flag < 0 || arguments_[flag].toBool();
}

uint32_t Call::mode_of(c10::TensorImpl* tensor, const Argument& argument) {
  if (argument.is_running_statistic && writes_statistics()) {
    if (!argument.is_optional) not_replayable_ = "batch-norm whose statistics cannot be left out";
    // Where nothing else says of which type results are, they are of that of the statistics, or of the input's where there are none.
    bool say_type = facts_.training_argument < 0 || arguments_[1].isNone();
    if (say_type && tensor->dtype() != arguments_[0].toTensor().dtype())
      not_replayable_ = "batch-norm whose statistics are of another type";
    return PLIMSOLL_SIDE_EFFECT;
  }
  if (!argument.is_written) return PLIMSOLL_READ;
  return argument.is_overwritten && covers_storage(tensor) ? PLIMSOLL_OVERWRITE : PLIMSOLL_WRITE;
}

void Call::access(c10::StorageImpl* storage, uint32_t mode, const char* locked) {
  size_t index = seen_.find(storage, storages_);
  if (index < storages_.size()) {
    // Read here and written there, or overwritten: what it held matters.
    uint32_t& seen = accesses_[index].mode;
    if (seen != mode) {
      if (seen == PLIMSOLL_SIDE_EFFECT || mode == PLIMSOLL_SIDE_EFFECT)
        not_replayable_ = "batch-norm whose statistics share memory with what it reads";
      seen = PLIMSOLL_WRITE;
    }
    if (locked) accesses_[index].locked = locked;
    return;
  }
  if (C10_UNLIKELY(beside_ != nullptr)) {
    // The iteration does not know what bystanders make, unless it has to stay from then on.
    if (!facts_.locks && entries().borrow_unless_known(storage)) return beside_->borrowed.push_back(storage);
    entries().move_in_several_threads();
  }
  auto [entry, foreign, is_away] = entries().see(storage);
  if (C10_UNLIKELY(foreign)) {
    locked = "not allocated by libtorch's allocator";
    // Nobody tells when its owner changes it, or when it is gone: a batch on the host that goes to another device.
    not_replayable_ = "uses memory that libtorch's allocator did not give out";
  }
  if (const char* lent = entries().lent(entry); C10_UNLIKELY(lent != nullptr)) {
    if (!locked) locked = lent;
    // As of what is foreign, nobody tells when it is written.
    not_replayable_ = "uses memory that is shared by its address";
  }
  // What another thread may take away this moment is looked at once it is held.
  uint32_t filled = is_away || entries().is_watched_by_several(entry) ? PLIMSOLL_WAS_AWAY
                    : entries().has_changed(entry, *storage, true)    ? PLIMSOLL_FILLED
                                                                      : PLIMSOLL_NOT_FILLED;
  storages_.push_back(storage);
  // Bytes that our allocator does not count count nowhere.
  accesses_.push_back({entry, mode, foreign ? 0 : storage->nbytes(), locked, filled});
}

Call::Storages Call::find_created(const c10::IValue* results, bool watch) {
  Storages created;
  bool plain = collect_created(results, facts_.returns, storages_, created);
  if (!plain) {
    not_replayable_ = "a result has no plain storage";
    // The result may hold them where no operator says so.
    for (auto& access : accesses_) access.locked = "used by an operator with a result of no plain storage";
  }
  bool is_kept = !created.empty() && are_kept(results[0]);
  for (auto* storage : created) {
    auto [entry, foreign, is_away] = entries().see(storage);
    const char* locked = !plain    ? "made by an operator with a result of no plain storage"
                         : foreign ? "not allocated by libtorch's allocator"
                         : is_kept ? kKept
                                   : facts_.locks;
    // A program fills in past the dispatcher what the processor can reach. What is not ours is never made again.
    if (watch && !foreign && storage->device().is_cpu()) entries().watch(entry, *storage);
    created_.push_back({entry, foreign ? 0 : storage->nbytes(), locked});
  }
  return created;
}

void forget_failed_backward() {
  if (!backward_has_failed.exchange(false)) return;
  WithoutPython others_go_on;
  Uncounted uncounted;
  // No dispatch mode is told of what the program has not called.
  c10::impl::ExcludeDispatchKeyGuard without_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  c10::InferenceMode no_inference(false);
  c10::AutoGradMode with_gradients(true);
  at::zeros({}).requires_grad_().backward();
}

uint32_t phase() {
  if (torch::autograd::get_current_graph_task_id() != -1) return PLIMSOLL_BACKWARD;
  return c10::GradMode::is_enabled() ? PLIMSOLL_FORWARD : PLIMSOLL_UPDATE;
}

}  // namespace plimsoll
