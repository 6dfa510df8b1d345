"""A job with compiled layers that a timer interrupts over and over: the handler draws random numbers of its own, and looks at what the
layers have made.

Prints as JSON the losses, the sums of what it has learned, and whether all that the handler has seen was right."""

import signal

import job
import torch

SIZE, LAYERS, ITERATIONS = 256, 8, 6
generator = torch.Generator().manual_seed(7)
made, wrong, calls, goes_on = [], [], 0, False


def interrupt(*_):
    global calls
    calls += 1
    torch.randn(64, generator=generator)
    for hidden, expected in made[:2]:
        if hidden.sum().item() != expected:
            wrong.append(calls)
    # Not by an interval: where a handler takes longer, the next one would interrupt it.
    if goes_on:
        signal.setitimer(signal.ITIMER_REAL, 0.004)


@torch.compile
def layer(hidden, weight):
    for _ in range(6):
        hidden = torch.tanh(torch.mm(hidden, weight))
    return hidden


def step(weights):
    hidden = torch.ones(SIZE, SIZE)
    for weight in weights:
        hidden = layer(hidden, weight)
        made.append((hidden.detach(), hidden.detach().sum().item()))
    hidden.square().mean().backward()
    made.clear()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None
    return hidden.detach().double().sum().item()


runtime, _ = job.begin(__doc__)
weights = [(torch.randn(SIZE, SIZE) / SIZE**0.5).requires_grad_() for _ in range(LAYERS)]
signal.signal(signal.SIGALRM, interrupt)
losses = []
for iteration in range(ITERATIONS):
    with job.iteration(runtime):
        # Not while something is compiled.
        goes_on = iteration > 0
        if goes_on:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
        losses.append(step(weights))
        goes_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
job.end(runtime, [losses, [weight.double().sum().item() for weight in weights], wrong, calls > 0])
