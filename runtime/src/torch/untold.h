// What libtorch warns of where nobody has called it.
#pragma once

#include <c10/util/Exception.h>

namespace plimsoll {

// While there is one, what this thread is warned of is told to nobody.
class Untold {
 public:
  Untold() : guard_(&nobody()) {}

 private:
  struct Nobody : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  static Nobody& nobody() {
    static Nobody& nobody = *new Nobody();
    return nobody;
  }

  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace plimsoll
