"""Handlers of signals, and finalizers of what is collected as garbage, run between any two steps of Python's, within a compiled graph's
as well, which is one operator to the runtime: its thread's operators are not looked at then, and those of a handler, which saves what
has been learned, say, are none of it. They are a bystander's. While the runtime runs such a graph again, which the program knows
nothing of, handlers wait until that is over, and nothing is collected.
"""

import atexit
import functools
import gc
import signal

import torch

from . import _intercepted
from ._regions import unseen

_signal, _getsignal = signal.signal, signal.getsignal


def _step_aside():
    """How this thread was before it became a bystander; 0 where it is within no operator, which is nearly always."""
    return unseen(torch.ops.plimsoll.step_aside) if _intercepted.is_within_operator() else 0


def _step_back(before):
    if before:
        unseen(torch.ops.plimsoll.step_back, before)


class _Aside:
    """A handler of the program's, with its thread as a bystander where it is within an operator."""

    def __init__(self, handler):
        self.handler = handler

    def __call__(self, *signalled):
        if signalled and unseen(torch.ops.plimsoll.postpone, signalled[0]):
            return None
        before = 0
        try:
            before = _step_aside()
            return self.handler(*signalled)
        finally:
            _step_back(before)


def _own(handler):
    return handler.handler if isinstance(handler, _Aside) else handler


def _aside(handler):
    return handler if isinstance(handler, (_Aside, signal.Handlers)) or not callable(handler) else _Aside(handler)


@functools.wraps(_signal)
def _signal_aside(signalnum, handler):
    return _own(_signal(signalnum, _aside(handler)))


@functools.wraps(_getsignal)
def _getsignal_own(signalnum):
    return _own(_getsignal(signalnum))


# There is one collection at a time.
_before_collection = 0


def _collect_aside(phase, _):
    global _before_collection
    if phase == "start":
        _before_collection = _step_aside()
    else:
        _step_back(_before_collection)


gc.callbacks.append(_collect_aside)
# What is collected after the end of the program is in nobody's iteration.
atexit.register(gc.callbacks.remove, _collect_aside)
signal.signal, signal.getsignal = _signal_aside, _getsignal_own
for _number in signal.valid_signals():
    _before = _getsignal(_number)
    if _aside(_before) is not _before:
        try:
            _signal(_number, _aside(_before))
        except ValueError:  # by the main thread alone
            break
