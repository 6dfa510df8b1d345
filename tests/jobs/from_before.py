"""Memory that libraries took from libtorch before there was a runtime, and give back to it while there is one: oneDNN's.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch
from torch import nn
from torch.utils import mkldnn

SIZE, ITERATIONS = 64, 3


def main():
    torch.manual_seed(0)
    layers = [mkldnn.to_mkldnn(nn.Conv2d(4, 4, 3).eval()) for _ in range(ITERATIONS)]
    numbers = [torch.randn(1, 4, SIZE, SIZE).to_mkldnn() for _ in range(ITERATIONS)]
    runtime, _ = job.begin(__doc__)
    found = []
    for _ in range(ITERATIONS):
        with torch.no_grad(), job.iteration(runtime):
            others = [torch.randn(SIZE, SIZE) for _ in range(32)]
            made = layers.pop()(numbers.pop()).to_dense()
            found.append(made.double().sum().item())
            found += [other.double().sum().item() for other in others]
    job.end(runtime, found)


if __name__ == "__main__":
    main()
