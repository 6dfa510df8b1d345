"""Operators that call others and have a kernel of ours: where PyTorch's Python chooses kernels, it goes by those it had before."""

import torch
from torch._C import DispatchKey


def _as_before(operator):
    def call(*given, **named):
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                return operator.py_kernels[key](*given, **named)
        return operator._op_dk(DispatchKey.CompositeImplicitAutograd, *given, **named)

    return call


for _name in torch.ops.plimsoll.composites():
    _packet, _, _overload = _name.partition(".")
    _operator = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    for _key in (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA):
        _operator.py_impl(_key)(_as_before(_operator))
