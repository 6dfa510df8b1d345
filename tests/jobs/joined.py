"""A job with two streams. Gradients add up across them: autograd says of one that waits for another, in the allocator's own words,
that a second stream is to use it. And the job says so itself, of what both use.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch

SIZE, BRANCHES, ITERATIONS, OTHERS = 128, 8, 6, 12


class Presses(torch.autograd.Function):
    """What it is given, whose backward pass takes room for others first."""

    @staticmethod
    def forward(_, values):
        return values.clone()

    @staticmethod
    def backward(_, gradient):
        [torch.empty_like(gradient).fill_(1.0) for _ in range(OTHERS)]
        return gradient * 0.5


def main():
    runtime, device = job.begin(__doc__)
    weight = torch.randn(SIZE, SIZE, device=device, requires_grad=True)
    beside, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def use_here(shared, is_read):
        return Presses.apply(shared * shared if is_read else shared).sum()

    def use_beside(shared, is_read):
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            return (shared * shared if is_read else shared * 0.3).mul(0.2).sum()

    found = []
    for _ in range(ITERATIONS):
        with job.iteration(runtime):
            losses = []
            for branch in range(BRANCHES):
                shared = weight * 0.1
                shared.record_stream(beside)
                # What is used last here is used first on the way back. What backward passes read is let go of by them.
                is_read = branch % 4 < 2
                uses = (use_beside, use_here) if is_read else (use_here, use_beside)
                losses += [use(shared, is_read) for use in uses]
            here.wait_stream(beside)
            loss = torch.stack(losses).sum()
            loss.backward()
            here.wait_stream(beside)
            with torch.no_grad():
                weight -= 0.01 * weight.grad
            weight.grad = None
            found.append(loss.item().hex())
    torch.cuda.synchronize()
    job.end(runtime, [*found, weight.double().sum().item().hex()])


if __name__ == "__main__":
    main()
