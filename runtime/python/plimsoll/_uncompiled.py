"""What this package does beside a program is not the program's: where Dynamo breaks a graph it would trace it."""

import types

from torch._C._dynamo import eval_frame

_LEAVE_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def _leave_alone(code):
    eval_frame.set_code_exec_strategy(code, _LEAVE_ALONE)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _leave_alone(constant)


def leave_uncompiled(module):
    """Has no function of a module traced, nor those that they make; what these call is, as before."""
    for function in vars(module).values():
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            _leave_alone(function.__code__)
