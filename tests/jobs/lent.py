"""A job that shares the memory of its weights with others between two iterations: they write there, and read what it has learned. And
within each what others have been made of, and is written then.

Prints as JSON what the others have read, and how often something was evicted."""

import job
import torch


def write_after_use(device):
    """What was made before is none the wiser."""
    written = torch.ones(256, 256, device=device) * 2
    made = [written + number for number in range(8)]
    torch.from_dlpack(written).add_(1)
    # They give way to others.
    del written
    others = [torch.ones(256, 256, device=device) * number for number in range(8)]
    return [one.double().sum().item() for one in made + others]


def step(weights):
    hidden = torch.randn(256, 256, device=weights[0].device)
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    hidden.pow(2).mean().backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None


def main():
    runtime, device = job.begin(__doc__)
    weights = [torch.randn(256, 256, device=device, requires_grad=True) for _ in range(8)]
    shared, read = [], []
    for iteration in range(8):
        with job.iteration(runtime):
            read.append(write_after_use(device))
            step(weights)
        if iteration == 2:
            shared = [torch.from_dlpack(weight.detach()) for weight in weights]
        for one in shared:
            one.mul_(0.99)
        read.append([one.double().sum().item() for one in shared])
    read.append([weight.double().sum().item() for weight in weights])
    job.end(runtime, read)


if __name__ == "__main__":
    main()
