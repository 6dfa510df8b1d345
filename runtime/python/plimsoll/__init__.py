"""Keeps a PyTorch training job within an absolute budget of device memory.

Every tensor storage that is idle may be copied to the host, or dropped and computed again; a policy file, or a rule of the
literature, says which. Losses and parameters stay bit for bit what they are. See `Runtime`.
"""

import torch

_LIBTORCH = "2.11."
if not torch.__version__.startswith(_LIBTORCH):
    raise ImportError(f"plimsoll is built for torch {_LIBTORCH}x, found {torch.__version__}")

# After torch: it uses the libtorch that torch has loaded.
from ._plimsoll import Guard, Loop, Runtime, stand_by  # noqa: E402

# What programs do past the dispatcher, by operators of the extension.
from . import _compiled, _composites, _higher_order, _interruptions, _optimizers, _storages, _streams, _threads  # noqa: E402, F401
from ._kernels import by_address  # noqa: E402
from . import _uncompiled  # noqa: E402, F401


def touch(*tensors, read=()):
    """Brings tensors back. Until the next operator they may be used by their addresses: by a library that nobody knows of. Those
    of `read` must not be written meanwhile, and may still be dropped and computed again later. In the iteration's own thread alone.

    Raises torch.OutOfMemoryError where they find no room.
    """
    torch.ops.plimsoll.touch(read, tensors)


__all__ = ["Guard", "Loop", "Runtime", "by_address", "stand_by", "touch"]
