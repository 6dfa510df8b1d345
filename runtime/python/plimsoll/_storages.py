"""What PyTorch does with a storage past the dispatcher: operators announce it."""

import torch

from . import _intercepted

_resize = torch.UntypedStorage.resize_
_write_file = torch.UntypedStorage._write_file
_write_record = torch._C.PyTorchFileWriter.write_record
_to_list, _to_numpy, _to_dlpack = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__dlpack__


def _resize_announced(storage, size):
    # What was dropped and is to be computed again from those bytes is restored before they go.
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaces(storage)
    resized = _resize(storage, size)
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaced(storage)
    return resized


def _write_file_announced(storage, *how):
    torch.ops.plimsoll.read(storage)
    return _write_file(storage, *how)


def _write_record_announced(writer, name, data, *how):
    if isinstance(data, torch.UntypedStorage):
        torch.ops.plimsoll.read(data)
    return _write_record(writer, name, data, *how)


def _announce(tensor, operator):
    """Where an iteration is under way, and the tensor is an ordinary one that the processor can read."""
    if _intercepted.is_under_way() and tensor.layout is torch.strided and tensor.is_cpu:
        operator(tensor.untyped_storage())


def _to_list_announced(tensor):
    _announce(tensor, torch.ops.plimsoll.read)
    return _to_list(tensor)


def _to_numpy_announced(tensor, **how):
    _announce(tensor, torch.ops.plimsoll.lend)
    return _to_numpy(tensor, **how)


def _to_dlpack_announced(tensor, *where, **how):
    _announce(tensor, torch.ops.plimsoll.lend)
    return _to_dlpack(tensor, *where, **how)


torch.UntypedStorage.resize_ = _resize_announced
torch.UntypedStorage._write_file = _write_file_announced
torch._C.PyTorchFileWriter.write_record = _write_record_announced
torch.Tensor.tolist = _to_list_announced
torch.Tensor.numpy = _to_numpy_announced
torch.Tensor.__dlpack__ = _to_dlpack_announced
