"""A job whose operators are in other streams than those in which its iterations begin and end, and which takes down its parameters
beside the next iteration.

Prints as JSON what it has found, and how often something was evicted."""

import job
import torch
from torch import nn

ROWS, WIDTH, LAYERS, ITERATIONS = 64, 64, 6, 8


def main():
    runtime, device = job.begin(__doc__)
    model = nn.Sequential(*(job.Layer(WIDTH) for _ in range(LAYERS))).to(device)
    batches = torch.randn(ITERATIONS, ROWS, WIDTH)
    work, beside = torch.cuda.Stream(), torch.cuda.Stream()
    taken = [torch.empty(value.shape, pin_memory=True) for value in model.parameters()]
    found = []

    def take_down():
        beside.wait_stream(work)
        with torch.cuda.stream(beside), torch.no_grad():
            for to, value in zip(taken, model.parameters()):
                to.copy_(value, non_blocking=True)

    work.wait_stream(torch.cuda.current_stream())
    for batch in batches:
        with job.iteration(runtime):
            with torch.cuda.stream(work):
                loss = model(batch.to(device)).square().mean()
                loss.backward()
                # What is taken down is what was there before this step.
                work.wait_stream(beside)
                beside.synchronize()
                found.append([value.double().sum().item().hex() for value in taken])
                with torch.no_grad():
                    for value in model.parameters():
                        value -= 0.1 * value.grad
                        value.grad = None
        take_down()
    torch.cuda.synchronize()
    job.end(runtime, found)


if __name__ == "__main__":
    main()
