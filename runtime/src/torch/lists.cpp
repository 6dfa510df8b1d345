#include "lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>

namespace plimsoll {
namespace {

std::atomic<uint64_t> piece_bytes{UINT64_MAX};

// Not all arguments that are lists need be there: of an optimizer that keeps no maxima there are none.
bool is_there(const c10::IValue& list) { return list.isList() && !list.toListRef().empty(); }

uint64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.numel() * tensor.dtype().itemsize() : 0; }

// Whether the kernels of the pieces are those of the whole, for all that a kernel is chosen by is the same in every place.
bool is_uniform(c10::ArrayRef<c10::IValue> list, c10::ArrayRef<c10::IValue> first_list) {
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
    if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.dtype() != first.dtype() ||
        tensor.device() != first.device() || !tensor.is_non_overlapping_and_dense())
      return false;
    if (tensor.numel() != 1 && (tensor.sizes() != beside.sizes() || tensor.strides() != beside.strides())) return false;
  }
  return true;
}

}  // namespace

void set_piece_bytes(uint64_t bytes) { piece_bytes.store(bytes, std::memory_order_relaxed); }

c10::SmallVector<size_t, 32> pieces(const OperatorFacts& facts, const c10::IValue* arguments) {
  c10::SmallVector<size_t, 32> ends;
  uint64_t most = piece_bytes.load(std::memory_order_relaxed), bytes = 0;
  size_t places = arguments[facts.lists[0]].toListRef().size();
  for (size_t place = 0; place < places; ++place) {
    uint64_t here = 0;
    for (size_t index : facts.lists) {
      if (!is_there(arguments[index])) continue;
      const auto& list = arguments[index].toListRef();
      if (place < list.size() && list[place].isTensor()) here += bytes_of(list[place].toTensor());
    }
    if (bytes && here > most - std::min(bytes, most)) {
      ends.push_back(place);
      bytes = 0;
    }
    bytes += here;
  }
  if (ends.empty()) return ends;
  ends.push_back(places);
  for (size_t index : facts.lists)
    if (is_there(arguments[index]) && !is_uniform(arguments[index].toListRef(), arguments[facts.lists[0]].toListRef())) return {};
  for (size_t index : facts.tensor_arguments) {
    const c10::IValue& argument = arguments[index];
    // One number for all places, or it holds one for each of them.
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().numel() != 1) return {};
  }
  return ends;
}

torch::jit::Stack piece_of(const OperatorFacts& facts, const c10::IValue* arguments, size_t begin, size_t end) {
  torch::jit::Stack piece(arguments, arguments + facts.arguments.size());
  for (size_t index : facts.lists) {
    if (!is_there(arguments[index])) continue;
    const auto& whole = arguments[index].toListRef();
    c10::impl::GenericList part(arguments[index].toList().elementType());
    for (size_t place = begin; place < end; ++place) part.push_back(whole[place]);
    piece[index] = std::move(part);
  }
  return piece;
}

}  // namespace plimsoll
