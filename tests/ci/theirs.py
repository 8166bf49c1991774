"""A target of somebody else's that does what it is told to: dies in every way, or answers wrongly.

`theirs:FILE` reads from the file, each time it builds, what its calls are to do; so one worker can be told
something else after each test. It answers from the model (`impl.targets.null`) and loads nothing, so a worker
is there in a second.

A *large free* is a `FreeCall` of more than nine slots: most traces have none, and few ops are enough for one.
"""

from __future__ import annotations

import os
from pathlib import Path

LARGE = 9

SOURCE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from kvproof.impl.targets.null import Null, NullSubject
from kvproof.model import calls

KEPT = []

def once(name):
    # Whether this is the first time, in whatever process.
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def die(how, file):
    match how:
        case "segv": os.kill(os.getpid(), signal.SIGSEGV)
        case "string": ctypes.string_at(0)
        case "abort": os.abort()
        case "exit7": print("I am off"); sys.stdout.flush(); os._exit(7)
        case "exit0": os._exit(0)
        case "exit86": os._exit(86)
        case "raise": raise KeyError("a\\nb")
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            while True: pass
        case "sleep": time.sleep(1000)
        case "memory":
            while True: KEPT.append(bytearray(1 << 24)); time.sleep(0.001)
        case "keep": KEPT.append(b"x" * (40 << 20))
        case "slow-once":
            if once(f"{file}.once"): time.sleep(3)
        case "few": pass
        case "mark":
            if once(f"{file}.once"): time.sleep(1)
        case "garbage" | "garbage-once" | "garbage-segv":
            if how != "garbage-once" or once(f"{file}.once"):
                for name in os.listdir("/proc/self/fd"):
                    try:
                        if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                            os.write(int(name), b'{"type":"Gone","sta')
                    except OSError:
                        pass
            if how == "garbage-segv":
                die("segv", file)

class Subject(NullSubject):
    def __init__(self, how, file):
        super().__init__()
        self.how, self.file = how, file

    def apply(self, call):
        if isinstance(call, calls.FreeCall) and len(call.slots) > LARGE:
            if self.how != "faults":
                die(self.how, self.file)
            elif len(call.slots) == 40:
                die("segv", self.file)
        answer = super().apply(call)
        if self.how in ("faults", "few"):
            if isinstance(call, calls.ClearCall):
                answer.available -= 1
            elif isinstance(call, calls.ExtendCall) and call.tokens == 5:
                answer.available += 1
        if self.how == "faults":
            if isinstance(call, calls.DecodeCall) and len(call.seq_lens) == 3 and answer.slots:
                answer.slots = answer.slots[:-1]
            elif isinstance(call, calls.AllocCall) and call.need == 7 and answer.slots:
                answer.slots = [0, *answer.slots[1:]]
        return answer

class Theirs(Null):
    def __init__(self, ticket):
        self.name = self.release = "theirs" + ticket.spec
        self.file = ticket.spec[1:]
        how = Path(self.file).read_text()
        if how == "load-slowly":
            Path(f"{self.file}.loading").touch()
            time.sleep(1)
        elif how.startswith("load-"):
            die(how.removeprefix("load-"), self.file)

    def build(self, config):
        how = Path(self.file).read_text()
        if how == "faults":
            time.sleep(0.001)  # so that there is time for whatever is to come between, on any machine
        if how == "build" and config.need_sort:
            die("segv", self.file)
        return Subject(how, self.file)

    def other_path(self):
        how = Path(self.file).read_text()
        return Other(self) if how.startswith("other-") else None

class Other:
    path = "other"

    def __init__(self, target):
        self.name, self.release, self.stood_in = target.name, target.release, ()
        self.capabilities, self.file = target.capabilities, target.file

    def build(self, config):
        return Subject(Path(self.file).read_text().removeprefix("other-"), self.file)

    def other_path(self):
        return None
""".replace("LARGE", str(LARGE))


def install(folder: Path, how: str) -> tuple[str, dict[str, str]]:
    """The target's name, told to do this, and the environment that has it installed."""
    from tests.ci.local import third_party

    folder.mkdir(exist_ok=True)
    told = folder / "told"
    told.write_text(how)
    return f"theirs:{told}", third_party(folder, SOURCE)


def large_free(call: object) -> bool:
    """Whether the target does there what it was told to."""
    from kvproof.model.calls import FreeCall

    return isinstance(call, FreeCall) and len(call.slots) > LARGE


def kill(pid: int, how: int) -> bool:
    """Send the signal, as somebody from outside. Whether there was such a process."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return False
    return True
