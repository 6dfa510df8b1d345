// The processor's kernels, for tensors of a late device.
#pragma once

#include "kernels.h"

#include <unordered_map>
#include <unordered_set>

namespace stand_in {

// Does all that the current stream was asked for: what every kernel begins with.
void finish_current_stream();

// The tensors of one call, as the processor sees them: the same bytes.
class Twins {
 public:
  at::Tensor of(const at::Tensor& tensor);
  std::optional<at::Tensor> of(const std::optional<at::Tensor>& tensor);
  // What a kernel made, on the device: an argument, a view of one, or a copy.
  at::Tensor back(const at::Tensor& found);
  // Arguments that a kernel has made larger become so on the device.
  void resize_back();
  // What a kernel wrote to an argument is there when the stream comes to it.
  void written(const at::Tensor& argument);

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> twins_, originals_;
  std::unordered_set<c10::StorageImpl*> written_;
};

}  // namespace stand_in
