"""A worker's lifeline: the pipe that its requests come by. Nobody at the other end, no worker.

A command line that is killed (SIGKILL, out of memory) can end nobody. An idle worker then reads the end of
its input and goes; a busy one would work on for minutes, and one that hangs for ever. Linux's death signal
(PR_SET_PDEATHSIG) is not used: it comes when the *thread* that started the process ends, and a campaign's
threads end before its workers do. Not covered: a call that never lets another thread run, and processes that
a target has started itself.
"""

import os
import select
import threading
import time
from typing import Final

GRACE_SECONDS: Final = 2.0
"""For a worker that is idle to see the end of its input, and to leave in an orderly way."""

_STATUS: Final = 3


def hold(pipe: int, grace: float = GRACE_SECONDS) -> None:
    """From now on, end this process, busy or not, so many seconds after the last writer of the pipe is gone.

    pipe: the file descriptor of its reading end; nothing is read from it. Of a file there is no last writer.
    """
    threading.Thread(target=_wait, args=(pipe, grace), name="lifeline", daemon=True).start()


def _wait(pipe: int, grace: float) -> None:
    line = select.poll()
    line.register(pipe, 0)  # a hang-up is told unasked
    line.poll()
    time.sleep(grace)
    os._exit(_STATUS)
