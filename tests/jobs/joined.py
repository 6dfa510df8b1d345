"""A job whose gradients add up across streams: autograd says of a gradient that waits for another, in the allocator's own words, that a
second stream is to use it.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch

ROWS, BRANCHES, ITERATIONS, OTHERS = 128, 6, 6, 12


class Presses(torch.autograd.Function):
    """What it is given, whose backward pass takes room for others first."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        [torch.empty_like(gradient).fill_(1.0) for _ in range(OTHERS)]
        return gradient * 0.5


def main():
    runtime, device = job.begin(__doc__)
    weight = torch.randn(ROWS, ROWS, device=device, requires_grad=True)
    beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
    found = []
    for _ in range(ITERATIONS):
        with job.iteration(runtime):
            losses, sides = [], []
            for _ in range(BRANCHES):
                shared = weight * 0.1
                losses.append(Presses.apply(shared).sum())
                shared.record_stream(beside)
                beside.wait_stream(here)
                with torch.cuda.stream(beside):
                    sides.append(shared.mul(0.3).mul(0.2).sum())
            here.wait_stream(beside)
            loss = torch.stack(losses).sum() + torch.stack(sides).sum()
            loss.backward()
            here.wait_stream(beside)
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
            found.append(loss.item().hex())
    torch.cuda.synchronize()
    job.end(runtime, [*found, weight.double().sum().item().hex()])


if __name__ == "__main__":
    main()
