"""Gradients of four batches add up in each iteration, all of lengths of their own, and there before it begins.

Prints as JSON the losses, and the report."""

import random

import job
import torch
from torch import nn
from torch.nn import functional

SYMBOLS, WIDTH, LAYERS, ROWS = 200, 96, 8, 8


def main():
    runtime, _ = job.begin(__doc__)
    random.seed(0)
    layers = [job.Layer(WIDTH) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), *layers, nn.Linear(WIDTH, SYMBOLS))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(24):
        batches = [torch.randint(SYMBOLS, (ROWS, random.randint(16, 65))) for _ in range(4)]
        with job.iteration(runtime):
            for batch in batches:
                loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                (loss / 4).backward()
                losses.append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad()
    job.end(runtime, losses)


if __name__ == "__main__":
    main()
