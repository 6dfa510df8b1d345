// A compiled region: a stretch of a Python program that reads and writes tensors by their addresses, and allocates others,
// past the dispatcher. `torch.compile` makes such. To Rust it is one operator, with a recipe like others: what it reads is
// brought back and stays, what it makes is known from its end on, and nothing within is intercepted.
//
// It is entered and left, not called: it may let go of what it reads before it ends, which the arguments of a call could not.
#include "call.h"
#include "interceptor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <vector>

namespace plimsoll {
namespace {

// A region under way.
class Region {
 public:
  Region(const OperatorFacts& facts, c10::DispatchKeySet keys, const c10::IValue* arguments) : call_(facts, keys, arguments) {
    call_.start([] {});
  }
  void leave(const c10::IValue& results) { call_.finish(&results); }
  void fail() { call_.fail(); }

 private:
  c10::impl::ExcludeDispatchKeyGuard not_intercepted_{kNotIntercepted};
  Call call_;
};

// Those of this thread, each within the one before; null where nobody listens.
thread_local std::vector<std::unique_ptr<Region>> regions;

std::unique_ptr<Region> take_innermost() {
  TORCH_CHECK(!regions.empty(), "a region ends that never began");
  auto innermost = std::move(regions.back());
  regions.pop_back();
  return innermost;
}

// Its arguments are the operator's, and the name of that.
void enter(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  size_t count = handle.schema().arguments().size();
  const c10::IValue* arguments = stack->data() + (stack->size() - count);
  const auto& name = arguments[count - 1].toStringRef();
  // A dispatch mode that it runs in is not there when it runs again.
  keys = (keys & kBelowInterceptor).remove(c10::DispatchKey::Python);
  std::unique_ptr<Region> region;
  if (is_intercepted()) {
    const auto& facts = facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""));
    region = std::make_unique<Region>(facts, keys, arguments);
  }
  regions.push_back(std::move(region));
  torch::jit::drop(*stack, count);
}

void leave(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::IValue results = torch::jit::pop(*stack);
  if (auto region = take_innermost()) region->leave(results);
}

int64_t depth() { return static_cast<int64_t>(regions.size()); }

// All that are within the one of that depth, which may be none: an exception may come right after a region was entered or left.
void fail_to(int64_t depth) {
  while (regions.size() > static_cast<size_t>(depth))
    if (auto region = take_innermost()) region->fail();
}

// What a region is: one that can run again, unless it writes more than one tensor; one that cannot; one that also may send what
// it uses to other processes, or get it from them. `numbers` are the arguments that are no tensors. What runs the graph of a
// number again is Python's: runtime/python/plimsoll/_compiled.py.
TORCH_LIBRARY_FRAGMENT(plimsoll, library) {
  // It may draw random numbers.
  library.def("region(Tensor[] read, Tensor[] written, int[] numbers, int graph) -> Tensor[]",
              {at::Tag::nondeterministic_seeded});
  library.def("region_once(Tensor[] read, Tensor[] written, int[] numbers, int graph) -> Tensor[]");
  library.def("communicating_region(Tensor[] read, Tensor[] written, int[] numbers, int graph) -> Tensor[]");
  library.def("enter_region(Tensor[] read, Tensor[] written, int[] numbers, int graph, str operator) -> ()");
  // While it is read by its address: the operator is `plimsoll::read`.
  library.def("enter_read(Storage storage, str operator) -> ()");
  library.def("leave_region(Tensor[] results) -> ()");
  library.def("region_depth() -> int");
  library.def("fail_regions(int depth) -> ()");
}

void implement(torch::Library& library) {
  library.impl("enter_region", torch::CppFunction::makeFromBoxedFunction<&enter>());
  library.impl("enter_read", torch::CppFunction::makeFromBoxedFunction<&enter>());
  library.impl("leave_region", torch::CppFunction::makeFromBoxedFunction<&leave>());
  library.impl("region_depth", &depth);
  library.impl("fail_regions", &fail_to);
}

TORCH_LIBRARY_IMPL(plimsoll, CompositeImplicitAutograd, library) { implement(library); }
// Neither does a dispatch mode count these or take them over, nor are they traced: the program has not called them.
TORCH_LIBRARY_IMPL(plimsoll, Python, library) { implement(library); }
TORCH_LIBRARY_IMPL(plimsoll, PreDispatch, library) { implement(library); }
TORCH_LIBRARY_IMPL(plimsoll, Tracer, library) { implement(library); }

}  // namespace
}  // namespace plimsoll
