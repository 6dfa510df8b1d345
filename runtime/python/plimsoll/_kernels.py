"""Kernels that a program launches itself, past the dispatcher: by Triton, in extensions that are known, and in functions of which it
says so. Nobody says what they do with the tensors that they are given: each may be written.
"""

import functools
import types

import torch

from . import _intercepted
from ._loaded import when_loaded
from ._regions import tensors_in, touching


def _announced(function, tensors_of):
    """`function`, each call of which is a region that may write the tensors in what it is given."""

    @functools.wraps(function)
    def announced(*given, **named):
        # Under a transform of functorch's, tensors stand for others.
        if not _intercepted.is_under_way() or torch._C._functorch.peek_interpreter_stack() is not None:
            return function(*given, **named)
        written = tensors_of([*given, *named.values()])
        return touching([], written, lambda: function(*given, **named), tensors_in)

    return announced


# Extensions in C++ whose functions all go by address.
_EXTENSIONS = (
    # apex
    "amp_C",
    "distributed_adam_cuda",
    "distributed_lamb_cuda",
    "fast_layer_norm",
    "focal_loss_cuda",
    "fused_adam_cuda",
    "fused_dense_cuda",
    "fused_index_mul_2d",
    "fused_lamb_cuda",
    "fused_layer_norm_cuda",
    "fused_rotary_positional_embedding",
    "fused_weight_gradient_mlp_cuda",
    "generic_scaled_masked_softmax_cuda",
    "group_norm_cuda",
    "mlp_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "syncbn",
    "xentropy_cuda",
    # causal-conv1d, flash-attn, mamba-ssm
    "causal_conv1d_cuda",
    "flash_attn_2_cuda",
    "selective_scan_cuda",
)


def by_address(function):
    """`function`, whose kernels no operator of PyTorch's launches: one of an extension in C++ that goes by `data_ptr`, say. Of most
    extensions of apex, and of those of causal-conv1d, flash-attn and mamba-ssm, that is known.

    Within an iteration each call is one operator: the tensors that it is given are there meanwhile, and taken for written, so that
    they are kept or swapped afterwards, not computed again; nor is what it returns. Nothing within is evicted, and no operator within
    brings anything back: it is to use no other tensors than it is given and makes, and to leave no graph to autograd. Wrap it in a
    `torch.autograd.Function` as it is without this package.

        flash_forward = plimsoll.by_address(extension.flash_forward)
    """
    return _announced(function, tensors_in)


def _operands(value):
    """The tensors in what a launch is given: Triton's descriptor of one, and what has another type for it, have it as their base."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _operands(part)]
    return _operands(value.base) if type(value).__module__.startswith("triton.") and hasattr(value, "base") else []


def _prepare_functions(module):
    module.JITFunction.run = _announced(module.JITFunction.run, _operands)


def _prepare_interpreted_functions(module):
    module.InterpretedFunction.run = _announced(module.InterpretedFunction.run, _operands)


def _prepare_tuned_functions(module):
    # All launches of one that is still being tuned are one region: they are timed, and to enter a region takes time.
    module.Autotuner.run = _announced(module.Autotuner.run, _operands)


def _prepare_compiled_kernels(module):
    get_launcher = module.CompiledKernel.__getitem__
    module.CompiledKernel.__getitem__ = lambda kernel, grid: _announced(get_launcher(kernel, grid), _operands)


def _prepare_extension(module):
    for name, value in list(vars(module).items()):
        if isinstance(value, types.BuiltinFunctionType) and value.__module__ == module.__name__:
            setattr(module, name, by_address(value))


for _extension in _EXTENSIONS:
    when_loaded(_extension, _prepare_extension)

when_loaded("triton.runtime.jit", _prepare_functions)
when_loaded("triton.runtime.autotuner", _prepare_tuned_functions)
when_loaded("triton.runtime.interpreter", _prepare_interpreted_functions)
when_loaded("triton.compiler.compiler", _prepare_compiled_kernels)
