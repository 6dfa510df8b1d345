"""A job some of whose tensors go to other threads, which let go of them at moments of their own, as what logs and collects does.

Prints its losses as JSON, and with a budget how often something was evicted."""

import argparse
import contextlib
import json
import queue
import random
import threading
import time

import torch
from torch import nn


def consume(tensors):
    held = []
    while (given := tensors.get()) is not None:
        held.append(given)
        del given
        while len(held) > random.randint(0, 6):
            held.pop(random.randrange(len(held)))
        if random.random() < 0.3:
            time.sleep(random.random() * 0.002)


def step(model, optimizer, tensors):
    for part in range(3):
        hidden = torch.randn(128, 64)
        for layer in model:
            hidden = layer(hidden).clone()
        loss = hidden.pow(2).mean()
        tensors.put([loss * 2, hidden.sin(), hidden.cos() * 3])
        # What a graph saved that is retained goes with the last that was made by it.
        loss.backward(retain_graph=part == 1)
        tensors.put([loss, hidden])
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget")
    parser.add_argument("--iterations", type=int, default=60)
    asked = parser.parse_args()
    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tensors = queue.Queue(20)
    consumers = [threading.Thread(target=consume, args=(tensors,)) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    try:
        losses = []
        with runtime.detect() if runtime else contextlib.nullcontext() as loop:
            for _ in range(asked.iterations):
                if loop:
                    loop.mark()
                losses.append(step(model, optimizer, tensors))
    finally:
        for _ in consumers:
            tensors.put(None)
    evictions = runtime.report()["reactive_evictions"] if runtime else 0
    print(json.dumps({"losses": losses, "evictions": evictions}))


if __name__ == "__main__":
    main()
