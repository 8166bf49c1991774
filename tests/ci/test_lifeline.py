"""A lifeline: when the other end of its pipe is gone a process ends, whatever it is doing, and not before.

That workers have one is tested where the command line is killed (test_cli).
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

BUSY = "while True: pass"
UNREAD = "import time; time.sleep(60)"
ORDERLY = "sys.stdin.read(); time.sleep(0.2); sys.exit(7)"


def holding(work: str, grace: float, stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """A process that holds its standard input as a lifeline and then does this work."""
    head = f"import sys, time; from kvproof.ci import lifeline; lifeline.hold(0, {grace})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{head}\nprint('up', flush=True)\n{work}"],
        stdin=stdin,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its status, or None when it is still there after so long."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if process.stdin is not None:
            process.stdin.close()


@pytest.mark.parametrize("work", [BUSY, UNREAD], ids=["busy", "asleep"])
def test_a_process_ends_when_the_other_end_goes(work):
    process = holding(work, 0.1)
    process.stdin.write(b"something nobody has read\n")
    process.stdin.flush()
    time.sleep(0.5)
    assert process.poll() is None  # while it is held, nothing happens
    process.stdin.close()
    assert ended(process, 20) == 3


def test_who_is_idle_leaves_in_an_orderly_way():
    process = holding(ORDERLY, 20)
    process.stdin.close()
    assert ended(process, 10) == 7


def test_no_pipe_is_no_lifeline():
    assert ended(holding(UNREAD, 0, stdin=subprocess.DEVNULL), 0.5) is None
