"""Threads that a program starts stand by: what they use is there, though the iteration that evicts it is another thread's. So do
those that run what is to be done when processes have communicated, which libtorch starts.
"""

import functools
import threading

import torch

from ._plimsoll import stand_by

_start = threading.Thread.start


def _start_standing_by(thread):
    run, is_its_own = thread.run, "run" in vars(thread)

    def give_back_run():
        # What stands there now would keep its thread alive. Where the start is interrupted, two may come to this.
        if vars(thread).get("run") is stand_by_and_run:
            del thread.run
            if is_its_own:
                thread.run = run

    def stand_by_and_run():
        give_back_run()
        stand_by()
        run()

    thread.run = stand_by_and_run
    try:
        _start(thread)
    except BaseException:
        give_back_run()
        raise


threading.Thread.start = _start_standing_by


def _calls_standing_by(register):
    def register_standing_by(future, callback, /):
        if not callable(callback):
            return register(future, callback)

        here = threading.get_ident()

        @functools.wraps(callback, updated=())
        def stand_by_and_call(done):
            # This thread calls it where all is done already.
            if threading.get_ident() != here:
                stand_by()
            return callback(done)

        return register(future, stand_by_and_call)

    return register_standing_by


for _name in ("then", "add_done_callback"):
    setattr(torch._C.Future, _name, _calls_standing_by(getattr(torch._C.Future, _name)))
