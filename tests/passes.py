"""Gradients of four batches add up in each iteration, all of lengths of their own, and there before it begins.

Prints as JSON the losses, and how many of the later iterations were planned, and how many driven by what bytes ran out for."""

import argparse
import json
import random

import torch
from torch import nn
from torch.nn import functional

import plimsoll

SYMBOLS, WIDTH, LAYERS, ROWS = 200, 96, 8, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    asked = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    runtime = plimsoll.Runtime(asked.budget, swap=False, device=torch.device("cpu"))
    model = nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, SYMBOLS))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(24):
        batches = [torch.randint(SYMBOLS, (ROWS, random.randint(16, 65))) for _ in range(4)]
        with runtime.iteration():
            for batch in batches:
                loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                (loss / 4).backward()
                losses.append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad()
    courses = [iteration["course"] for iteration in runtime.report()["latest"][8:]]
    print(json.dumps({"losses": losses, "planned": courses.count("planned"), "reactive": courses.count("reactive")}))


main()
