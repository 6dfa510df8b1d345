// Looks at what storages hold before and after every operator, for operators that do what nobody is told: write an input or
// draw random numbers where their schema does not say so, or make other bits of the same inputs. Slow; off unless asked for.
#pragma once

#include <c10/util/ArrayRef.h>

#include "entries.h"
#include "operators.h"
#include "shim.h"

#include <atomic>
#include <string>
#include <vector>

namespace plimsoll {

// What operators are audited for: PlimsollAudit.
inline std::atomic<int32_t> audited_for{PLIMSOLL_NO_AUDIT};

// One operator under audit.
class Audit {
 public:
  // Before the operator runs on `storages`, of which it has those `accesses`.
  Audit(const OperatorFacts& facts, c10::ArrayRef<c10::StorageImpl*> storages, c10::ArrayRef<PlimsollAccess> accesses);
  // After it has run and made storages.
  void end(c10::ArrayRef<c10::StorageImpl*> created) const;

 private:
  // One of its inputs, which it may hold the last reference to.
  struct Input {
    Storage storage;
    uint32_t mode;  // PlimsollMode
    uint64_t digest;  // of what it held, unless that is overwritten
  };

  void look_for_effects() const;
  void look_for_other_bits(c10::ArrayRef<c10::StorageImpl*> created) const;

  const OperatorFacts& facts_;
  uint64_t generator_;
  std::vector<Input> inputs_;
};

// Starts another audit, or none.
void audit(int32_t what);
// What audits have found since the last call, one description for each finding.
std::vector<std::string> take_audit_findings();

}  // namespace plimsoll
