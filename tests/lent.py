"""A job that shares the memory of its weights with others between two iterations: they write there, and read what it has learned.

Prints as JSON what the others have read, and how often something was evicted."""

import argparse
import contextlib
import json

import torch


def step(weights):
    hidden = torch.randn(256, 256, device=weights[0].device)
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    hidden.pow(2).mean().backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    runtime = None
    if asked.budget:
        import plimsoll

        runtime = plimsoll.Runtime(asked.budget, device=asked.device)
    torch.manual_seed(0)
    weights = [torch.randn(256, 256, device=asked.device, requires_grad=True) for _ in range(8)]
    shared, read = [], []
    for iteration in range(8):
        with runtime.iteration() if runtime else contextlib.nullcontext():
            step(weights)
        if iteration == 2:
            shared = [torch.from_dlpack(weight.detach()) for weight in weights]
        for one in shared:
            one.mul_(0.99)
        read.append([one.double().sum().item() for one in shared])
    read.append([weight.double().sum().item() for weight in weights])
    evictions = runtime.report()["reactive_evictions"] if runtime else 0
    print(json.dumps({"read": read, "evictions": evictions}))


if __name__ == "__main__":
    main()
