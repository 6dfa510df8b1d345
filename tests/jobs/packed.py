"""A job whose quantized copies of layers hold the layers' own biases, in objects of C++, and whose quantized tensor goes by tensors of its
own; and that ignores what some of its operators warn of, and makes other warnings errors.

Prints as JSON what it has computed, and the warnings."""

import warnings

import job
import torch
from torch.ao.nn.quantized import dynamic

ITERATIONS, SIZE = 4, 1 << 15

warnings.filterwarnings("ignore", category=DeprecationWarning)
runtime, _ = job.begin(__doc__)
layer = torch.nn.Linear(16, SIZE)
layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
packed = dynamic.Linear.from_float(layer)
recurrent = torch.nn.LSTM(16, 256)
recurrent.qconfig = layer.qconfig
packed_recurrent = dynamic.LSTM.from_float(recurrent)
zeros = torch.zeros(SIZE, dtype=torch.int64)
by_channel = torch.quantize_per_channel(torch.randn(SIZE, 4), torch.full((SIZE,), 0.1), zeros, 0, torch.qint8)


def iterate():
    batch, row = torch.randn(4, 16), torch.randn(1, SIZE)
    with torch.no_grad():
        whole = layer(batch)
        biases = [bias * 2 for name, bias in recurrent.named_parameters() if "bias" in name]
        scaled = [whole * factor for factor in range(6)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            spreads = [(row + shift).std(0) for shift in range(6)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sines = [torch.sin(row * factor) for factor in range(8)]
            sums = [one.nan_to_num(1.0).sum().item() for one in (*scaled, *sines, *spreads, packed(batch), (zeros + 1).float())]
            sums.append(by_channel.dequantize().sum().item())
            sums += [one.sum().item() for one in [*biases, packed_recurrent(batch[None])[0]]]
    return sums, len(told)


found = []
for _ in range(ITERATIONS):
    with job.iteration(runtime):
        found.append(iterate())
job.end(runtime, found)
