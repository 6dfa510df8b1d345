"""A job whose other threads read and write what its iterations are about: one looks at activations, others make a backward pass, keep
an average of the weights, and save a checkpoint.

Prints as JSON its losses, what the others found, and with a budget how often something was evicted."""

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import json
import queue
import threading

import torch
from torch import nn


class Looking(threading.Thread):
    """Looks at what it is given, in order."""

    def __init__(self):
        super().__init__(daemon=True)
        self.given, self.found, self.failure = queue.Queue(), [], None

    def run(self):
        while True:
            tensor = self.given.get()
            try:
                self.found.append((tensor.detach() * 3).double().sum().item())
            except RuntimeError as failure:
                self.failure = failure
            del tensor
            self.given.task_done()

    def wait(self):
        self.given.join()
        if self.failure:
            raise self.failure


def save(model):
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    return hashlib.sha256(saved.getvalue()).hexdigest()


@torch.no_grad()
def average(weights, means):
    for weight, mean in zip(weights, means):
        mean.lerp_(weight, 0.1)


def step(model, optimizer, means, looking, others):
    hidden = torch.randn(256, 128, device=means[0].device)
    for layer in model:
        hidden = layer(hidden)
        looking.given.put(hidden)
    loss = hidden.pow(2).mean()
    others.submit(loss.backward).result()
    saved = others.submit(save, model)
    averaged = others.submit(average, list(model.parameters()), means)
    # Drawn while others are made again that were drawn before.
    noise = torch.rand(64, 64, device=hidden.device).sum().item()
    looking.wait()
    averaged.result()
    found = [saved.result(), noise]
    optimizer.step()
    optimizer.zero_grad()
    # Into the next iteration.
    looking.given.put(hidden)
    return loss.item(), found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--detect", action="store_true")
    parser.add_argument("--iterations", type=int, default=40)
    asked = parser.parse_args()
    if asked.budget:
        import plimsoll
    looking, runtime = Looking(), None
    looking.start()
    # Before there is a runtime.
    looking.given.put(torch.ones(4))
    looking.wait()
    if asked.budget:
        runtime = plimsoll.Runtime(asked.budget, device=asked.device)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.2)) for _ in range(8)])
    model.to(asked.device)
    means = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters())
    losses, found = [], []
    with concurrent.futures.ThreadPoolExecutor(2) as others:
        with runtime.detect() if asked.detect else contextlib.nullcontext() as loop:
            for _ in range(asked.iterations):
                if loop:
                    loop.mark()
                with runtime.iteration() if runtime and not asked.detect else contextlib.nullcontext():
                    loss, others_found = step(model, optimizer, means, looking, others)
                losses.append(loss)
                found.append(others_found)
    looking.wait()
    found.append([mean.double().sum().item() for mean in means])
    report = runtime.report() if runtime else {}
    moved = {kind: report.get(kind, 0) for kind in ["reactive_evictions", "reruns"]}
    print(json.dumps({"losses": losses, "found": found, "looked": looking.found, **moved}))


if __name__ == "__main__":
    main()
