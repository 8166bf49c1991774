"""Help for the tests of this folder: a worker without a process, and the real command.

`LocalWorker` answers as `kvproof.ci.worker` does, in this process, which spares the seconds that a process
takes to import torch. Not for lanes with kernels or auditing, which change the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

from kvproof.ci import wire, worker
from kvproof.ci.process import Seat, TellTrace
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.properties.lanes import Lane

COMMAND = (sys.executable, "-c", "from kvproof.ci.cli import main; main()")


class LocalWorker:
    """In place of `kvproof.ci.process.Worker`. made: every one since the list was last cleared."""

    made: ClassVar[list[LocalWorker]] = []

    def __init__(self, target: str, lane: Lane, seat: Seat | None = None) -> None:
        assert not lane.audited
        self.target: Target = load_target(target, Ticket(path=lane.path, device=lane.device))
        self.ready = worker._ready(self.target)
        self.seat = seat or Seat()
        self.pid = self.parent = os.getpid()
        self.forks = True
        self.restarts = 0
        self.asked: list[wire.Request] = []
        self.closed = False
        self.thread = threading.current_thread()
        LocalWorker.made.append(self)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, at_once: bool = False) -> None:
        self.closed = True

    def revive(self) -> None:
        self.restarts += 1

    def ask(
        self,
        request: wire.Request,
        reply_type: type[Any],
        tell: TellTrace | None = None,
        *,
        hang_seconds: float | None = None,
    ) -> Any:
        self.asked.append(request)
        replies: list[wire.Reply] = []

        def say(reply: wire.Reply) -> None:
            # There and back as on the pipe.
            heard = wire.reply_of(wire.to_line(reply))
            if isinstance(heard, wire.TraceDone) and tell is not None:
                tell(heard)
            else:
                replies.append(heard)

        worker.answer(self.target, wire.request_of(wire.to_line(request)), say)
        (reply,) = replies
        if isinstance(reply, wire.Refused):
            raise (UserError if reply.exit_code == 2 else InfrastructureError)(reply.message)
        assert isinstance(reply, reply_type)
        return reply

    def insist(
        self, request: wire.Request, reply_type: type[Any], *, hang_seconds: float | None = None
    ) -> Any:
        return self.ask(request, reply_type, hang_seconds=hang_seconds)


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """The real command, running."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command, run to its end."""
    process = start(*arguments, cwd=cwd, **environment)
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()]


def alive(pid: int) -> bool:
    """Whether there is such a process and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def third_party(folder: Path, source: str) -> dict[str, str]:
    """A distribution of somebody else's with the target `theirs`; the environment that has it installed.

    source: of the module `their_target`, which must define `Theirs`.
    """
    (folder / "their_target.py").write_text(source)
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvproof.targets]\ntheirs = their_target:Theirs\n")
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}
