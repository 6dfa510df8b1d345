"""The streams of a GPU that a program uses where nobody listens: a stream is noted when it becomes the current one."""

import functools

import torch

from ._plimsoll import note_stream


def _noting(enter):
    """`enter`, which makes a stream the current one."""

    @functools.wraps(enter)
    def enter_noted(*stream, **named):
        entered = enter(*stream, **named)
        note_stream()
        return entered

    return enter_noted


for _name in ("_cuda_setStream", "_accelerator_setStream"):
    if hasattr(torch._C, _name):
        setattr(torch._C, _name, _noting(getattr(torch._C, _name)))
if hasattr(torch.cuda.Stream, "__enter__"):
    torch.cuda.Stream.__enter__ = _noting(torch.cuda.Stream.__enter__)
