"""A model that is made within, and a mean of its parameters over time: until iterations are found, all that runs is one.

Prints the losses as JSON, and how much was made again."""

import argparse
import copy
import json

import torch
from torch import nn

import plimsoll

WIDTH, LAYERS, ROWS, PASSES, ITERATIONS = 64, 6, 256, 2, 8


def layer():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    asked = parser.parse_args()
    runtime, losses = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu")), []
    with runtime.detect():
        torch.manual_seed(0)
        layers = nn.ModuleList(layer() for _ in range(LAYERS))
        means = copy.deepcopy(layers)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
        for _ in range(ITERATIONS):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(PASSES):
                hidden = torch.randn(ROWS, WIDTH)
                for each in layers:
                    hidden = hidden + each(hidden)
                loss = hidden.square().mean()
                loss.backward()
                losses.append(loss.item().hex())
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(means.parameters(), layers.parameters()):
                    mean.lerp_(parameter, 0.05)
        losses.append(sum(mean.sum() for mean in means.parameters()).item().hex())
    report = runtime.report()
    print(json.dumps({"losses": losses, "reruns": report["reruns"], "evictions": report["reactive_evictions"]}))


main()
