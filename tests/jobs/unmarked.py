"""A model that is made within, and a mean of its parameters over time: until iterations are found, all that runs is one.

Prints the losses as JSON, and the report."""

import contextlib
import copy

import job
import torch
from torch import nn

WIDTH, LAYERS, ROWS, PASSES, ITERATIONS = 64, 6, 256, 2, 8


def main():
    runtime, _ = job.begin(__doc__)
    losses = []
    with runtime.detect() if runtime else contextlib.nullcontext():
        layers = nn.ModuleList(job.Layer(WIDTH) for _ in range(LAYERS))
        means = copy.deepcopy(layers)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
        for _ in range(ITERATIONS):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(PASSES):
                hidden = torch.randn(ROWS, WIDTH)
                for layer in layers:
                    hidden = layer(hidden)
                loss = hidden.square().mean()
                loss.backward()
                losses.append(loss.item().hex())
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(means.parameters(), layers.parameters()):
                    mean.lerp_(parameter, 0.05)
        losses.append(sum(mean.sum() for mean in means.parameters()).item().hex())
    job.end(runtime, losses)


if __name__ == "__main__":
    main()
