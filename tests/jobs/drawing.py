"""A job that draws random numbers where compiled graphs do: on the host for another device, and beside a graph that another thread is
within, or a signal's handler of its own; and in a process that is forked meanwhile.

Prints as JSON what it has found, and how often something was evicted."""

import os
import signal
import sys
import threading

import job
import torch
from python_job import Graph, past_dispatcher

SIZE, OTHERS = 256, 12


def dropped(inputs):
    (numbers,) = inputs
    inputs.clear()
    return [numbers * (torch.rand(SIZE) > 0.5).to(numbers.device)]


def make_room(device):
    [torch.ones(SIZE, SIZE, device=device).sin() for _ in range(OTHERS)]


def drop(numbers):
    [kept] = drop_some(numbers)
    make_room(numbers.device)
    return [kept.double().sum().item(), torch.rand(1).item()]


def beside(numbers):
    """A handler uses what went, within a graph; another thread meanwhile has made again what was drawn."""
    drawn, made = torch.rand_like(numbers), numbers.exp()
    make_room(numbers.device)
    inside, found = threading.Event(), [None, None]

    def use_drawn():
        inside.wait()
        found[0] = drawn.double().sum().item()

    def handle(*_):
        inside.set()
        other.join(0.2)
        found[1] = made.double().sum().item()

    other = threading.Thread(target=use_drawn)
    other.start()
    signal.signal(signal.SIGUSR1, handle)
    interrupted(numbers)
    other.join()
    return found


def beside_itself(numbers):
    """A handler draws within a graph, before that does."""
    found = []
    signal.signal(signal.SIGUSR1, lambda *_: found.append(torch.rand(8).sum().item()))
    [made] = interrupted_first(numbers)
    make_room(numbers.device)
    return [*found, made.double().sum().item(), torch.rand(1).item()]


def fork(numbers):
    """The child draws, within a runtime of its own, while another thread of its parent is within a graph."""
    inside, forked = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: held(numbers, inside, forked))
    other.start()
    inside.wait()
    child = os.fork()
    if not child:
        plimsoll = sys.modules.get("plimsoll")
        with job.iteration(plimsoll and plimsoll.Runtime("1GiB")):
            drawn = torch.rand(4).sum().item()
        os._exit(0 if drawn > 0 else 1)
    forked.set()
    _, status = os.waitpid(child, 0)
    other.join()
    return status


def interrupt(inputs):
    (numbers,) = inputs
    inputs.clear()
    signal.raise_signal(signal.SIGUSR1)
    return [numbers.tanh()]


def interrupt_and_draw(inputs):
    [numbers] = interrupt(inputs)
    return [numbers * torch.rand_like(numbers)]


def held(numbers, inside, forked):
    def wait(inputs):
        (numbers,) = inputs
        inputs.clear()
        inside.set()
        forked.wait()
        return [numbers.tanh()]

    return Graph(wait, False)(numbers)


drop_some, interrupted = Graph(dropped, False, {"cpu", "cuda"}), Graph(interrupt, False)
interrupted_first = Graph(interrupt_and_draw, False)


def main():
    runtime, device = job.begin(__doc__)
    if runtime:
        import plimsoll

        past_dispatcher.run = plimsoll._compiled.run_as_region
    signal.alarm(100)  # whoever waits for himself
    numbers, found = torch.randn(SIZE, SIZE, device=device), []
    for part in [drop, beside, beside_itself, *([fork] if device == "cpu" else [])]:
        for _ in range(3):
            with job.iteration(runtime):
                found.append([part.__name__, part(numbers)])
    job.end(runtime, found)


if __name__ == "__main__":
    main()
