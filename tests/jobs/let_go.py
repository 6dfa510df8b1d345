"""Whoever lets go of a tensor may do so while its bytes are made again: here what it is made from does, in a job another thread may.

Prints as JSON how often that was made, what a tensor holds that is written meanwhile, and what is left of those that were let go of."""

import argparse
import json

import torch
import plimsoll

MEBIBYTE = torch.Size([1 << 18])
held, runs = [], 0


def erfinv(values):
    """In place of libtorch's."""
    global runs
    runs += 1
    if runs == 2:
        held.clear()
    return values * 2


@torch.library.custom_op("job::copy", mutates_args=())
def copy(values: torch.Tensor) -> torch.Tensor:
    """What no runtime makes again: it may be swapped alone."""
    return values.clone()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tight", action="store_true")
    asked = parser.parse_args()
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfinv", erfinv, "CPU", allow_override=True)
    runtime = plimsoll.Runtime("6.5MiB", "dtr", device=torch.device("cpu"))
    values = torch.ones(MEBIBYTE)
    with runtime.iteration():
        held.append(values.erfinv().cos())
        # There is no room for all: what can be made again is dropped.
        others = [copy(values) for _ in range(5)]
        if not asked.tight:
            others.clear()
        # What is dropped depends on what stands there now.
        values.add_(1)
    total = values.double().sum().item()
    print(json.dumps({"runs": runs, "total": total, "held": len(held)}))


if __name__ == "__main__":
    main()
