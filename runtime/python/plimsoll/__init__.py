"""Keeps a PyTorch training job within an absolute budget of device memory.

Every tensor storage that is idle may be copied to the host, or dropped and computed again; a policy file, or a rule of the
literature, says which. Losses and parameters stay bit for bit what they are. See `Runtime`.
"""

import torch

_LIBTORCH = "2.11."
if not torch.__version__.startswith(_LIBTORCH):
    raise ImportError(f"plimsoll is built for torch {_LIBTORCH}x, found {torch.__version__}")

# After torch: it uses the libtorch that torch has loaded.
from ._plimsoll import Guard, Runtime  # noqa: E402

_resize = torch.UntypedStorage.resize_


def _resize_announced(storage, size):
    # Sharded models let go of what they gathered by this, which is no operator. What was dropped and is to be computed again
    # from those bytes is restored before they go.
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaces(storage)
    return _resize(storage, size)


torch.UntypedStorage.resize_ = _resize_announced

__all__ = ["Guard", "Runtime"]
