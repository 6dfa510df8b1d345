"""Storages that only Python has, dropped and brought back in the loop's thread and in another, both of which run operators that hold
Python up.

Prints as JSON what was found, and how much was evicted."""

import argparse
import faulthandler
import json
import threading
import time

import torch

import plimsoll

STORAGES, ROWS, COLUMNS, SECONDS = 20, 256, 1024, 3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    asked = parser.parse_args()
    # Where threads wait for each other, this ends the process.
    faulthandler.dump_traceback_later(120, exit=True)
    torch.manual_seed(0)
    runtime = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu"))
    base, shared, ends = torch.randn(ROWS, COLUMNS), [], threading.Event()

    def hold_python_up(times):
        number = torch.ones(())
        for _ in range(times):
            # What the number is is asked with Python held up.
            torch.full((1,), number)

    def beside():
        while not ends.is_set():
            hold_python_up(1)
            for made in list(shared):
                made.sum()

    threading.Thread(target=beside).start()
    found, begun = set(), time.monotonic()
    while time.monotonic() < begun + SECONDS:
        with runtime.iteration():
            kept = []
            for scale in range(STORAGES):
                made = base * float(scale)
                kept.append(made.untyped_storage())
                if scale % 4 == 0:
                    shared.append(made)
                del made
            hold_python_up(100)
            total = 0.0
            while kept:
                total += torch.empty(0).set_(kept.pop(0), 0, (ROWS, COLUMNS)).sum().item()
            found.add(total.hex())
            shared.clear()
    ends.set()
    report = runtime.report()
    print(json.dumps({"found": sorted(found), "evictions": report["reactive_evictions"], "reruns": report["reruns"]}))


main()
