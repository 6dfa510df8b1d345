"""Layers are left out by chance, and operators come that no plan knows: programs are found again after gaps, and others go on instead.

Prints the losses as JSON, and how often each course was taken."""

import argparse
import collections
import json
import random

import torch
from torch import nn
from torch.nn import functional

import plimsoll

WIDTH, LAYERS, ROWS, ITERATIONS = 128, 6, 1024, 60


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden):
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(asked.seed)
    runtime = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu"))
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)

    def drawn():
        """By layer: whether it is left out, and whether something else follows."""
        return [(draw.random() < 0.3, draw.random() < 0.15) for _ in range(LAYERS)]

    frequent, losses = [drawn() for _ in range(4)], []
    for _ in range(ITERATIONS):
        hidden = torch.randn(ROWS, WIDTH)
        course = draw.choice(frequent) if draw.random() < 0.7 else drawn()
        with runtime.iteration():
            for depth, (layer, (is_left_out, is_followed)) in enumerate(zip(layers, course)):
                if is_left_out and depth:
                    continue
                hidden = layer(hidden)
                if is_followed:
                    hidden = hidden.sin()
            loss = hidden.square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    courses = collections.Counter(iteration["course"] for iteration in runtime.report()["latest"])
    print(json.dumps({"losses": losses, "courses": courses}))


main()
