"""Storages that only Python has, dropped and brought back in the loop's thread and in another, both of which run operators that hold
Python up.

Prints as JSON what was found, and the report."""

import faulthandler
import threading
import time

import job
import torch

STORAGES, ROWS, COLUMNS, SECONDS = 20, 256, 1024, 3


def main():
    runtime, _ = job.begin(__doc__)
    # Where threads wait for each other, this ends the process.
    faulthandler.dump_traceback_later(120, exit=True)
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
        with job.iteration(runtime):
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
    job.end(runtime, sorted(found))


if __name__ == "__main__":
    main()
