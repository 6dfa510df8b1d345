"""A job whose model stands on two CUDA devices, half on each; the budget is of the first one's memory.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch
from torch import nn

ROWS, WIDTH, LAYERS, ITERATIONS = 64, 64, 6, 8


def main():
    runtime, device = job.begin(__doc__)
    here, there = torch.device(device, 0), torch.device(device, 1)
    first, second = (nn.Sequential(*(job.Layer(WIDTH) for _ in range(LAYERS))).to(where) for where in (here, there))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    found = []
    for batch in torch.randn(ITERATIONS, ROWS, WIDTH):
        # More than the budget, and none of its business.
        beside = torch.zeros(1 << 22, device=there)
        with job.iteration(runtime):
            # The device of what it makes by itself is the current one.
            with torch.cuda.device(there):
                halfway = first(batch.to(here)).to(there)
                beside = torch.zeros(1 << 22, device=there)
                loss = second(halfway).square().mean()
            loss.backward()
            assert torch.cuda.current_device() == 0
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item().hex())
        del beside
    found += [value.double().sum().item().hex() for value in [*first.parameters(), *second.parameters()]]
    job.end(runtime, found)


if __name__ == "__main__":
    main()
