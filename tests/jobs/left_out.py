"""Layers are left out by chance, and operators come that no plan knows: programs are found again after gaps, and others go on instead.

Prints the losses as JSON, and the report."""

import random

import job
import torch
from torch import nn

WIDTH, LAYERS, ROWS, ITERATIONS = 128, 6, 1024, 60


def main():
    runtime, _, seed = job.begin(__doc__, "seed")
    draw = random.Random(seed)
    layers = nn.ModuleList(job.Layer(WIDTH) for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)

    def drawn():
        """By layer: whether it is left out, and whether something else follows."""
        return [(draw.random() < 0.3, draw.random() < 0.15) for _ in range(LAYERS)]

    frequent, losses = [drawn() for _ in range(4)], []
    for _ in range(ITERATIONS):
        hidden = torch.randn(ROWS, WIDTH)
        course = draw.choice(frequent) if draw.random() < 0.7 else drawn()
        with job.iteration(runtime):
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
    job.end(runtime, losses)


if __name__ == "__main__":
    main()
