"""`UntypedStorage.resize_`, by which sharded models get and let go of parameters, is no operator: operators announce it."""

import torch

_resize = torch.UntypedStorage.resize_


def _resize_announced(storage, size):
    # What was dropped and is to be computed again from those bytes is restored before they go.
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaces(storage)
    resized = _resize(storage, size)
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaced(storage)
    return resized


torch.UntypedStorage.resize_ = _resize_announced
