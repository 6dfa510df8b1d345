"""Operators that take functions, as `torch.cond` does, choose their kernels in Python, and have none for the runtime: it
intercepts what the functions run.
"""

import torch
from torch import _ops

from . import _intercepted

_INTERCEPTED = torch._C._dispatch_key_parse(_intercepted.KEY)

# Those to come, and those that there are.
_ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_INTERCEPTED)
for operator in _ops._higher_order_ops.values():
    operator.fallthrough(_INTERCEPTED)
