"""Optimizers that work on lists (`foreach`) pass over all of their state with each of some ten operators. Within a budget they go
through the parameters in pieces, each with all of the operators, so that what is away of the state comes in once.

The runtime says where pieces end: such that every kernel is the one that would have run, so all bits are the same. Sharded parameters
stay together, for what is done to them may be communicated, in the same order by all processes.
"""

import sys

import torch
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import _intercepted

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_group = Optimizer._group_tensors_by_device_and_dtype


class _Key(tuple):
    """A device and a type, of one piece among others."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def _ends(lists):
    """Where pieces of lists of tensors end; none where there is but one."""
    # Of a parameter without a momentum as yet there is nothing.
    lists = [tensors for tensors in lists if any(tensor is not None for tensor in tensors)]
    if not all(type(tensor) in _PLAIN for tensors in lists for tensor in tensors):
        return []
    with torch._C.DisableTorchFunction():
        return torch.ops.plimsoll.pieces([tensor for tensors in lists for tensor in tensors], len(lists))


def _is_looked_at():
    """Whether a mode counts, or takes over, the operators that there would have been, or the functions."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def _group_in_pieces(tensorlistlist, with_indices=False):
    if torch.compiler.is_compiling():
        return _group(tensorlistlist, with_indices)
    groups = _group(tensorlistlist, with_indices)
    if not _intercepted.is_under_way() or _is_looked_at():
        return groups
    # Of others it is not known that they work out each parameter by itself.
    if not sys._getframe(1).f_globals["__name__"].startswith("torch.optim."):
        return groups
    pieces = {}
    for key, (lists, indices) in groups.items():
        begin = 0
        for end in _ends(lists) or [len(lists[0])]:
            pieces[_Key(key)] = ([tensors[begin:end] for tensors in lists], indices[begin:end])
            begin = end
    return pieces


Optimizer._group_tensors_by_device_and_dtype = staticmethod(_group_in_pieces)
