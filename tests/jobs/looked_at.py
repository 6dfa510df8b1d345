"""A job that looks at what it runs: in modes, with a class of tensors, in graphs that are traced; and that took functions out of their
modules before it was kept within a budget.

Prints as JSON what it has seen."""

import job
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.random import set_rng_state
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 64


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "own" if function.__name__ == "tolist" else super().__torch_function__(function, types, args, kwargs or {})


def grow(numbers):
    torch.UntypedStorage(8).resize_(16)
    return numbers * 2


USES = [
    torch.Tensor.tolist,
    torch.from_dlpack,
    lambda numbers: numbers.untyped_storage()[:8],
    lambda numbers: numbers.clone().untyped_storage().resize_(8),
    lambda numbers: numbers.clone().share_memory_(),
    lambda numbers: numbers.clone().apply_(lambda number: number),
]


def seen_in(mode, use, numbers):
    with mode:
        use(numbers)
    return mode.seen


def allocated(numbers):
    """What a profiler tells of an operator's memory."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        numbers * 2
    return {event.key: event.self_cpu_memory_usage for event in profiler.key_averages()}


def steps():
    """Of an optimizer that is compiled."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01, foreach=True)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        step()
        optimizer.zero_grad()
    return model.weight.sum().item().hex()


def main():
    runtime, _ = job.begin(__doc__)
    # Beside an iteration, and within one.
    found = [steps(), set_rng_state is torch.random.set_rng_state]
    with job.iteration(runtime):
        numbers = torch.ones(SIZE, SIZE)
        found += [seen_in(mode(), use, numbers) for use in USES for mode in (Operators, Functions)]
        found += [numbers.as_subclass(Own).tolist(), make_fx(grow)(numbers).code.strip(), allocated(numbers)]
    job.end(runtime, found)


if __name__ == "__main__":
    main()
