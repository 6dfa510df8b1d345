"""What PyTorch does with a storage past the dispatcher: operators announce it."""

import functools
import sys
import types

import torch

from . import _intercepted
from ._loaded import when_loaded
from ._regions import tensors_in, touching, unseen, within

_get_item = torch.UntypedStorage.__getitem__
_share_cuda = torch.UntypedStorage._share_cuda_
_write_file = torch.UntypedStorage._write_file
_byteswap = torch.UntypedStorage.byteswap
_address = torch.UntypedStorage.data_ptr
_write_record = torch._C.PyTorchFileWriter.write_record
_to_list, _to_numpy = torch.Tensor.tolist, torch.Tensor.numpy
_array_interface = torch.Tensor.__cuda_array_interface__
_function = torch.jit.ScriptFunction


def _replacing(change):
    """`change`, a method that gives a storage other bytes."""

    @functools.wraps(change)
    def announced(storage, *how, **named):
        # What was dropped and is to be computed again from those that there are is restored before they go.
        if storage.nbytes() > 0:
            unseen(torch.ops.plimsoll.replaces, storage)
        changed = change(storage, *how, **named)
        if storage.nbytes() > 0:
            unseen(torch.ops.plimsoll.replaced, storage)
        return changed

    return announced


def _counted(clone):
    """`clone` of a storage, as `copy.deepcopy` calls it. The host's memory for it is libtorch's allocator's, like that of tensors: else
    it would not count, and could not be evicted."""

    def counted(self):
        is_plain = type(self) is torch.UntypedStorage and self.device.type == "cpu"
        if not is_plain or torch._C._functorch.peek_interpreter_stack() is not None:
            return clone(self)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            room = torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()
        return room.copy_(self)

    return counted


def _get_item_announced(storage, place):
    if isinstance(place, slice) and storage.nbytes() > 0:
        unseen(torch.ops.plimsoll.lend, storage)
    return _get_item(storage, place)


def _share_cuda_announced(storage, *how):
    # With other processes.
    unseen(torch.ops.plimsoll.lend, storage)
    return _share_cuda(storage, *how)


def _reading(storage, read):
    """What `read` returns; the storage stays there meanwhile, in whatever thread."""
    return within(lambda: torch.ops.plimsoll.enter_read(storage, "plimsoll::read"), read)


def _write_file_announced(storage, *how):
    return _reading(storage, lambda: _write_file(storage, *how))


def _write_record_announced(writer, name, data, *how):
    if not isinstance(data, torch.UntypedStorage):
        return _write_record(writer, name, data, *how)
    return _reading(data, lambda: _write_record(writer, name, data, *how))


def _byteswap_announced(storage, dtype):
    if not _intercepted.is_under_way() or storage.nbytes() == 0:
        return _byteswap(storage, dtype)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return touching([], [whole], lambda: _byteswap(storage, dtype))


def _is_plain(tensor):
    """Whether it is an ordinary one that has bytes. Under a transform of functorch's, tensors stand for others."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    with torch._C.DisableTorchFunction():
        return tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda)


def _storage_of(tensor):
    return unseen(torch.Tensor.untyped_storage, tensor)


def _lend(tensor):
    # Between iterations, too: it is shared when the next one begins.
    if _is_plain(tensor):
        unseen(torch.ops.plimsoll.lend, _storage_of(tensor))


@functools.wraps(_to_list)
def _to_list_announced(tensor):
    if torch.compiler.is_dynamo_compiling() or not _intercepted.is_under_way() or not _is_plain(tensor):
        return _to_list(tensor)
    return _reading(_storage_of(tensor), lambda: _to_list(tensor))


def _in_place(change):
    """`change`, a method that writes its tensor by a function of the program's, which may run any operators itself."""

    @functools.wraps(change)
    def announced(tensor, *given, **named):
        for one in (tensor, *given, *named.values()):
            if isinstance(one, torch.Tensor):
                _lend(one)
        return change(tensor, *given, **named)

    return announced


def _reading_state(set_state):
    """`set_state`, which reads the tensor that it is given."""

    def announced(new_state):
        if not _intercepted.is_under_way() or not isinstance(new_state, torch.Tensor):
            return set_state(new_state)
        return _reading(_storage_of(new_state), lambda: set_state(new_state))

    return announced


@functools.wraps(_to_numpy)
def _to_numpy_announced(tensor, **how):
    if torch.compiler.is_dynamo_compiling():
        return tensor.numpy(**how)
    if how.get("force") and any(unseen(asks, tensor) for asks in (torch.Tensor.is_conj, torch.Tensor.is_neg)):
        # What libtorch would make of it, and share.
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
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


@functools.wraps(_address)
def _address_or_identity(storage):
    # `torch.save` tells by their addresses which storages it has seen. What it runs on the way makes room, and others may get that.
    if sys._getframe(1).f_globals is vars(torch.serialization) and _intercepted.is_under_way() and storage.nbytes() > 0:
        return storage._cdata
    return _address(storage)


def _told_apart_by_storage(identity):
    """`identity`, of which the last two are the address of a tensor's bytes, and their version. Here bytes move."""

    def told_apart(tensor):
        *before, address, version = identity(tensor)
        if address and _is_plain(tensor):
            address = _storage_of(tensor)._cdata, tensor.storage_offset() * tensor.element_size()
        return *before, address, version

    return told_apart


def _announcing(save, held):
    """`save`, of which `held` says what tensors it reads, by its arguments: all at once."""

    def announced(*what, **how):
        if not _intercepted.is_under_way():
            return save(*what, **how)
        return touching(held(*what, **how), [], lambda: save(*what, **how))

    return announced


def _constants_of(function, *_, **__):
    # With those of the functions that it calls. Nodes live as long as their graph.
    graph = function.inlined_graph
    nodes = (node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value"))
    return tensors_in([node.output().toIValue() for node in nodes])


def _held_by_script(m, *_, **__):
    # By that name, for functions may be given it by name.
    held = [*m.parameters(), *m.buffers()]
    for part in m.modules():
        if isinstance(part, torch.jit.ScriptModule):
            kind = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
            held += tensors_in([part._c.getattr(name) for name in kind.get_attributes()])
            held += [constant for name in part._c._method_names() for constant in _constants_of(part._c._get_method(name))]
    return held


def _redefine(function, change):
    """Makes a function of Python's what `change` makes of it, for those, too, who have taken it out of its module already."""
    before = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    before.__kwdefaults__, before.__annotations__ = function.__kwdefaults__, function.__annotations__
    function.__wrapped__ = before

    def call(*given, _plimsoll, **named):
        return _plimsoll(*given, **named)

    function.__code__, function.__defaults__, function.__kwdefaults__ = call.__code__, None, {"_plimsoll": change(before)}


def _held_by_exported(*_, exported_programs=None, **__):
    leaves = torch.utils._pytree.tree_leaves
    programs = [one for one in leaves(exported_programs) if isinstance(one, torch.export.ExportedProgram)]
    return tensors_in(leaves([[one.state_dict, one.constants, one.example_inputs] for one in programs]))


def _prepare_exported(module):
    _redefine(module.package_pt2, lambda save: _announcing(save, _held_by_exported))


def _prepare_safetensors(module):
    for function in (module.save, module.save_file):
        _redefine(function, _saving_tensors)


def _saving_tensors(save):
    """`save`, which reads the tensors that it is given by their addresses where they are the host's: all at once."""

    @functools.wraps(save)
    def announced(*what, **how):
        read = tensors_in([*what, *how.values()])
        if not _intercepted.is_under_way() or not all(tensor.is_cpu for tensor in read):
            return save(*what, **how)
        return touching(read, [], lambda: save(*what, **how))

    return announced


for _name in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_"):
    setattr(torch.UntypedStorage, _name, _replacing(getattr(torch.UntypedStorage, _name)))
_redefine(torch.UntypedStorage.clone, _counted)
torch.UntypedStorage.__getitem__ = _get_item_announced
torch.UntypedStorage._share_cuda_ = _share_cuda_announced
torch.UntypedStorage.byteswap = _byteswap_announced
torch.UntypedStorage.data_ptr = _address_or_identity
torch.UntypedStorage._write_file = _write_file_announced
torch._C.PyTorchFileWriter.write_record = _write_record_announced
# Dynamo asks methods of tensors for it.
_to_list_announced.__objclass__ = _to_numpy_announced.__objclass__ = torch._C.TensorBase
torch.Tensor.tolist = _to_list_announced
torch.Tensor.apply_ = _in_place(torch.Tensor.apply_)
torch.Tensor.map_ = _in_place(torch.Tensor.map_)
torch.Tensor.map2_ = _in_place(torch.Tensor.map2_)
_redefine(torch.random.set_rng_state, _reading_state)
torch.Tensor.numpy = _to_numpy_announced
torch._C._to_dlpack = torch.utils.dlpack.to_dlpack = torch.to_dlpack = _lending(torch._C._to_dlpack)
torch._C._to_dlpack_versioned = _lending(torch._C._to_dlpack_versioned)
torch.Tensor.__cuda_array_interface__ = property(_array_interface_announced)
torch.autograd.graph._get_tid = _told_apart_by_storage(torch.autograd.graph._get_tid)
torch.autograd.graph._get_sid = _told_apart_by_storage(torch.autograd.graph._get_sid)
for _kind in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):
    for _name in ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter"):
        setattr(_kind, _name, _announcing(getattr(_kind, _name), _held_by_script))
_function.save = _announcing(_function.save, _constants_of)
_function.save_to_buffer = _announcing(_function.save_to_buffer, _constants_of)
_redefine(torch.jit.save_jit_module_to_flatbuffer, lambda save: _announcing(save, _held_by_script))
when_loaded("torch.export.pt2_archive._package", _prepare_exported)
when_loaded("safetensors.torch", _prepare_safetensors)
