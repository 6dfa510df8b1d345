// Operators on lists of tensors that work out each place by itself, as fused optimizers do. What such an operator uses has to be
// there together, so where that is much it is run in pieces: once for the first places of its lists, then for the next.
#pragma once

#include "operators.h"

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

namespace plimsoll {

// What the lists of one piece of an operator may hold, where it is of more than one place; UINT64_MAX leaves all operators whole.
void set_piece_bytes(uint64_t bytes);

using Ends = c10::SmallVector<size_t, 32>;

// Where each piece of a call ends, by the place in its lists; none where it stays whole: it is small enough, or its kernel could be
// chosen by what is in another place.
Ends pieces(const OperatorFacts& facts, const c10::IValue* arguments);
// The arguments of the piece from place `begin` to `end`.
torch::jit::Stack piece_of(const OperatorFacts& facts, const c10::IValue* arguments, size_t begin, size_t end);

}  // namespace plimsoll
