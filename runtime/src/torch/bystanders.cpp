#include "bystanders.h"

#include "accelerator.h"
#include "allocator.h"
#include "entries.h"
#include "interceptor.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace plimsoll {
namespace {

std::atomic<bool> in_use{false};
std::atomic<bool> is_listening{false};
std::atomic<int> unheard{0};
thread_local bool stands_by = false;
thread_local size_t rerunning = 0;
thread_local std::vector<int> postponed;

void set_keys(bool is_intercepted) {
  c10::impl::tls_set_dispatch_key_included(kInterceptorKey, is_intercepted || stands_by);
  c10::impl::tls_set_dispatch_key_excluded(kBystanderKey, !is_intercepted && stands_by);
}

void set_not_intercepted(bool on) {
  for (c10::DispatchKey key : kNotIntercepted) c10::impl::tls_set_dispatch_key_excluded(key, on);
}

// Whose operator a thread was within that has stepped aside.
enum class Within { None, AnIterations, ABystanders };

std::mutex* drawing = new std::mutex();  // another one in a process that was forked
thread_local int64_t drawing_here = 0;   // how often this thread holds it

// How a thread was before it stepped aside.
struct Before {
  Within within;
  int64_t drawing_here;
  std::vector<at::Tensor> generators;  // their states, where it held the lock
};
thread_local std::vector<Before> asides;
thread_local uint64_t drawn_aside_here = 0;

// What Python has for this, in a process that is one of Python's.
struct Python {
  int (*holds)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  void* (*release)() = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  void (*take)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  int (*interrupt)(int) = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "PyErr_SetInterruptEx"));
  int (*stop_collecting)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGC_Disable"));
  int (*start_collecting)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGC_Enable"));
  int (*ensure)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  void (*let_go)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));

  bool collects() const { return stop_collecting && start_collecting && ensure && let_go; }
};

const Python& python() {
  static const Python python;
  return python;
}

// While there is one, this thread holds up Python's others.
class WithPython {
 public:
  WithPython() = default;
  WithPython(const WithPython&) = delete;
  WithPython& operator=(const WithPython&) = delete;
  ~WithPython() { python().let_go(state_); }

 private:
  int state_ = python().ensure();
};

// How many reruns nothing is collected for, and whether it was before: who holds Python up may look.
size_t without_garbage = 0;
bool was_collecting = false;

}  // namespace

void stand_by() {
  stands_by = true;
  if (!c10::impl::tls_is_dispatch_key_included(kInterceptorKey)) set_keys(false);
}

namespace {

// Of the default generators that operators may draw by.
std::vector<at::Tensor> generator_states() {
  Uncounted uncounted;
  c10::impl::ExcludeDispatchKeyGuard unseen(
      kNotIntercepted | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<at::Tensor> states;
  auto add = [&](c10::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back(generator.get_state());
  };
  add(c10::kCPU);
  if (counts_accelerator()) add(counted_device());
  return states;
}

bool are_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const at::Tensor& one, const at::Tensor& other) {
    return one.nbytes() == other.nbytes() && !std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes());
  });
}

}  // namespace

void step_aside() {
  auto local = c10::impl::tls_local_dispatch_key_set();
  bool is_within = local.included_.has(kInterceptorKey) && local.excluded_.has_all(kNotIntercepted);
  Within within = !is_within ? Within::None : is_bystander() ? Within::ABystanders : Within::AnIterations;
  asides.push_back({within, is_within ? drawing_here : 0, {}});
  if (!is_within) return;
  if (drawing_here > 0) asides.back().generators = generator_states();
  c10::impl::tls_set_dispatch_key_excluded(kBystanderKey, true);
  set_not_intercepted(false);
  if (std::exchange(drawing_here, 0) > 0) drawing->unlock();
}

size_t times_aside() { return asides.size(); }

void step_back(size_t times) {
  for (; asides.size() > times; asides.pop_back()) {
    const Before& before = asides.back();
    if (before.within == Within::None) continue;
    set_not_intercepted(true);
    if (before.drawing_here > 0) {
      draws().release();
      drawing_here = before.drawing_here;
      drawn_aside_here += !are_same(before.generators, generator_states());
    }
    c10::impl::tls_set_dispatch_key_excluded(kBystanderKey, before.within == Within::ABystanders);
  }
}

uint64_t drawn_aside() { return drawn_aside_here; }

Rerunning::Rerunning(bool by_python) : by_python_(by_python && python().collects()) {
  ++rerunning;
  if (!by_python_) return;
  WithPython held;
  if (without_garbage++ == 0) was_collecting = python().stop_collecting();
}

Rerunning::~Rerunning() {
  if (by_python_) {
    WithPython held;
    if (--without_garbage == 0 && was_collecting) python().start_collecting();
  }
  if (--rerunning > 0) return;
  for (int signal : std::exchange(postponed, {})) python().interrupt(signal);
}

bool postpone(int signal) {
  if (!rerunning || !python().interrupt) return false;
  postponed.push_back(signal);
  return true;
}

void intercept_this_thread(bool on) {
  set_keys(on);
  is_listening = on;
  if (on) in_use = true;
  while (on && unheard > 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

bool is_in_use() { return in_use.load(std::memory_order_relaxed); }

void forget_bystanders() {
  in_use = false;
  is_listening = false;
  unheard = 0;
  entries().forget_borrowed();
  // It may be held by a thread that is not there.
  drawing = new std::mutex();
  if (drawing_here > 0) drawing->lock();
  bool is_here = !rerunning && python().collects() && python().holds && python().holds();
  if (is_here && std::exchange(without_garbage, 0) > 0 && was_collecting) python().start_collecting();
}

bool Unheard::begin() {
  // In this order, so that who begins to listen sees it, or is seen.
  ++unheard;
  is_under_way_ = true;
  if (is_listening) end();
  return is_under_way_;
}

void Unheard::end() {
  if (is_under_way_) --unheard;
  is_under_way_ = false;
}

void* let_python_go_on() {
  const Python& its = python();
  return its.holds && its.release && its.take && its.holds() ? its.release() : nullptr;
}

void hold_python_up(void* state) {
  if (state) python().take(state);
}

void DrawsMutex::lock() {
  if (drawing_here == 0 && !drawing->try_lock()) {
    WithoutPython others_go_on;
    drawing->lock();
  }
  ++drawing_here;
}

void DrawsMutex::unlock() {
  if (--drawing_here == 0) drawing->unlock();
}

Draws draws() {
  static DrawsMutex mutex;
  return Draws(mutex);
}

}  // namespace plimsoll
