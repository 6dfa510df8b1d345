"""A job whose operators are made again wrong by whoever takes their arguments, their kinds or their surroundings for what they were:
one that fails after it has written, one whose script changes the list that it gave, one that is defined anew, and one that is run
again in a dispatch mode.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 256


def average(numbers):
    doubled = numbers * 2
    rows = torch.tensor([0, 1, 2, 1, 5, 1])
    # Sums are written before there is room to count what was added.
    doubled.index_reduce_(0, rows, torch.ones(6, SIZE), "mean")
    return doubled, job.make_room(4)


@torch.jit.script
def rolled(numbers: torch.Tensor, times: int):
    by, all = [1], torch.jit.annotate(list[torch.Tensor], [])
    for _ in range(times):
        all.append(torch.roll(numbers, by, [0]))
        by[0] += 1
    return all


def roll(numbers):
    with torch.inference_mode():
        [once] = rolled(numbers, 1)
        return once, job.make_room(4)


def define(scales):
    @torch.library.custom_op("job::scale", mutates_args={"numbers"} if scales else ())
    def scale(numbers: torch.Tensor) -> torch.Tensor:
        if scales:
            numbers.mul_(5)
        return numbers[:1] + 1

    return scale


def scale(numbers):
    for scales in [False, True]:
        doubled = numbers * 2
        define(scales)(doubled)
    # Something else can be made again.
    return doubled, [numbers * 3, job.make_room(3)]


class Sevens(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return torch.full_like(made, 7) if function is torch.ops.aten.scalar_tensor.default else made


def halve(numbers):
    half = numbers * 0.5
    others = job.make_room(4)
    with Sevens():
        job.by_address(lambda numbers: None)(half)
    return half, others


def main():
    runtime, _ = job.begin(__doc__)
    numbers = torch.randn(SIZE, SIZE)
    found = []
    for part in [average, roll, scale, halve] * 16:
        with torch.no_grad(), job.iteration(runtime):
            made, others = part(numbers)
        found.append([part.__name__, made.double().abs().sum().item().hex(), made[0, 0].item()])
        del made, others
    job.end(runtime, found)


if __name__ == "__main__":
    main()
