"""What PyTorch does with a storage past the dispatcher: operators announce it."""

import torch

from . import _intercepted

_resize, _get_item = torch.UntypedStorage.resize_, torch.UntypedStorage.__getitem__
_write_file = torch.UntypedStorage._write_file
_write_record = torch._C.PyTorchFileWriter.write_record
_to_list, _to_numpy, _to_dlpack = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__dlpack__
_to_capsule = torch.utils.dlpack.to_dlpack
_array_interface = torch.Tensor.__cuda_array_interface__


def _resize_announced(storage, size):
    # What was dropped and is to be computed again from those bytes is restored before they go.
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaces(storage)
    resized = _resize(storage, size)
    if storage.nbytes() > 0:
        torch.ops.plimsoll.replaced(storage)
    return resized


def _get_item_announced(storage, place):
    if isinstance(place, slice) and storage.nbytes() > 0:
        torch.ops.plimsoll.lend(storage)
    return _get_item(storage, place)


def _write_file_announced(storage, *how):
    torch.ops.plimsoll.read(storage)
    return _write_file(storage, *how)


def _write_record_announced(writer, name, data, *how):
    if isinstance(data, torch.UntypedStorage):
        torch.ops.plimsoll.read(data)
    return _write_record(writer, name, data, *how)


def _announce(tensor, operator):
    """Where an iteration is under way, and the tensor is an ordinary one that has bytes."""
    if _intercepted.is_under_way() and tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda):
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


def _to_capsule_announced(tensor):
    _announce(tensor, torch.ops.plimsoll.lend)
    return _to_capsule(tensor)


def _array_interface_announced(tensor):
    if tensor.is_cuda:
        _announce(tensor, torch.ops.plimsoll.lend)
    return _array_interface.__get__(tensor)


def _announcing(save, held):
    """`save`, which reads what a module or a program has `held`, its tensors among it, all at once."""

    def announced(saved, *where, **how):
        if _intercepted.is_under_way():
            torch.ops.plimsoll.touch([one for one in held(saved) if isinstance(one, torch.Tensor)], [])
        return save(saved, *where, **how)

    return announced


def _held_by_script(module):
    return [*module.parameters(), *module.buffers()]


def _held_by_exported(program):
    return [*program.state_dict.values(), *program.constants.values()]


torch.UntypedStorage.resize_ = _resize_announced
torch.UntypedStorage.__getitem__ = _get_item_announced
torch.UntypedStorage._write_file = _write_file_announced
torch._C.PyTorchFileWriter.write_record = _write_record_announced
torch.Tensor.tolist = _to_list_announced
torch.Tensor.numpy = _to_numpy_announced
torch.Tensor.__dlpack__ = _to_dlpack_announced
torch.utils.dlpack.to_dlpack = torch.to_dlpack = _to_capsule_announced
torch.Tensor.__cuda_array_interface__ = property(_array_interface_announced)
_script = torch.jit.RecursiveScriptModule
_script.save = _announcing(_script.save, _held_by_script)
_script.save_to_buffer = _announcing(_script.save_to_buffer, _held_by_script)
torch.export.save = _announcing(torch.export.save, _held_by_exported)
