"""A job whose operators do not say all that they do, or go by more than they are given: one that runs without TF32, one that gives a
storage's bytes back, one that writes a gradient, and one that copies when somebody writes.

Prints as JSON what it has found, and how often something was evicted."""

import ctypes
import pathlib

import job
import torch
import torch._inductor.lowering  # which defines what resizes storages

SIZE = 256


class WithoutTF32:
    """As formulas of libtorch's for backward passes run what they call."""

    _libtorch = ctypes.CDLL(pathlib.Path(torch.__file__).parent / "lib/libtorch_cpu.so")

    def __enter__(self):
        self.guard = ctypes.create_string_buffer(1)
        self._libtorch._ZN2at11NoTF32GuardC1Ev(self.guard)

    def __exit__(self, *_):
        self._libtorch._ZN2at11NoTF32GuardD1Ev(self.guard)

    @classmethod
    def is_on(cls):
        return cls._libtorch._ZN2at11NoTF32Guard19should_disable_tf32Ev() & 1


def look_for_tf32(numbers):
    library = torch.library.Library("aten", "IMPL")
    library.impl("tril", lambda numbers, diagonal=0: torch.full_like(numbers, WithoutTF32.is_on()), "CPU")
    with WithoutTF32():
        without = numbers.tril()
    job.make_room(6)
    found = [without.mean().item()]
    del without
    made = numbers.tril()
    job.make_room(6)
    with WithoutTF32():
        found.append(made.mean().item())
    library._destroy()
    return found


def resize(numbers):
    doubled = numbers * 2
    made, others = doubled.sin(), job.make_room(5)
    torch.ops.inductor.resize_storage_bytes_(doubled, 0)
    return [made.sum().item(), len(others)]


def accumulate(numbers):
    parameter = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
    parameter.grad = numbers.sin()
    job.make_room(5)
    torch.ops.inductor.accumulate_grad_(parameter, numbers)
    return [parameter.grad.sum().item()]


def clone_lazily(numbers):
    tripled = numbers * 3
    clone = torch._lazy_clone(tripled[1:].t())
    layout = [list(clone.shape), clone.stride(), clone.storage_offset()]
    job.make_room(5)
    clone.add_(1)
    found = [clone.sum().item()]
    del clone
    job.make_room(5)
    return [*found, tripled.sum().item(), layout]


def main():
    runtime, _ = job.begin(__doc__)
    numbers = torch.randn(SIZE, SIZE)
    found = []
    for place, part in enumerate([look_for_tf32, resize, accumulate, clone_lazily] * 8):
        with torch.no_grad(), job.iteration(runtime):
            [numbers[0] * 2 for _ in range(place)]  # no plan is known for it
            found.append([part.__name__, part(numbers)])
    job.end(runtime, found)


if __name__ == "__main__":
    main()
