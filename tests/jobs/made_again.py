"""A job whose operators need more than their arguments to be made again: libtorch's switches as they were, and statistics that are
not moved on twice.

Prints as JSON what it has found, and how often something was evicted."""

import contextlib
import itertools

import job
import torch

SIZE = 256


@contextlib.contextmanager
def thrown(set_switch, on, off):
    set_switch(on)
    try:
        yield
    finally:
        set_switch(off)


def flush(numbers):
    with thrown(torch.set_flush_denormal, True, False):
        return numbers * 1e-38 * 1e-3


def divide(numbers):
    with thrown(torch.set_default_dtype, torch.float64, torch.float32):
        return numbers.long() / 7


def multiply(numbers):
    halves = numbers.bfloat16()
    with torch.backends.mkldnn.flags(enabled=False):
        return halves @ halves


def sums(tensors):
    return [tensor.double().abs().sum().item().hex() for tensor in tensors]


def throw_switches():
    made = [make(torch.randn(SIZE, SIZE)) for make in [flush, divide, multiply]]
    # They give way to others.
    others = [torch.ones(SIZE, SIZE) * number for number in range(13)]
    return sums(made + others)


def normalise(means, variances):
    # The results are of the type of the statistics.
    halves = torch.randn(2, means.numel()).bfloat16()
    batches = itertools.chain([halves], (torch.randn(2, means.numel()) for _ in range(36)))
    moved = [torch.batch_norm_update_stats(batch, means, variances, 0.1)[0] for batch in batches]
    return sums([*moved, means, variances])


def main():
    runtime, _ = job.begin(__doc__)
    statistics = torch.zeros(SIZE * SIZE // 2), torch.ones(SIZE * SIZE // 2)
    found = []
    for _ in range(8):
        with job.iteration(runtime):
            found.append(throw_switches() + normalise(*statistics))
    job.end(runtime, found)


if __name__ == "__main__":
    main()
