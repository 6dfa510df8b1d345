// By which kernels operators go, and how these compute, as far as the program may change it while it runs: libtorch's own switches,
// as to use cuDNN or TF32, its default type, whether what a kernel calls is cast (autocast), the threads that a kernel uses, how the
// processor rounds, and whether it flushes to zero what is next to it. An operator that is run again gives the same bits by the same ones.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace plimsoll {

struct Switches;

// The number of those that are set now, for this thread where they are a thread's; none where a program has set them in more ways
// than are told apart.
std::optional<uint16_t> switches_now();

// Sets those of that number, while it lives. Most are the process's: other threads' operators go by them, too, meanwhile.
class Switched {
 public:
  explicit Switched(uint16_t wanted);
  Switched(const Switched&) = delete;
  Switched& operator=(const Switched&) = delete;
  ~Switched();

 private:
  const Switches& wanted_;
  struct Before;
  std::unique_ptr<Before> before_;  // where they are others
};

}  // namespace plimsoll
