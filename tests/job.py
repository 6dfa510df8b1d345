"""What the jobs that are tested have in common: a budget, where there is one, and what they print."""

import argparse
import json
import sys

import torch


def begin(description):
    """The runtime, where the command line names a budget, and the device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recompute-alone", action="store_true")
    asked = parser.parse_args()
    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget, device=asked.device, swap=False if asked.recompute_alone else None)
    torch.manual_seed(0)
    return runtime, asked.device


def by_address(function):
    """`function`, of which plimsoll is told that it uses tensors by their addresses, where there is a budget."""
    plimsoll = sys.modules.get("plimsoll")
    return plimsoll.by_address(function) if plimsoll else function


def end(runtime, found):
    """Prints as JSON what a job has found, how often something was evicted, and the report."""
    report = runtime.report() if runtime else {}
    print(json.dumps({"found": found, "evictions": report.get("reactive_evictions"), "report": report}))
