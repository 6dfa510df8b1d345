"""Plain PyTorch beside Plimsoll: the same model, left alone, recomputed and offloaded by PyTorch's own means.

The argument is JSON: the device and the model. Prints one line of JSON for each way.
"""

import functools
import gc
import json
import sys
import time

import torch
from models import Loop

# As many as the Rust loops are judged by, and the same quartile of them: the fastest of three.
WARM_UP, MEASURED = 3, 3


def measure(asked, way):
    on_cuda = asked["device"].startswith("cuda")
    loop = Loop(asked)
    ways = {
        "plain": {},
        "checkpoint": {"recompute": True},
        "save_on_cpu": {"saved": functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=on_cuda)},
    }
    times = []
    for iteration in range(WARM_UP + MEASURED):
        if on_cuda and iteration == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loop.iteration(**ways[way])
        times.append(time.perf_counter() - started)
    found = {"makespan_ns": int(1e9 * min(times[WARM_UP:])), "iterations": MEASURED}
    if on_cuda:
        statistics = torch.cuda.memory_stats()
        for kind in ("requested", "allocated", "reserved"):
            found[f"{kind}_peak_bytes"] = statistics[f"{kind}_bytes.all.peak"]
    return found


def main():
    asked = json.loads(sys.argv[1])
    if asked["device"].startswith("cuda"):
        torch.cuda.set_device(torch.device(asked["device"]).index or 0)
    # Offloading takes page-locked memory for every tensor, which is slow to get: last.
    for way in ("plain", "checkpoint", "save_on_cpu"):
        found = {"way": way, "torch": torch.__version__}
        try:
            found.update(measure(asked, way))
        except Exception as error:
            found["failure"] = (str(error).splitlines() or [repr(error)])[0]
        print(json.dumps(found), flush=True)
        if asked["device"].startswith("cuda"):
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
