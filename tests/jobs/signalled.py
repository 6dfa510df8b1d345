"""A job that is told by a signal to save what it has learned, within an operator of its own. There, too, garbage is collected that
still has something to say, and the time that this may take is limited.

Prints as JSON what it has saved and was told, and how often something was evicted."""

import gc
import io
import signal
import time

import job
import torch

SIZE, LAYERS = 256, 10
told = []


class Garbage:
    def __init__(self, numbers):
        self.numbers, self.itself = numbers, self

    def __del__(self):
        told.append(self.numbers.double().sum().item())


@torch.library.custom_op("job::interrupted", mutates_args=())
def interrupted(numbers: torch.Tensor) -> torch.Tensor:
    signal.raise_signal(signal.SIGUSR1)
    gc.collect()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        gc.collect()
        time.sleep(1)
    except TimeoutError:
        told.append("too late")
    return numbers + 1


def step(weights):
    Garbage(weights[0].detach() * 2)
    hidden = torch.ones(SIZE, SIZE, device=weights[0].device)
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    hidden.pow(2).mean().backward()
    with torch.no_grad():
        interrupted(hidden)
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None


def main():
    runtime, device = job.begin(__doc__)
    gc.disable()
    many = [[number] for number in range(300_000)]  # which it takes some time to go through
    weights = [torch.randn(SIZE, SIZE, device=device, requires_grad=True) for _ in range(LAYERS)]
    found = []

    def save(*_):
        saved = io.BytesIO()
        torch.save(weights, saved)
        saved.seek(0)
        found.append([weight.double().sum().item() for weight in [*torch.load(saved), *weights]])

    def end(*_):
        raise TimeoutError

    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGALRM, end)
    for _ in range(8):
        with job.iteration(runtime):
            step(weights)
    found += [told, len(many), signal.getsignal(signal.SIGUSR1) is save]
    job.end(runtime, found)


if __name__ == "__main__":
    main()
