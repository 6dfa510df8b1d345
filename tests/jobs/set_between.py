"""In the middle of an iteration the budget is set to another, and after that a storage is of another size than before.

Prints the losses as JSON, and the report."""

import contextlib

import job
import torch
from torch import nn

WIDTH, LAYERS, ROWS, KNOWN, ITERATIONS = 128, 6, 1024, 9, 15


def main():
    runtime, _, usual, other = job.begin(__doc__, "usual", "other")
    layers = nn.ModuleList(job.Layer(WIDTH) for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    losses = []
    with runtime.detect() if runtime else contextlib.nullcontext() as loop:
        for iteration in range(ITERATIONS):
            if loop:
                loop.mark()
            hidden = torch.randn(ROWS, WIDTH)
            for depth, layer in enumerate(layers):
                hidden = layer(hidden)
                if depth == 3 and iteration >= KNOWN:
                    if runtime:
                        runtime.budget = usual if (iteration - KNOWN) % 2 else other
                    hidden = hidden[: ROWS * 3 // 4].contiguous()
            loss = hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    job.end(runtime, losses)


if __name__ == "__main__":
    main()
