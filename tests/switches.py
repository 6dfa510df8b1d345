"""A program that sets libtorch's switches in ever other ways: more than there are recipes for.

Prints as JSON what was found, and how much was made again after that."""

import argparse
import json

import torch

import plimsoll

WAYS, LAYERS, ROWS, WIDTH = 300, 12, 256, 256


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    asked = parser.parse_args()
    torch.manual_seed(0)
    runtime = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu"))
    weight, inputs, found = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH), []

    def iterate():
        with runtime.iteration():
            hidden = inputs
            for _ in range(LAYERS):
                hidden = torch.tanh(hidden @ weight)
            hidden.mean().backward()
            found.append(weight.grad.sum().item().hex())
            weight.grad = None

    iterate()
    with runtime.iteration():
        numbers = torch.zeros(1 << 16)
        for way in range(WAYS):
            torch.backends.cudnn.benchmark_limit = way
            made = numbers.sin()
            numbers.add_(made)
    torch.backends.cudnn.benchmark_limit = 10
    before = runtime.report()["reruns"]
    for _ in range(4):
        iterate()
    print(json.dumps({"found": found, "reruns": runtime.report()["reruns"] - before}))


main()
