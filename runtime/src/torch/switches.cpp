#include "switches.h"

#include "allocator.h"
#include "numbered.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_test_parallel_materialize.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstring>
#include <new>
#include <thread>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace plimsoll {
namespace {

// libtorch gives out most of its switches one by one, and some only as what comes of several. They stand beside each other, in the
// order of the headers that this is compiled with, and an explicit instantiation may name what is private.
struct First {
  friend constexpr auto member(First);
};
struct Precisions {
  friend constexpr auto member(Precisions);
};
struct HasChanged {
  friend constexpr auto member(HasChanged);
};
template <class Name, auto kMember>
struct IsMember {
  friend constexpr auto member(Name) { return kMember; }
};
template struct IsMember<First, &at::Context::enabled_cudnn>;
template struct IsMember<Precisions, &at::Context::fp32_precision>;
template struct IsMember<HasChanged, &at::NoTF32Guard::changed>;

auto& precisions() { return at::globalContext().*member(Precisions()); }

// The other switches: all that stands before the precisions.
char* switches_begin() { return reinterpret_cast<char*>(&(at::globalContext().*member(First()))); }
size_t switches_bytes() { return static_cast<size_t>(reinterpret_cast<char*>(&precisions()) - switches_begin()); }

#ifdef __SSE__
// What of the processor's own settings changes results: how it rounds, and whether it flushes to zero what is next to it, as a result
// and as an operand.
constexpr uint32_t kChangesResults = _MM_ROUND_MASK | _MM_FLUSH_ZERO_MASK | 0x0040;
#endif

uint32_t floating_point() {
#ifdef __SSE__
  return _mm_getcsr() & kChangesResults;
#else
  return 0;
#endif
}

void set_floating_point([[maybe_unused]] uint32_t wanted) {
#ifdef __SSE__
  // Threads that kernels share their work with are made when they are first needed, and keep for good what is set then.
  Uncounted uncounted;
  at::_test_parallel_materialize(at::empty({1}), at::get_num_threads());
  _mm_setcsr((_mm_getcsr() & ~kChangesResults) | wanted);
#endif
}

// Formulas of libtorch's for backward passes do without TF32: a guard says so, to its thread, for as long as it lives.
void set_without_tf32(bool without) {
  if (without) {
    alignas(at::NoTF32Guard) char outlasts[sizeof(at::NoTF32Guard)];
    new (outlasts) at::NoTF32Guard();
  } else {
    at::NoTF32Guard ends;
    ends.*member(HasChanged()) = true;
  }
}

// Where an operator that is not cast for itself calls others, these are: by the device of what they compute with.
struct Autocast {
  c10::DispatchKey key;
  c10::DeviceType device;
};
constexpr std::array kAutocasts = {Autocast{c10::DispatchKey::AutocastCPU, c10::kCPU},
                                   Autocast{c10::DispatchKey::AutocastCUDA, c10::kCUDA}};
using Types = std::array<c10::ScalarType, kAutocasts.size()>;

Types cast_to() {
  Types types;
  for (size_t index = 0; index < types.size(); ++index) types[index] = at::autocast::get_autocast_dtype(kAutocasts[index].device);
  return types;
}

// The place of a precision among those that are packed into one number.
template <class Key>
unsigned place_of(const Key& key) {
  return 4 * (4 * static_cast<unsigned>(key.first) + static_cast<unsigned>(key.second));
}

}  // namespace

struct Switches {
  std::array<char, 192> context{};
  uint64_t precision = 0;
  c10::ScalarType default_type = c10::ScalarType::Undefined;
  // To which type, by device; undefined where nothing is cast.
  Types autocast{c10::ScalarType::Undefined, c10::ScalarType::Undefined};
  uint32_t floating_point = 0;
  // Where that is not as usual: the threads that share its work have settings of their own.
  std::thread::id of_thread;
  bool without_tf32 = false;
  int threads = 0;

  static Switches now() {
    Switches now;
    TORCH_CHECK(switches_bytes() <= now.context.size(), "libtorch has more switches than are known");
    std::memcpy(now.context.data(), switches_begin(), switches_bytes());
    for (const auto& [key, value] : precisions()) now.precision |= static_cast<uint64_t>(value) << place_of(key);
    now.default_type = c10::get_default_dtype_as_scalartype();
    for (size_t index = 0; index < kAutocasts.size(); ++index)
      if (C10_UNLIKELY(!c10::impl::tls_is_dispatch_key_excluded(kAutocasts[index].key)))
        now.autocast[index] = at::autocast::get_autocast_dtype(kAutocasts[index].device);
    now.floating_point = plimsoll::floating_point();
    if (C10_UNLIKELY(now.floating_point != 0)) now.of_thread = std::this_thread::get_id();
    now.without_tf32 = at::NoTF32Guard::should_disable_tf32();
    now.threads = at::get_num_threads();
    return now;
  }

  // In place of those of `before`.
  void set(const Switches& before) const {
    if (context != before.context) std::memcpy(switches_begin(), context.data(), switches_bytes());
    if (precision != before.precision)
      for (auto& [key, value] : precisions()) value = static_cast<at::Float32Precision>(precision >> place_of(key) & 0xf);
    if (default_type != before.default_type) c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_type));
    for (size_t index = 0; autocast != before.autocast && index < kAutocasts.size(); ++index) {
      bool is_cast = autocast[index] != c10::ScalarType::Undefined;
      c10::impl::tls_set_dispatch_key_excluded(kAutocasts[index].key, !is_cast);
      if (is_cast) at::autocast::set_autocast_dtype(kAutocasts[index].device, autocast[index]);
    }
    if (threads != before.threads) at::set_num_threads(threads);
    if (floating_point != before.floating_point) set_floating_point(floating_point);
    if (without_tf32 != before.without_tf32) set_without_tf32(without_tf32);
  }

  bool operator==(const Switches& other) const {
    return context == other.context && precision == other.precision && default_type == other.default_type &&
           autocast == other.autocast && floating_point == other.floating_point && of_thread == other.of_thread &&
           without_tf32 == other.without_tf32 && threads == other.threads;
  }
};

struct Switched::Before {
  Switches switches;
  Types cast_to;
};

namespace {

auto& known = *new Numbered<Switches, 256>();  // outlives every recipe

}  // namespace

std::optional<uint16_t> switches_now() { return known.number(Switches::now()); }

Switched::Switched(uint16_t wanted) : wanted_(known.value(wanted)) {
  TORCH_CHECK(wanted_.of_thread == std::thread::id() || wanted_.of_thread == std::this_thread::get_id(),
              "an operator that ran while its processor rounded otherwise, or flushed to zero, runs again in its own thread alone");
  Switches now = Switches::now();
  if (now == wanted_) return;
  before_ = std::make_unique<Before>(Before{now, cast_to()});
  wanted_.set(now);
}

Switched::~Switched() {
  if (C10_LIKELY(before_ == nullptr)) return;
  before_->switches.set(wanted_);
  // While nothing was cast, that was said for when something is again.
  for (size_t index = 0; index < kAutocasts.size(); ++index)
    at::autocast::set_autocast_dtype(kAutocasts[index].device, before_->cast_to[index]);
}

}  // namespace plimsoll
