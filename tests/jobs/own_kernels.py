"""A job whose kernels are its own: one is Triton's, which changes what it is given, others are those of extensions, one of which is
known. None passes the dispatcher.

Prints as JSON what has come of it, and how often something was evicted."""

import ctypes
import importlib.util
import os
import sys

import job
import torch

sys.path[:0] = [os.path.dirname(os.environ["EXTENSION"]), os.path.join(os.path.dirname(__file__), "..", "stand_in")]
COUNT = 64 * 64


def extension():
    spec = importlib.util.spec_from_file_location("own_kernels", os.environ["EXTENSION"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add(place, values, count, part):
    values = (ctypes.c_float * count).from_address(values + 4 * count * place)
    for at in range(count):
        values[at] += part


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_, values):
        halves, count = Halved.halve(values.clone())
        assert count == COUNT
        return halves

    @staticmethod
    def backward(_, gradient):
        halves = gradient.clone()
        Halved.scale([halves])
        return halves


def main():
    runtime, _ = job.begin(__doc__)
    import amp_C
    import triton

    kernels, added = extension(), triton.jit(add)
    Halved.halve, Halved.scale = job.by_address(kernels.cpu.halve), job.by_address(kernels.Scale(0.5).apply)
    layers = [torch.nn.Linear(64, 64) for _ in range(10)]
    found = []
    for _ in range(8):
        with job.iteration(runtime):
            values, saved = torch.randn(64, 64), []
            for layer in layers:
                values = layer(values)
                added[(4,)](values, COUNT // 4, part=0.25)
                values = Halved.apply(values.tanh())
                saved.append(values)
            # Without a word to autograd, for whose backward pass they were saved.
            amp_C.scale_all(saved[:-1], 0.5)
            values.square().mean().backward()
            with torch.no_grad():
                for layer in layers:
                    layer.weight -= layer.weight.grad
                    layer.weight.grad = None
            found.append(values.double().sum().item())
    job.end(runtime, found)


if __name__ == "__main__":
    main()
