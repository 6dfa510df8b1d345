// The C interface: catches every exception at the border.
#include "shim.h"

#include "accelerator.h"
#include "allocator.h"
#include "bystanders.h"
#include "call.h"
#include "entries.h"
#include "interceptor.h"
#include "lists.h"
#include "objects.h"
#include "recipe.h"
#include "streams.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>

namespace plimsoll {

// Why `before` refused an operator.
std::string& refusal() {
  thread_local std::string message;
  return message;
}

namespace {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

template <class Body>
int32_t caught(Body body) {
  try {
    // What the shim does itself is not the program's.
    c10::impl::ExcludeDispatchKeyGuard not_intercepted(kNotIntercepted);
    body();
    return 0;
  } catch (const c10::OutOfMemoryError& error) {
    last_error() = error.what_without_backtrace();
    return PLIMSOLL_NO_ROOM;
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "an exception of an unknown kind";
  }
  return -1;
}

// For what allocates and frees no more than Rust knows of.
template <class Body>
int32_t guarded(Body body) {
  Ours ours;
  return caught(body);
}

int32_t under_pressure(int32_t (*PlimsollCallbacks::*call)(uint64_t), uint64_t bytes) {
  auto local = c10::impl::tls_local_dispatch_key_set();
  bool is_iterations = local.included_.has(kInterceptorKey) || local.excluded_.has_all(kNotIntercepted);
  // Another thread evicts what the iteration's own may be looking at.
  if (!is_iterations || is_bystander()) entries().move_in_several_threads();
  return (callbacks.*call)(bytes);
}

}  // namespace
}  // namespace plimsoll

using namespace plimsoll;

int32_t plimsoll_install(const PlimsollCallbacks* callbacks, int32_t cuda_index) {
  return guarded([&] {
    on_free([](uint32_t entry) { entries().note_freed(entry); });
    if (cuda_index < 0) {
      install_allocator();
    } else {
      install_accelerator(cuda_index);
    }
    on_pressure([](uint64_t bytes) { return under_pressure(&PlimsollCallbacks::pressure, bytes); },
                [](uint64_t bytes) { return under_pressure(&PlimsollCallbacks::refused, bytes); });
    install_interceptor(*callbacks);
  });
}

void plimsoll_find_dead(void) noexcept {
  entries().find_dead();
  forget_objects();
}

void plimsoll_forget_failed_backward(void) noexcept { caught([] { forget_failed_backward(); }); }
uint32_t plimsoll_phase(void) noexcept { return phase(); }
uint64_t plimsoll_recorded(void) noexcept { return at::sequence_number::peek(); }

void plimsoll_audit(int32_t what) noexcept { audit(what); }

size_t plimsoll_take_audit_findings(char* out, size_t capacity) noexcept {
  size_t written = 0;
  auto found = take_audit_findings();
  for (const auto& line : found) {
    size_t room = capacity - written, wanted = line.size() + 1;
    if (wanted > room) continue;
    std::copy(line.begin(), line.end(), out + written);
    out[written + line.size()] = '\n';
    written += wanted;
  }
  if (written < capacity) out[written] = 0;
  return found.size();
}

void plimsoll_intercept(int32_t on) noexcept { intercept_this_thread(on != 0); }
void plimsoll_stand_by(void) noexcept { stand_by(); }
void plimsoll_step_aside(void) noexcept { step_aside(); }
size_t plimsoll_times_aside(void) noexcept { return times_aside(); }
void plimsoll_step_back(size_t times) noexcept { step_back(times); }
int32_t plimsoll_postpone(int32_t signal) noexcept { return postpone(signal); }
void plimsoll_forget_bystanders(void) noexcept { forget_bystanders(); }
void* plimsoll_without_python(void) noexcept { return let_python_go_on(); }
void plimsoll_with_python(void* state) noexcept { hold_python_up(state); }

void plimsoll_before_fork(void) noexcept { entries().lock_for_fork(); }
void plimsoll_after_fork(void) noexcept { entries().unlock_after_fork(); }

const char* plimsoll_error(void) noexcept { return last_error().c_str(); }
void plimsoll_refuse(const char* message) noexcept { refusal() = message; }

uint64_t plimsoll_live_bytes(void) noexcept { return live_bytes(); }
uint64_t plimsoll_peak_bytes(void) noexcept { return peak_bytes(); }
void plimsoll_reset_peak(void) noexcept { reset_peak(); }
void plimsoll_set_line(uint64_t bytes) noexcept { set_line(bytes); }
void plimsoll_set_piece(uint64_t bytes) noexcept { set_piece_bytes(bytes); }

void plimsoll_device_bytes(PlimsollDeviceBytes* out) noexcept {
  AcceleratorBytes now = accelerator_bytes();
  *out = {now.allocated_now, now.allocated_peak, now.reserved_now, now.reserved_peak, now.failed, now.retried};
}
void plimsoll_reset_device_peak(void) noexcept { reset_accelerator_peak(); }
int32_t plimsoll_set_device_share(double share) {
  return guarded([&] { set_accelerator_share(share); });
}
int32_t plimsoll_empty_device_cache(void) {
  return guarded([&] { empty_accelerator_cache(); });
}
int32_t plimsoll_note_stream(void) {
  return guarded([&] { note_stream(); });
}
int32_t plimsoll_is_capturing(void) noexcept { return is_capturing(); }
int32_t plimsoll_join_streams(void) {
  return guarded([&] { join_streams(); });
}
void plimsoll_time_on_device(int32_t timing) noexcept { time_on_accelerator(static_cast<PlimsollDeviceTiming>(timing)); }
void plimsoll_device_interrupted(void) noexcept { accelerator_interrupted(); }
int32_t plimsoll_take_device_times(PlimsollDeviceTimes* out, size_t capacity, size_t* count, uint64_t* makespan_ns) {
  return guarded([&] {
    auto times = take_accelerator_times(*makespan_ns);
    *count = times.size();
    std::copy_n(times.begin(), std::min(capacity, times.size()), out);
  });
}

size_t plimsoll_take_freed(PlimsollEntry* out, size_t capacity) noexcept { return entries().take_freed(out, capacity); }
const char* plimsoll_lent(PlimsollEntry entry) noexcept { return entries().lent(entry); }
void plimsoll_forget(PlimsollEntry entry) noexcept {
  Ours ours;
  try {
    entries().forget(entry);
  } catch (...) {
    // An unknown entry: there is nothing to forget.
  }
}

PlimsollEntry plimsoll_entry_of(const void* tensor) noexcept {
  const auto& given = *static_cast<const at::Tensor*>(tensor);
  if (!given.defined() || !given.has_storage()) return 0;
  return entries().find(given.storage().unsafeGetStorageImpl());
}

int32_t plimsoll_is_filled(PlimsollEntry entry, int32_t ends_watch, int32_t* filled) {
  *filled = 0;
  if (!entries().watches_any()) return 0;
  return guarded([&] { *filled = entries().has_changed(entry, *entries().lock(entry), ends_watch != 0); });
}
int32_t plimsoll_park(PlimsollEntry entry, void** bytes) {
  return guarded([&] { *bytes = entries().park(entry); });
}
int32_t plimsoll_unpark(PlimsollEntry entry) {
  return guarded([&] { entries().unpark(entry); });
}
int32_t plimsoll_release(PlimsollEntry entry) {
  return guarded([&] { entries().release(entry); });
}
int32_t plimsoll_allocate(PlimsollEntry entry, void** bytes) {
  return guarded([&] { *bytes = entries().allocate(entry); });
}
int32_t plimsoll_hold(PlimsollEntry entry) {
  return guarded([&] { entries().hold(entry); });
}
int32_t plimsoll_unhold(PlimsollEntry entry) {
  return guarded([&] { entries().unhold(entry); });
}

int32_t plimsoll_is_orphan(PlimsollEntry entry, int32_t* orphan) {
  return guarded([&] { *orphan = entries().is_orphan(entry); });
}
int32_t plimsoll_bytes_of(PlimsollEntry entry, uint64_t* bytes) {
  return guarded([&] { *bytes = entries().lock(entry)->nbytes(); });
}

int32_t plimsoll_rerun(PlimsollRecipe* recipe, const PlimsollEntry* inputs, size_t input_count, PlimsollEntry* outputs,
                       size_t output_count) {
  Rerunning rerunning(reinterpret_cast<Recipe*>(recipe)->facts().is_region);
  uint64_t refused_before = refused_here;
  // A kernel runs: what it allocates may raise pressure like any other.
  int32_t ended = caught([&] {
    const auto& known = *reinterpret_cast<Recipe*>(recipe);
    TORCH_CHECK(input_count == known.accesses().size(), "a rerun of ", known.facts().text, " needs ",
                known.accesses().size(), " inputs, not ", input_count);
    InStream stream_guard(known.stream());
    std::vector<Storage> storages;
    for (size_t index = 0; index < input_count; ++index) {
      const AccessRecord& access = known.accesses()[index];
      if (access.mode == PLIMSOLL_SIDE_EFFECT) {
        storages.emplace_back();
      } else if (access.mode == PLIMSOLL_OVERWRITE) {
        auto* allocator = c10::GetAllocator(access.device().type());
        storages.push_back(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), access.bytes,
                                                                 allocator->allocate(access.bytes), allocator, true));
      } else {
        storages.push_back(entries().lock(inputs[index]));
      }
    }
    uint64_t refused = refusals.load(std::memory_order_relaxed);
    std::vector<Storage> results = known.run(std::move(storages));
    throw_refusal_after(refused);
    TORCH_CHECK(results.size() == output_count, "a rerun of ", known.facts().text, " made ", results.size(),
                " storages where it made ", output_count, " before");
    for (size_t index = 0; index < output_count; ++index) {
      PlimsollEntry there = entries().find(results[index].get());
      outputs[index] = there ? there : entries().beside(std::move(results[index]));
    }
  });
  // A kernel of Python's tells of it by an exception of its own.
  return ended == -1 && refused_here != refused_before ? PLIMSOLL_NO_ROOM : ended;
}

void plimsoll_recipe_share(PlimsollRecipe* recipe) noexcept { reinterpret_cast<Recipe*>(recipe)->share(); }
void plimsoll_recipe_free(PlimsollRecipe* recipe) noexcept { reinterpret_cast<Recipe*>(recipe)->free(); }
size_t plimsoll_recipe_bytes(const PlimsollRecipe* recipe) noexcept { return reinterpret_cast<const Recipe*>(recipe)->bytes(); }
size_t plimsoll_entry_bytes(void) noexcept { return entries().bytes(); }

int32_t plimsoll_adopt(PlimsollEntry from, PlimsollEntry to) {
  return guarded([&] { entries().adopt(from, to); });
}
int32_t plimsoll_discard(PlimsollEntry entry) {
  return guarded([&] { entries().discard(entry); });
}
