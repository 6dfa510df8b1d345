"""Training jobs of other libraries, each left alone and within a budget: whether bits stay and the budget is held.

    python3 tests/libraries [--device cuda] [JOB ...]

Needs the packages of `requirements.txt` and plimsoll beside torch: see `make libraries`. Ends with 1 where a job failed.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import time

import torch

import kernels  # noqa: F401 (each registers its jobs)
import language  # noqa: F401
import science  # noqa: F401
import vision  # noqa: F401
from jobs import ITERATIONS, jobs

# The share of the peak that a job is left; where that cannot be held, of what lies above what can. What is found by "throughout" is
# left less than it has between iterations, so that its last one ends above.
SHARES = {"marked": 0.7, "detected": 0.7, "throughout": 0.45}


def digest(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(name, mode, device, budget_bytes):
    """What a job came to, within a budget or left alone."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    runtime = None
    if budget_bytes is not None:
        import plimsoll

        runtime = plimsoll.Runtime(budget_bytes, device=device)
    loop, modules = jobs[name][0](torch.device(device))
    losses = []
    started = time.perf_counter()

    is_own = not inspect.signature(loop).parameters
    nothing = contextlib.nullcontext
    with runtime.detect() if runtime and mode != "marked" else nothing():
        for index in [()] if is_own else zip(range(ITERATIONS)):
            with runtime.iteration() if runtime and mode == "marked" else nothing():
                losses.append(loop(*index))
    seconds = time.perf_counter() - started
    state = [tensor for module in modules for tensor in module.state_dict().values()]
    return dict(digest=digest(losses + state), seconds=seconds, report=runtime and runtime.report())


def call(name, mode, device, budget_bytes):
    """The same in a process of its own."""
    argv = [sys.executable, os.path.dirname(__file__), name, "--device", device, "--mode", mode]
    if budget_bytes is not None:
        argv += ["--budget", str(budget_bytes)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    if ran.returncode == 0:
        return json.loads(ran.stdout.splitlines()[-1])
    return dict(complaint=(ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1])


def peak_of(report, mode):
    """The most that the job took; but for its end, where that is above what it is left."""
    peaks = [iteration["peak_bytes"] for iteration in report["latest"]]
    return max(peaks[:-1]) if mode == "throughout" else report["peak_bytes"]


def within_budget(name, mode, device, peak_bytes):
    """The job within some share of its peak that can be held: what is there between iterations, or at the end, may take more."""
    budget_bytes = int(SHARES[mode] * peak_bytes)
    while True:
        held = call(name, mode, device, budget_bytes)
        refused = re.search(r"least feasible budget found so far is (\d+) bytes", held.get("complaint", ""))
        over_bytes = peak_of(held["report"], mode) - budget_bytes if "report" in held else 0
        least_bytes = int(refused[1]) if refused else budget_bytes + over_bytes
        if least_bytes <= budget_bytes:
            return budget_bytes, held
        budget_bytes = least_bytes + int(0.4 * (peak_bytes - least_bytes))


def judge(name, mode, device):
    """Whether all is well with a job; prints what it came to."""
    alone = call(name, mode, device, None)
    if "complaint" in alone:
        print(f"{name:30} {mode:8} FAILED, left alone: {alone['complaint']}", flush=True)
        return False
    watched = call(name, mode, device, 1 << 40)
    complaint = watched.get("complaint")
    if not complaint:
        peak_bytes = watched["report"]["peak_bytes"]
        budget_bytes, held = within_budget(name, mode, device, peak_bytes)
        complaint = held.get("complaint")
    if complaint:
        print(f"{name:30} {mode:8} FAILED: {complaint}", flush=True)
        return False
    report = held["report"]
    known = sum(iteration["course"] not in ("reactive", "resumed") for iteration in report["latest"])
    others = [what for what, digest in (("watched", watched["digest"]), ("held", held["digest"])) if digest != alone["digest"]]
    # No runtime could make it.
    repeats = not others or call(name, mode, device, None).get("digest", alone["digest"]) == alone["digest"]
    faults = [f"OTHER BITS where it is {what}" for what in others if repeats]
    if peak_of(report, mode) > budget_bytes:
        faults.append("MORE THAN ITS BUDGET")
    print(
        f"{name:30} {mode:8} {budget_bytes / 2**20:6.1f} of {peak_bytes / 2**20:6.1f} MiB, known in {known:2} of "
        f"{report['iterations']:2} iterations, plans: {report['plans']}, {held['seconds'] / alone['seconds']:4.2f} of the time: "
        f"{', '.join(faults) or ('the same bits' if repeats else 'other bits each time, left alone too')}",
        flush=True,
    )
    return not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="*", help="of " + ", ".join(jobs))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", help="runs one job in this process")
    parser.add_argument("--budget", type=int, help="bytes that it is left")
    asked = parser.parse_args()
    if asked.mode:
        print("\n" + json.dumps(run(asked.job[0], asked.mode, asked.device, asked.budget)))
        return
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    well = [judge(name, mode, asked.device) for name in asked.job or jobs for mode in jobs[name][1]]
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
