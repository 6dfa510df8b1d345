"""In the middle of an iteration the budget is set to another, and after that a storage is of another size than before.

Prints the losses as JSON, and how much more than the line of its iteration was ever allocated."""

import argparse
import json

import torch
from torch import nn
from torch.nn import functional

import plimsoll

WIDTH, LAYERS, ROWS, KNOWN, ITERATIONS = 128, 6, 1024, 9, 15


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden):
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--other", type=int)
    asked = parser.parse_args()
    torch.manual_seed(0)
    runtime = plimsoll.Runtime(asked.budget or "1GiB", swap=False, device=torch.device("cpu"))
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    losses = []
    with runtime.detect() as loop:
        for iteration in range(ITERATIONS):
            loop.mark()
            hidden = torch.randn(ROWS, WIDTH)
            for depth, layer in enumerate(layers):
                hidden = layer(hidden)
                if depth == 3 and iteration >= KNOWN:
                    if asked.budget:
                        runtime.budget = asked.budget if (iteration - KNOWN) % 2 else asked.other
                    hidden = hidden[: ROWS * 3 // 4].contiguous()
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    latest = runtime.report()["latest"]
    print(json.dumps({"losses": losses, "over_bytes": max(iteration["over_budget_bytes"] for iteration in latest)}))


main()
