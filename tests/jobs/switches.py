"""A program that sets libtorch's switches in ever other ways: more than there are recipes for.

Prints as JSON what was found, and the report."""

import job
import torch

WAYS, LAYERS, ROWS, WIDTH = 300, 12, 256, 256


def main():
    runtime, _ = job.begin(__doc__)
    weight, inputs, found = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH), []

    def iterate():
        with job.iteration(runtime):
            hidden = inputs
            for _ in range(LAYERS):
                hidden = torch.tanh(hidden @ weight)
            hidden.mean().backward()
            found.append(weight.grad.sum().item().hex())
            weight.grad = None

    iterate()
    with job.iteration(runtime):
        numbers = torch.zeros(1 << 16)
        for way in range(WAYS):
            torch.backends.cudnn.benchmark_limit = way
            made = numbers.sin()
            numbers.add_(made)
    torch.backends.cudnn.benchmark_limit = 10
    for _ in range(4):
        iterate()
    job.end(runtime, found)


if __name__ == "__main__":
    main()
