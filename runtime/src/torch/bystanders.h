// Bystanders: threads of the program beside the one that an iteration is of. Their operators are no part of the iteration; those that
// use what it has evicted find it all the same.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

namespace plimsoll {

// A thread that excludes this key is a bystander, and so are the autograd threads that work for it. It is that of a device for which
// libtorch has no kernels, and is below those that libtorch excludes while Python runs an operator.
constexpr c10::DispatchKey kBystanderKey = c10::DispatchKey::FPGA;

inline bool is_bystander() { return c10::impl::tls_local_dispatch_key_set().excluded_.has(kBystanderKey); }

// This thread is one from now on, unless it is the one that is intercepted.
void stand_by();
// This thread goes on with something that is no part of the operator that it is within, if it is within one, as a bystander. Meanwhile
// others may draw random numbers. That ends where step_back() is told how often it had stepped aside before.
void step_aside();
size_t times_aside();
void step_back(size_t times);
// Switches interception of this thread on or off. When it comes on, whatever bystanders have begun unheard is over.
void intercept_this_thread(bool on);
// Whether anybody has ever listened in this process. Before, and in one that was forked, bystanders are left alone.
bool is_in_use();
// A process that was forked has none of the others.
void forget_bystanders();

// An operator of a bystander's that runs while nobody listens, or none.
class Unheard {
 public:
  Unheard() = default;
  Unheard(const Unheard&) = delete;
  Unheard& operator=(const Unheard&) = delete;
  ~Unheard() { end(); }

  // Whoever begins to listen waits until it is over. Whether it is: somebody may be listening already.
  bool begin();
  void end();

 private:
  bool is_under_way_ = false;
};

// Lets Python's other threads go on, if this one holds them up, until hold_python_up() is given the result.
void* let_python_go_on();
void hold_python_up(void* state);

class WithoutPython {
 public:
  WithoutPython() = default;
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;
  ~WithoutPython() { hold_python_up(state_); }

 private:
  void* state_ = let_python_go_on();
};

// Held while an operator draws random numbers, and while one that did runs again, for which the generator is set back: another
// thread's would draw others.
class DrawsMutex {
 public:
  void lock();
  void unlock();
};
using Draws = std::unique_lock<DrawsMutex>;
Draws draws();
// How often libtorch's default generators have moved on while this thread had stepped aside: a rerun of what it was within would draw
// other numbers.
uint64_t drawn_aside();

// While there is one, this thread runs an operator again: it holds what bystanders wait for, so what interrupts it cannot be one. A signal
// is told of when it is over, if postpone() was asked to. Where Python runs it, nothing is collected as garbage meanwhile.
class Rerunning {
 public:
  explicit Rerunning(bool by_python);
  Rerunning(const Rerunning&) = delete;
  Rerunning& operator=(const Rerunning&) = delete;
  ~Rerunning();

 private:
  bool by_python_;
};
// Whether the handler of that signal comes later.
bool postpone(int signal);

}  // namespace plimsoll
