"""Kernels that a program launches itself: by Triton, and by functions of extensions that are built with pybind11, as
`torch.utils.cpp_extension` builds them. Nobody says what they do with the tensors that they are given: each may be written.
"""

import functools
import importlib.machinery
import sys
import types

import torch

from . import _intercepted
from ._loaded import when_loaded
from ._regions import tensors_in, touching

_EXTENSION = importlib.machinery.ExtensionFileLoader
_load = _EXTENSION.exec_module
# What pybind11 makes of functions and of methods, and how it calls a tensor where it says what they take.
_FUNCTIONS = types.BuiltinFunctionType, type(vars(torch._C.Graph)["nodes"])
_TENSOR = "torch.Tensor"


def _operands(value):
    """The tensors in what a launch is given: what describes one, or stands for it, has it as its base."""
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _operands(part)]
    if isinstance(value, torch.Tensor):
        return [value]
    return _operands(value.base) if hasattr(value, "base") else []


def _launching(run):
    @functools.wraps(run)
    def launch(kernel, *given, **named):
        if named.get("warmup") or not _intercepted.is_under_way():
            return run(kernel, *given, **named)
        return touching([], _operands([*given, *named.values()]), lambda: run(kernel, *given, **named))

    return launch


def _prepare_triton(kind):
    def prepare(module):
        kernels = getattr(module, kind)
        kernels.run = _launching(kernels.run)

    return prepare


def by_address(function):
    """`function`, which may read and write the tensors that it is given by their addresses."""

    @functools.wraps(function)
    def announced(*given, **named):
        if not _intercepted.is_under_way():
            return function(*given, **named)
        return touching([], tensors_in([*given, *named.values()]), lambda: function(*given, **named), tensors_in)

    # To be called, not to be traced into.
    announced._torchdynamo_disable = True
    return announced


def _prepare_functions(owner):
    functions = {name: value for name, value in vars(owner).items() if isinstance(value, _FUNCTIONS)}
    # Where one takes tensors, another may take what holds some.
    if any(_TENSOR in (function.__doc__ or "") for function in functions.values()):
        for name, function in functions.items():
            setattr(owner, name, by_address(function))


def _prepare_extension(module):
    _prepare_functions(module)
    for part in list(vars(module).values()):
        if isinstance(part, type) and part.__module__ == module.__name__:
            _prepare_functions(part)
        elif isinstance(part, types.ModuleType) and part.__name__.startswith(module.__name__ + "."):
            _prepare_extension(part)


def _is_others(module):
    """Whether it is an extension, and none of PyTorch's or of this package: what these do is looked after one by one."""
    is_extension = isinstance(getattr(module, "__loader__", None), _EXTENSION)
    return is_extension and module.__name__.partition(".")[0] not in ("torch", "functorch", __package__)


def _load_and_prepare(loader, module):
    _load(loader, module)
    if _is_others(module):
        _prepare_extension(module)


when_loaded("triton.runtime.jit", _prepare_triton("JITFunction"))
when_loaded("triton.runtime.interpreter", _prepare_triton("InterpretedFunction"))
_EXTENSION.exec_module = _load_and_prepare
for _module in filter(_is_others, list(sys.modules.values())):
    _prepare_extension(_module)
