"""A job of operators that have a kernel of their own on a CUDA device alone, and call others elsewhere.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch
from torch.nn import functional

ROWS, WIDTH, COUNT = 256, 256, 12


def normalise(device):
    numbers = (torch.arange(ROWS * WIDTH) / 100).view(ROWS, WIDTH).to(device)
    rows = [(numbers * (index + 1)).sin() for index in range(COUNT)]
    normal = [functional.rms_norm(row, [WIDTH]) for row in rows]
    return [row.square().sum().item().hex() for row in rows + normal]


def main():
    runtime, device = job.begin(__doc__)
    found = []
    for _ in range(5):
        with job.iteration(runtime), torch.no_grad():
            found.append(normalise(device))
    job.end(runtime, found)


if __name__ == "__main__":
    main()
