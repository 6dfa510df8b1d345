#include "lists.h"

#include "interceptor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace plimsoll {
namespace {

std::atomic<uint64_t> piece_bytes{UINT64_MAX};

// Not all arguments that are lists need be there: of an optimizer that keeps no maxima there are none.
bool is_there(const c10::IValue& list) { return list.isList() && !list.toListRef().empty(); }

// The bytes of one place; none where what is there has no numbers that can be told.
std::optional<uint64_t> bytes_at(const OperatorFacts& facts, const c10::IValue* arguments, size_t place) {
  uint64_t bytes = 0;
  for (size_t index : facts.lists) {
    if (!is_there(arguments[index])) continue;
    auto list = arguments[index].toListRef();
    if (place >= list.size()) return std::nullopt;
    if (!list[place].isTensor()) continue;
    const at::Tensor& tensor = list[place].toTensor();
    if (!tensor.defined() || tensor.is_meta() || !has_plain_storage(tensor.unsafeGetTensorImpl())) return std::nullopt;
    bytes += tensor.nbytes();
  }
  return bytes;
}

// Whether their numbers lie alike: a dimension of one has no stride.
bool are_laid_out_alike(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.sizes() != other.sizes()) return false;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    if (tensor.size(dimension) != 1 && tensor.stride(dimension) != other.stride(dimension)) return false;
  return true;
}

// Whether all that a kernel is chosen by is the same in every place.
bool is_uniform(c10::ArrayRef<c10::IValue> list, c10::ArrayRef<c10::IValue> first_list, bool is_of_steps) {
  if (list.size() != first_list.size()) return false;
  if (!list[0].isTensor()) {
    // Numbers.
    auto is_alike = [&](const c10::IValue& number) { return number.tagKind() == list[0].tagKind(); };
    return std::all_of(list.begin(), list.end(), is_alike);
  }
  const at::Tensor& first = list[0].toTensor();
  for (size_t place = 0; place < list.size(); ++place) {
    const at::Tensor& tensor = list[place].toTensor();
    const at::Tensor& beside = first_list[place].toTensor();
    if (tensor.dtype() != first.dtype() || tensor.device() != first.device() || !tensor.is_non_overlapping_and_dense()) return false;
    if (!is_of_steps && !are_laid_out_alike(tensor, beside)) return false;
  }
  return true;
}

}  // namespace

void set_piece_bytes(uint64_t bytes) { piece_bytes.store(bytes, std::memory_order_relaxed); }

c10::SmallVector<size_t, 32> pieces(const OperatorFacts& facts, const c10::IValue* arguments) {
  uint64_t most = piece_bytes.load(std::memory_order_relaxed), bytes = 0;
  if (most == UINT64_MAX) return {};
  c10::SmallVector<size_t, 32> ends;
  auto first_list = arguments[facts.lists[0]].toListRef();
  for (size_t place = 0; place < first_list.size(); ++place) {
    auto here = bytes_at(facts, arguments, place);
    if (!here) return {};
    if (bytes && bytes + *here > most) {
      ends.push_back(place);
      bytes = 0;
    }
    bytes += *here;
  }
  if (ends.empty()) return ends;
  ends.push_back(first_list.size());
  for (size_t index : facts.lists) {
    bool is_of_steps = static_cast<int>(index) == facts.steps_argument;
    if (is_there(arguments[index]) && !is_uniform(arguments[index].toListRef(), first_list, is_of_steps)) return {};
  }
  return ends;
}

torch::jit::Stack piece_of(const OperatorFacts& facts, const c10::IValue* arguments, size_t begin, size_t end) {
  torch::jit::Stack piece(arguments, arguments + facts.arguments.size());
  for (size_t index : facts.lists) {
    if (!is_there(arguments[index])) continue;
    auto whole = arguments[index].toListRef();
    c10::impl::GenericList part(arguments[index].toList().elementType());
    for (size_t place = begin; place < end; ++place) part.push_back(whole[place]);
    piece[index] = std::move(part);
  }
  return piece;
}

}  // namespace plimsoll
