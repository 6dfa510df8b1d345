"""What Python has an object of is let go of while it is held for what was made of it, and is dropped.

Prints the losses as JSON, and the report."""

import job
import torch
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, ROWS, ITERATIONS = 128, 8, 1024, 24


def main():
    runtime, _ = job.begin(__doc__)
    layers = nn.ModuleList(job.Layer(WIDTH) for _ in range(LAYERS))
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    losses = []
    for _ in range(ITERATIONS):
        with job.iteration(runtime):
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
    job.end(runtime, losses)


if __name__ == "__main__":
    main()
