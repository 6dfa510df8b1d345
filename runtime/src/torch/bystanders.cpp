#include "bystanders.h"

#include "interceptor.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace plimsoll {
namespace {

std::atomic<bool> is_watching{false};
std::atomic<int> unwatched{0};
thread_local bool stands_by = false;

void set_keys(bool is_intercepted) {
  c10::impl::tls_set_dispatch_key_included(kInterceptorKey, is_intercepted || stands_by);
  c10::impl::tls_set_dispatch_key_excluded(kBystanderKey, !is_intercepted && stands_by);
}

}  // namespace

void stand_by() {
  stands_by = true;
  if (!c10::impl::tls_is_dispatch_key_included(kInterceptorKey)) set_keys(false);
}

void intercept_this_thread(bool on) {
  set_keys(on);
  is_watching = on;
  while (on && unwatched > 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void forget_bystanders() {
  is_watching = false;
  unwatched = 0;
}

bool Unwatched::begin() {
  // In this order, so that who begins to watch sees it, or is seen.
  ++unwatched;
  is_under_way_ = true;
  return is_watching;
}

void Unwatched::end() {
  if (is_under_way_) --unwatched;
  is_under_way_ = false;
}

std::unique_lock<std::mutex> draws() {
  static auto* mutex = new std::mutex();
  return std::unique_lock<std::mutex>(*mutex);
}

}  // namespace plimsoll
