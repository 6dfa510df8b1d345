"""Threads that a program starts stand by: what they use is there, though the iteration that evicts it is another thread's."""

import threading

from ._plimsoll import stand_by

_start = threading.Thread.start


def _start_standing_by(thread):
    run, is_its_own = thread.run, "run" in vars(thread)

    def give_back_run():
        # What stands there now would keep its thread alive.
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
