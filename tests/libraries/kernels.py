"""Jobs that launch kernels of their own."""

import os

# Triton's interpreter runs them on whatever device; it asks when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from jobs import job, trains  # noqa: E402


def kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def halve(values, halves, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(halves + at, tl.load(values + at) / 2)

    def twice(launch, quantiles):
        launch()
        launch()
        return [0.0 for _ in quantiles]

    # Both are tried when it is launched first.
    @triton.autotune([triton.Config({}, num_warps=warps) for warps in (1, 2)], ["COUNT"], restore_value=["values"], do_bench=twice)
    @triton.jit
    def add(values, part, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(values + at, tl.load(values + at) + part)

    return halve, add


@job("marked", "detected")
def triton_kernels(device):
    """One makes a tensor, one changes what it is given, and is tuned."""
    halve, add = kernels()

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(_, values):
            halves = torch.empty_like(values)
            halve[(1,)](values, halves, COUNT=values.numel())
            return halves

        @staticmethod
        def backward(_, gradient):
            return Halved.forward(None, gradient.contiguous())

    layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(6)])

    def loss_of(generator):
        values = torch.randn(64, 64, generator=generator).to(device)
        for layer in layers:
            values = layer(values)
            add[(1,)](values, 0.25, COUNT=values.numel())
            values = Halved.apply(values.tanh())
        return values.square().mean()

    return trains(layers, device, loss_of)
