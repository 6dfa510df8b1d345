"""What PyTorch does with a storage past the dispatcher: operators announce it."""

import torch

from . import _intercepted
from ._regions import within

_resize, _get_item = torch.UntypedStorage.resize_, torch.UntypedStorage.__getitem__
_share_cuda = torch.UntypedStorage._share_cuda_
_write_file = torch.UntypedStorage._write_file
_byteswap = torch.UntypedStorage.byteswap
_set_rng_state = torch.random.set_rng_state
_write_record = torch._C.PyTorchFileWriter.write_record
_to_list, _to_numpy = torch.Tensor.tolist, torch.Tensor.numpy
_array_interface = torch.Tensor.__cuda_array_interface__
_script, _function = torch.jit.RecursiveScriptModule, torch.jit.ScriptFunction


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


def _reading(storage, read):
    """What `read` returns; the storage stays there meanwhile, in whatever thread."""
    return within(lambda: torch.ops.plimsoll.enter_read(storage, "plimsoll::read"), read)


def _touching(read, written, touch):
    """What `touch` returns; the tensors stay there meanwhile."""
    return within(lambda: torch.ops.plimsoll.enter_region(read, written, [], 0, "plimsoll::region_once"), touch)


def _write_file_announced(storage, *how):
    return _reading(storage, lambda: _write_file(storage, *how))


def _write_record_announced(writer, name, data, *how):
    if not isinstance(data, torch.UntypedStorage):
        return _write_record(writer, name, data, *how)
    return _reading(data, lambda: _write_record(writer, name, data, *how))


def _byteswap_announced(storage, dtype):
    if not _intercepted.is_under_way() or storage.nbytes() == 0:
        return _byteswap(storage, dtype)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _touching([], [whole], lambda: _byteswap(storage, dtype))


def _is_plain(tensor):
    """Whether it is an ordinary one that has bytes."""
    return tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda)


def _lend(tensor):
    # Between iterations, too: it is shared when the next one begins.
    if _is_plain(tensor):
        torch.ops.plimsoll.lend(tensor.untyped_storage())


def _to_list_announced(tensor):
    if not _intercepted.is_under_way() or not _is_plain(tensor):
        return _to_list(tensor)
    return _reading(tensor.untyped_storage(), lambda: _to_list(tensor))


def _in_place(change):
    """`change`, a method that writes its tensor by a function of the program's, which may run any operators itself."""

    def announced(tensor, *given, **named):
        for one in (tensor, *given, *named.values()):
            if isinstance(one, torch.Tensor):
                _lend(one)
        return change(tensor, *given, **named)

    return announced


def _set_rng_state_announced(new_state):
    if not _intercepted.is_under_way() or not isinstance(new_state, torch.Tensor):
        return _set_rng_state(new_state)
    return _reading(new_state.untyped_storage(), lambda: _set_rng_state(new_state))


def _to_numpy_announced(tensor, **how):
    _lend(tensor)
    return _to_numpy(tensor, **how)


def _lending(make_capsule):
    def announced(data, *, dl_device=None, copy=None):
        if isinstance(data, torch.Tensor):
            if copy is True and _is_plain(data) and (dl_device is None or tuple(dl_device) == data.__dlpack_device__()):
                # Nobody could tell of a copy that libtorch makes.
                data, copy = data.clone(), None
            _lend(data)
        return make_capsule(data, dl_device=dl_device, copy=copy)

    return announced


def _array_interface_announced(tensor):
    if tensor.is_cuda:
        _lend(tensor)
    return _array_interface.__get__(tensor)


def _told_apart_by_storage(identity):
    """`identity`, of which the last two are the address of a tensor's bytes, and their version. Here bytes move."""

    def told_apart(tensor):
        *before, address, version = identity(tensor)
        if address and _is_plain(tensor):
            address = tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
        return *before, address, version

    return told_apart


def _announcing(save, held):
    """`save`, whose first argument is a module or a program: it reads the tensors that are `held` there, all at once."""

    def announced(*what, **how):
        if not _intercepted.is_under_way():
            return save(*what, **how)
        return _touching(held(what[0] if what else how["ep"]), [], lambda: save(*what, **how))

    return announced


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors_in(part)]


def _constants_of(function):
    # With those of the functions that it calls. Nodes live as long as their graph.
    graph = function.inlined_graph
    nodes = (node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value"))
    return _tensors_in([node.output().toIValue() for node in nodes])


def _held_by_script(module):
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        if isinstance(part, _script):
            kind = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
            held += _tensors_in([part._c.getattr(name) for name in kind.get_attributes()])
            held += [constant for name in part._c._method_names() for constant in _constants_of(part._c._get_method(name))]
    return held


def _held_by_exported(program):
    examples = torch.utils._pytree.tree_leaves(program.example_inputs)
    return _tensors_in([*program.state_dict.values(), *program.constants.values(), *examples])


torch.UntypedStorage.resize_ = _resize_announced
torch.UntypedStorage.__getitem__ = _get_item_announced
torch.UntypedStorage._share_cuda_ = _share_cuda_announced
torch.UntypedStorage.byteswap = _byteswap_announced
torch.UntypedStorage._write_file = _write_file_announced
torch._C.PyTorchFileWriter.write_record = _write_record_announced
torch.Tensor.tolist = _to_list_announced
torch.Tensor.apply_ = _in_place(torch.Tensor.apply_)
torch.Tensor.map_ = _in_place(torch.Tensor.map_)
torch.Tensor.map2_ = _in_place(torch.Tensor.map2_)
torch.set_rng_state = torch.random.set_rng_state = _set_rng_state_announced
torch.Tensor.numpy = _to_numpy_announced
torch._C._to_dlpack = torch.utils.dlpack.to_dlpack = torch.to_dlpack = _lending(torch._C._to_dlpack)
torch._C._to_dlpack_versioned = _lending(torch._C._to_dlpack_versioned)
torch.Tensor.__cuda_array_interface__ = property(_array_interface_announced)
torch.autograd.graph._get_tid = _told_apart_by_storage(torch.autograd.graph._get_tid)
torch.autograd.graph._get_sid = _told_apart_by_storage(torch.autograd.graph._get_sid)
_script.save = _announcing(_script.save, _held_by_script)
_script.save_to_buffer = _announcing(_script.save_to_buffer, _held_by_script)
_function.save = _announcing(_function.save, _constants_of)
_function.save_to_buffer = _announcing(_function.save_to_buffer, _constants_of)
torch.export.save = _announcing(torch.export.save, _held_by_exported)
