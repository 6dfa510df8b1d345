"""What PyTorch does with a storage past the dispatcher: operators announce it."""

import contextlib

import torch

from . import _intercepted

_resize, _get_item = torch.UntypedStorage.resize_, torch.UntypedStorage.__getitem__
_share_cuda = torch.UntypedStorage._share_cuda_
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


def _share_cuda_announced(storage, *how):
    # With other processes.
    torch.ops.plimsoll.lend(storage)
    return _share_cuda(storage, *how)


@contextlib.contextmanager
def _kept(enter, *what):
    """What is read by its address, in whatever thread, stays there meanwhile."""
    enter(*what)
    try:
        yield
    except BaseException:
        torch.ops.plimsoll.fail_region()
        raise
    torch.ops.plimsoll.leave_region([])


def _reading(storage):
    return _kept(torch.ops.plimsoll.enter_read, storage, "plimsoll::read")


def _reading_all(tensors):
    return _kept(torch.ops.plimsoll.enter_region, tensors, [], [], 0, "plimsoll::region_once")


def _write_file_announced(storage, *how):
    with _reading(storage):
        return _write_file(storage, *how)


def _write_record_announced(writer, name, data, *how):
    with _reading(data) if isinstance(data, torch.UntypedStorage) else contextlib.nullcontext():
        return _write_record(writer, name, data, *how)


def _is_plain(tensor):
    """Whether it is an ordinary one that has bytes."""
    return tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda)


def _lend(tensor):
    # Between iterations, too: it is shared when the next one begins.
    if _is_plain(tensor):
        torch.ops.plimsoll.lend(tensor.untyped_storage())


def _to_list_announced(tensor):
    is_read = _intercepted.is_under_way() and _is_plain(tensor)
    with _reading(tensor.untyped_storage()) if is_read else contextlib.nullcontext():
        return _to_list(tensor)


def _to_numpy_announced(tensor, **how):
    _lend(tensor)
    return _to_numpy(tensor, **how)


def _to_dlpack_announced(tensor, *where, **how):
    _lend(tensor)
    return _to_dlpack(tensor, *where, **how)


def _to_capsule_announced(tensor):
    _lend(tensor)
    return _to_capsule(tensor)


def _array_interface_announced(tensor):
    if tensor.is_cuda:
        _lend(tensor)
    return _array_interface.__get__(tensor)


def _announcing(save, held):
    """`save`, which reads what a module or a program has `held`, its tensors among it, all at once."""

    def announced(saved, *where, **how):
        if not _intercepted.is_under_way():
            return save(saved, *where, **how)
        with _reading_all([one for one in held(saved) if isinstance(one, torch.Tensor)]):
            return save(saved, *where, **how)

    return announced


def _held_by_script(module):
    return [*module.parameters(), *module.buffers()]


def _held_by_exported(program):
    return [*program.state_dict.values(), *program.constants.values()]


torch.UntypedStorage.resize_ = _resize_announced
torch.UntypedStorage.__getitem__ = _get_item_announced
torch.UntypedStorage._share_cuda_ = _share_cuda_announced
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
