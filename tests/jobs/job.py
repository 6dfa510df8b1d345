"""What the jobs that are tested have in common: a budget, where there is one, and what they print."""

import argparse
import contextlib
import json
import sys

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """The feed-forward half of a transformer's layer."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


def begin(description, *numbers):
    """The runtime, where the command line names a budget, and the device; and what `numbers` it gives beside those."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recompute-alone", action="store_true")
    parser.add_argument("--swap-alone", action="store_true")
    for number in numbers:
        parser.add_argument(f"--{number}", type=int)
    asked = parser.parse_args()
    # As launchers do. A device that is not in use yet would be seeded when it is, whatever had been drawn there before.
    if asked.device != "cpu":
        torch.cuda.init()
    torch.manual_seed(0)
    runtime = None
    if asked.budget:
        import plimsoll

        swap, recompute = (False if other else None for other in (asked.recompute_alone, asked.swap_alone))
        runtime = plimsoll.Runtime(asked.budget, device=asked.device, swap=swap, recompute=recompute)
    return runtime, asked.device, *(getattr(asked, number) for number in numbers)


def iteration(runtime):
    """What an iteration of the training loop runs within."""
    return runtime.iteration() if runtime else contextlib.nullcontext()


def make_room(others, size=256):
    """So many others come, of which one goes again."""
    return [torch.empty(size, size) for _ in range(others)][1:]


def by_address(function):
    """`function`, of which plimsoll is told that it uses tensors by their addresses, where there is a budget."""
    plimsoll = sys.modules.get("plimsoll")
    return plimsoll.by_address(function) if plimsoll else function


def end(runtime, found):
    """Prints as JSON what a job has found, how often something was evicted, and the report."""
    report = runtime.report() if runtime else {}
    print(json.dumps({"found": found, "evictions": report.get("reactive_evictions"), "report": report}))
