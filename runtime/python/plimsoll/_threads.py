"""Threads that a program starts stand by: what they use is there, though the iteration that evicts it is another thread's."""

import threading

from ._plimsoll import stand_by

_start = threading.Thread.start


def _start_standing_by(thread):
    run = thread.run

    def stand_by_and_run():
        # It would keep its thread alive.
        thread.__dict__.pop("run", None)
        stand_by()
        run()

    thread.run = stand_by_and_run
    try:
        _start(thread)
    except BaseException:
        thread.__dict__.pop("run", None)
        raise


threading.Thread.start = _start_standing_by
