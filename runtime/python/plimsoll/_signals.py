"""Handlers of signals run between any two steps of Python's, within a compiled graph's as well, which is one operator to the runtime:
its thread's operators are not looked at then, and those of a handler, which saves what has been learned, say, are none of it. They
are a bystander's.
"""

import signal
import types

import torch

from ._regions import unseen

_signal, _getsignal = signal.signal, signal.getsignal


class _Aside:
    """A handler of the program's, with its thread as a bystander where it is within an operator."""

    def __init__(self, handler):
        self.handler = handler

    def __call__(self, *signalled):
        before = 0
        try:
            before = unseen(torch.ops.plimsoll.step_aside)
            return self.handler(*signalled)
        finally:
            unseen(torch.ops.plimsoll.step_back, before)


def _own(handler):
    return handler.handler if isinstance(handler, _Aside) else handler


def _aside(handler):
    # Python's own uses no tensors.
    is_program = callable(handler) and not isinstance(handler, (types.BuiltinFunctionType, _Aside, signal.Handlers))
    return _Aside(handler) if is_program else handler


def _signal_aside(number, handler):
    return _own(_signal(number, _aside(handler)))


def _getsignal_own(number):
    return _own(_getsignal(number))


signal.signal, signal.getsignal = _signal_aside, _getsignal_own
for _number in signal.valid_signals():
    _before = _getsignal(_number)
    if _aside(_before) is not _before:
        try:
            _signal(_number, _aside(_before))
        except ValueError:  # by the main thread alone
            break
