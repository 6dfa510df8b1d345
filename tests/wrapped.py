"""What Python has an object of is let go of while it is held for what was made of it, and is dropped.

Prints the losses as JSON, and how many of the last iterations went as planned."""

import argparse
import json

import torch
from torch import nn
from torch.nn import functional

import plimsoll

WIDTH, LAYERS, ROWS, ITERATIONS, LAST = 128, 8, 1024, 24, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    asked = parser.parse_args()
    torch.manual_seed(0)
    runtime = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu"))
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    losses = []
    for _ in range(ITERATIONS):
        with runtime.iteration():
            hidden, kept = torch.randn(ROWS, WIDTH), []
            for layer in layers:
                wide = layer.wide(layer.norm(hidden))
                beside = torch.relu(wide.detach())
                beside.untyped_storage()  # Python has an object of it from now on
                kept.append(beside)
                doubled = beside * 2
                more = doubled + 1
                del beside, doubled
                made = functional.gelu(wide) + more * 0
                if len(kept) > 2:
                    kept.pop(0)
                hidden = hidden + layer.narrow(made)
                del wide, made, more
            kept.clear()
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    latest = runtime.report()["latest"][-LAST:]
    planned = sum(iteration["course"] == "planned" and iteration["followed"] for iteration in latest)
    print(json.dumps({"losses": losses, "planned": planned}))


main()
