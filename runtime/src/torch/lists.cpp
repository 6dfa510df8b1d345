#include "lists.h"

#include "interceptor.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

namespace plimsoll {
namespace {

using Values = c10::ArrayRef<c10::IValue>;
using Lists = c10::SmallVector<Values, 8>;

std::atomic<uint64_t> piece_bytes{UINT64_MAX};

// The bytes of one place; none where what is there has no numbers that can be told.
std::optional<uint64_t> bytes_at(const Lists& lists, size_t place) {
  uint64_t bytes = 0;
  for (Values list : lists) {
    if (!list[place].isTensor()) continue;
    const at::Tensor& tensor = list[place].toTensor();
    if (!tensor.defined() || tensor.is_meta() || !has_plain_storage(tensor.unsafeGetTensorImpl())) return std::nullopt;
    bytes += tensor.nbytes();
  }
  return bytes;
}

// Where pieces end, by their bytes; none where lists are not as long as each other.
Ends ends_by_bytes(const Lists& lists) {
  uint64_t most = piece_bytes.load(std::memory_order_relaxed), bytes = 0;
  if (most == UINT64_MAX || lists.empty()) return {};
  if (!std::all_of(lists.begin(), lists.end(), [&](Values list) { return list.size() == lists[0].size(); })) return {};
  Ends ends;
  for (size_t place = 0; place < lists[0].size(); ++place) {
    auto here = bytes_at(lists, place);
    if (!here) return {};
    if (bytes && bytes + *here > most) {
      ends.push_back(place);
      bytes = 0;
    }
    bytes += *here;
  }
  if (!ends.empty()) ends.push_back(lists[0].size());
  return ends;
}

// Whether all that a kernel is chosen by is the same in every place of a list.
bool is_uniform(Values list) {
  if (!list[0].isTensor()) {
    // Numbers.
    return std::all_of(list.begin(), list.end(), [&](const auto& number) { return number.tagKind() == list[0].tagKind(); });
  }
  const at::Tensor& first = list[0].toTensor();
  return std::all_of(list.begin(), list.end(), [&](const auto& value) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.dtype() == first.dtype() && tensor.device() == first.device() && tensor.is_non_overlapping_and_dense();
  });
}

// Whether their numbers lie alike: a dimension of one has no stride.
bool are_laid_out_alike(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.sizes() != other.sizes()) return false;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension)
    if (tensor.size(dimension) != 1 && tensor.stride(dimension) != other.stride(dimension)) return false;
  return true;
}

// Whether the two lie alike in every place, or in none; or no kernel can be chosen by that, for they are on two devices.
bool are_uniform(Values list, Values other) {
  if (!list[0].isTensor() || !other[0].isTensor() || list[0].toTensor().device() != other[0].toTensor().device()) return true;
  size_t alike = 0;
  for (size_t place = 0; place < list.size(); ++place) alike += are_laid_out_alike(list[place].toTensor(), other[place].toTensor());
  return alike == 0 || alike == list.size();
}

// Where pieces end. A kernel is chosen by how the first `laid_out` of the lists lie beside each other, too.
Ends ends_of(const Lists& lists, size_t laid_out) {
  Ends ends = ends_by_bytes(lists);
  if (ends.empty()) return ends;
  bool uniform = std::all_of(lists.begin(), lists.end(), is_uniform);
  for (size_t list = 1; list < laid_out; ++list)
    for (size_t other = 0; other < list; ++other) uniform = uniform && are_uniform(lists[list], lists[other]);
  return uniform ? ends : Ends();
}

// Not all arguments that are lists need be there: of an optimizer that keeps no maxima there are none.
bool is_there(const c10::IValue& list) { return list.isList() && !list.toListRef().empty(); }

// Whether memory of one place is memory of another, too.
bool places_overlap(const Lists& lists) {
  struct Range {
    const void* storage;
    int64_t begin, end;
    size_t place;
  };
  std::vector<Range> ranges;
  for (Values list : lists)
    for (size_t place = 0; place < list.size(); ++place) {
      const at::Tensor& tensor = list[place].toTensor();
      int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
      ranges.push_back({tensor.storage().unsafeGetStorageImpl(), begin, begin + static_cast<int64_t>(tensor.nbytes()), place});
    }
  std::sort(ranges.begin(), ranges.end(), [](const Range& one, const Range& other) {
    return std::tie(one.storage, one.begin) < std::tie(other.storage, other.begin);
  });
  // The one so far that reaches furthest.
  Range furthest{};
  for (const Range& range : ranges) {
    bool is_within = range.storage == furthest.storage && range.begin < furthest.end;
    if (is_within && range.place != furthest.place) return true;
    if (!is_within || range.end > furthest.end) furthest = range;
  }
  return false;
}

// Of several operators in turn that work on the same lists, which come one after another, each as long. What one of them does to one
// place the next may find in another, unless they are apart.
void pieces_of_several(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto lists_count = static_cast<size_t>(torch::jit::pop(*stack).toInt());
  c10::IValue tensors = torch::jit::pop(*stack);
  Lists lists;
  size_t places = tensors.toListRef().size() / lists_count;
  for (size_t list = 0; list < lists_count; ++list) lists.push_back(tensors.toListRef().slice(list * places, places));
  Ends ends = ends_of(lists, lists_count);
  if (!ends.empty() && places_overlap(lists)) ends.clear();
  torch::jit::push(*stack, std::vector<int64_t>(ends.begin(), ends.end()));
}

TORCH_LIBRARY_FRAGMENT(plimsoll, library) {
  library.def("pieces(Tensor[] tensors, int lists) -> int[]", torch::CppFunction::makeFromBoxedFunction<&pieces_of_several>());
}

}  // namespace

void set_piece_bytes(uint64_t bytes) { piece_bytes.store(bytes, std::memory_order_relaxed); }

Ends pieces(const OperatorFacts& facts, const c10::IValue* arguments) {
  Lists lists;
  for (size_t index : facts.lists)
    if (is_there(arguments[index])) lists.push_back(arguments[index].toListRef());
  return ends_of(lists, lists.size() - facts.ends_with_steps);
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
