// Values of which a program has few, each under a small number.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

namespace plimsoll {

// Found without a lock, added under one; never forgotten.
template <class Value, size_t kMost>
class Numbered {
 public:
  static_assert(kMost <= UINT16_MAX);

  // None where there are too many.
  std::optional<uint16_t> number(const Value& value) {
    size_t known = count_.load(std::memory_order_acquire);
    for (size_t index = 0; index < known; ++index)
      if (values_[index] == value) return static_cast<uint16_t>(index);
    std::lock_guard<std::mutex> guard(mutex_);
    for (known = 0; known < count_.load(std::memory_order_relaxed); ++known)
      if (values_[known] == value) return static_cast<uint16_t>(known);
    if (known == kMost) return std::nullopt;
    values_[known] = value;
    count_.store(known + 1, std::memory_order_release);
    return static_cast<uint16_t>(known);
  }

  const Value& value(uint16_t number) const { return values_[number]; }

 private:
  std::array<Value, kMost> values_;
  std::atomic<size_t> count_{0};
  std::mutex mutex_;
};

}  // namespace plimsoll
