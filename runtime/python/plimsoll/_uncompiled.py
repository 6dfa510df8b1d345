"""What this package does beside a program is not the program's: where Dynamo breaks a graph it would trace it. To be loaded last.

But for what takes the place of a function that Dynamo knows, or traces: to it, that is what was there before.
"""

import sys
import types

from torch._C._dynamo import eval_frame

from . import _optimizers, _storages

_LEAVE_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def _leave_alone(code):
    # With those of the functions that it makes; what it calls is traced, as before.
    eval_frame.set_code_exec_strategy(code, _LEAVE_ALONE)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _leave_alone(constant)


_TRACED = (_optimizers._group_in_pieces, _storages._to_list_announced, _storages._to_numpy_announced)
for _name in [name for name in sys.modules if name.startswith(f"{__package__}.")]:
    for _function in vars(sys.modules[_name]).values():
        is_function = isinstance(_function, types.FunctionType) and _function.__module__ == _name
        if is_function and _function not in _TRACED:
            _leave_alone(_function.__code__)
