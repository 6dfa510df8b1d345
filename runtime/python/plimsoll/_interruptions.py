"""Handlers of signals, and finalizers of what is collected as garbage, run between any two steps of Python's, within a compiled graph's
as well, which is one operator to the runtime: its thread's operators are not looked at then, and those of a handler, which saves what
has been learned, say, are none of it. They are a bystander's. While the runtime runs such a graph again, which the program knows
nothing of, handlers wait until that is over, and nothing is collected.
"""

import atexit
import functools
import gc
import signal

from ._plimsoll import collect_aside, postpone, step_aside, step_back, times_aside

_signal, _getsignal = signal.signal, signal.getsignal


class _Aside:
    """A handler of the program's, with its thread as a bystander where it is within an operator."""

    def __init__(self, handler):
        self.handler = handler

    def __call__(self, *signalled):
        if signalled and postpone(signalled[0]):
            return None
        times = times_aside()
        try:
            step_aside()
            return self.handler(*signalled)
        finally:
            step_back(times)


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


gc.callbacks.append(collect_aside)
# What is collected after the end of the program is in nobody's iteration.
atexit.register(gc.callbacks.remove, collect_aside)
signal.signal, signal.getsignal = _signal_aside, _getsignal_own
for _number in signal.valid_signals():
    _before = _getsignal(_number)
    if _aside(_before) is not _before:
        try:
            _signal(_number, _aside(_before))
        except ValueError:  # by the main thread alone
            break
