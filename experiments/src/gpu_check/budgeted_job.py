"""A PyTorch job, left alone or under Plimsoll.

The argument is JSON: the device and the model, whether it has deterministic kernels for everything, a budget and a policy, or
null, whether blocks are compiled, and whether all of the loop is listened to. Prints one line of JSON.
"""

import contextlib
import ctypes
import gc
import hashlib
import json
import sys
import time

import torch
from models import Loop
from torch import nn

# Evictions when bytes run out, until two iterations are alike; then a plan, whose operators are timed; then another. In case others
# come, iterations are taken down until twelve went as planned.
WARM_UP, MEASURED = 16, 3


def digest(model):
    """Of the bits of parameters and buffers."""
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        tensor = tensor.cpu().contiguous()
        bits.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return bits.hexdigest()


def train(asked, runtime):
    losses, times = [], []
    with runtime.detect() if runtime and asked["throughout"] else contextlib.nullcontext() as marked:
        loop = Loop(asked)
        if asked["compiled"]:
            loop.model.blocks = nn.ModuleList(torch.compile(block) for block in loop.model.blocks)
        for _ in range(WARM_UP + MEASURED):
            started = time.perf_counter()
            if marked:
                marked.mark()
            with runtime.iteration() if runtime and not marked else contextlib.nullcontext():
                losses.append(loop.iteration().hex())
            times.append(time.perf_counter() - started)
    return {"losses": losses, "parameters": digest(loop.model)}, int(1e9 * min(times[WARM_UP:]))


def run(asked):
    torch.use_deterministic_algorithms(True, warn_only=not asked["strict"])
    runtime = None
    if asked["budget_bytes"]:
        import plimsoll

        runtime = plimsoll.Runtime(asked["budget_bytes"], asked["policy"], device=asked["device"])
    came_to, makespan_ns = train(asked, runtime)
    found = {"came_to": came_to, "makespan_ns": makespan_ns}
    if runtime:
        found["report"] = runtime.report()
    else:
        gc.collect()
        found["repeats"] = train(asked, None)[0] == came_to
    return found


def main():
    try:
        found = run(json.loads(sys.argv[1]))
    except Exception as error:
        found = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
