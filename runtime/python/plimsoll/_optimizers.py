"""Optimizers that work on lists (`foreach`) pass over all of their state with each of some ten operators. Within a budget they go
through the parameters in pieces, each with all of the operators, so that what is away of the state comes in once.

The runtime says where pieces end: such that every kernel is the one that would have run, so all bits are the same.
"""

import torch
from torch.optim import Optimizer

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_group = Optimizer._group_tensors_by_device_and_dtype


class _Key(tuple):
    """A device and a type, of one piece among others."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def _ends(lists):
    """Where pieces of lists of tensors end; none where there is but one."""
    lists = [[getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for tensors in lists]
    # Of a parameter without a momentum as yet there is nothing.
    lists = [tensors for tensors in lists if any(tensor is not None for tensor in tensors)]
    if not all(type(tensor) in _PLAIN for tensors in lists for tensor in tensors):
        return []
    return torch.ops.plimsoll.pieces([tensor for tensors in lists for tensor in tensors], len(lists))


def _group_in_pieces(lists, with_indices=False):
    groups = _group(lists, with_indices)
    # A mode that watches operators sees those that it would have seen.
    is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if is_watched or not torch._C._dispatch_tls_is_dispatch_key_included("Fake"):
        return groups
    pieces = {}
    for key, (lists, indices) in groups.items():
        begin = 0
        for end in _ends(lists) or [len(lists[0])]:
            pieces[_Key(key)] = ([tensors[begin:end] for tensors in lists], indices[begin:end])
            begin = end
    return pieces


Optimizer._group_tensors_by_device_and_dtype = staticmethod(_group_in_pieces)
