"""A worker: one loaded target, requests on standard input, replies on standard output.

Started as `python -m kvproof.ci.worker` by `process.py`, which sets Triton's environment first. It loads the
target and then forks: the child serves, the parent waits for it, tells how it ended, and forks another when
asked to, in milliseconds, with torch and the target loaded. So a call that kills its process costs a fork and
not a start. Where CUDA was touched while the target was loaded a fork cannot use it, and the process serves
itself.

Whatever a target prints goes to standard error, so that it cannot garble a reply. Not here: noticing that a
process hangs or eats up memory, and what becomes of the lease (`process.py`, `isolation.py`).
"""

import contextlib
import ctypes
import dataclasses
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from kvproof.ci import lifeline, wire
from kvproof.ci.journal import Journal
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.errors import KvproofError, UserError
from kvproof.properties import replay, witness
from kvproof.properties.hypothesis_lane import run_hypothesis_lease
from kvproof.properties.lease import Verdict, run_lease
from kvproof.properties.pagemap import page_maps
from kvproof.properties.record import record

_BAD_FORK: Final = 86
"""Exit status of a child that cannot use CUDA because its parent has touched it."""

_PR_SET_PDEATHSIG: Final = 1
_GC_THRESHOLD: Final = 20_000

Say = Callable[[wire.Reply], None]


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command line's to handle
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lifeline.hold(sys.stdin.fileno())

    def say(reply: wire.Reply) -> None:
        _send(replies, reply)

    loaded = _loaded(say)
    if loaded is not None:
        target, setup = loaded
        # What loading left is there for good: no collection has to walk through it, nor a fork to copy it.
        gc.collect()
        gc.freeze()
        # Ops and answers are many and short-lived, and hold no cycles worth looking for every 700 of them.
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        if setup.sanitizer_log or not _serve_in_children(target, setup, say):
            say(wire.Born(os.getpid(), forks=False))
            _serve_all(target, say)
    return 0


def _loaded(say: Say) -> tuple[Target, wire.Setup] | None:
    """The target, once somebody has asked for one that can be had."""
    for line in sys.stdin.buffer:
        try:
            setup = wire.request_of(line)
            if not isinstance(setup, wire.Setup):
                say(wire.Refused("the first request must be Setup", 3))
                continue
            target = _load(setup)
        except KvproofError as error:
            say(wire.Refused(str(error), error.exit_code))
        except msgspec.MsgspecError as error:
            say(wire.Refused(f"not a request: {error}", 3))
        else:
            say(_ready(target))
            return target, setup
    return None


def _send(replies: BinaryIO, reply: wire.Reply) -> None:
    # A process may end in the middle of a reply: what follows it there begins a line of its own.
    replies.write(b"\n" * isinstance(reply, wire.Gone) + wire.to_line(reply))
    replies.flush()


def _load(setup: wire.Setup) -> Target:
    # Before the target: its constructor may run calls of its own.
    witness.install(Journal(Path(setup.journal)))
    ticket = Ticket(
        "",
        setup.path,
        setup.device,
        setup.audited,
        fence=setup.fence,
        sanitizer=setup.sanitizer,
        sanitizer_log=setup.sanitizer_log,
        allocators=setup.allocators,
    )
    target = load_target(setup.target, ticket)
    if "torch" in sys.modules:
        import torch

        # Calls are small; threads would only fight over the cores that other workers use.
        torch.set_num_threads(1)
    return target


def _ready(target: Target) -> wire.Ready:
    return wire.Ready(target.name, target.release, target.path, target.capabilities, target.stood_in)


# --- children ----------------------------------------------------------------------------------------


def _serve_in_children(target: Target, setup: wire.Setup, say: Say) -> bool:
    """Serve from forked processes, one after the other. False when they could not use the device."""
    while True:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads in the parent: the lifeline and idle thread pools, which hold no locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            ear, word = os.pipe()
            child = os.fork()
        if not child:
            os._exit(_child(target, setup, say, parent, word))
        os.close(word)
        _, status = os.waitpid(child, 0)
        born = _has_spoken(ear)
        # Once it has served, the same status is the target's own doing.
        if not born and os.WIFEXITED(status) and os.WEXITSTATUS(status) == _BAD_FORK:
            return False
        try:
            say(wire.Gone(os.waitstatus_to_exitcode(status)))
        except OSError:
            return True
        if not _revived():
            return True


def _revived() -> bool:
    """Wait to be asked for another process. False when nobody will. What was meant for the dead one is
    dropped: who sent it hears that it is gone."""
    for line in sys.stdin.buffer:
        with contextlib.suppress(msgspec.MsgspecError):
            if isinstance(wire.request_of(line), wire.Revive):
                return True
    return False


def _has_spoken(ear: int) -> bool:
    """Whether the child has said that it serves. Closes the pipe."""
    os.set_blocking(ear, False)  # what the child has started may still hold the other end
    try:
        return bool(os.read(ear, 1))
    except BlockingIOError:
        return False
    finally:
        os.close(ear)


def _child(target: Target, setup: wire.Setup, say: Say, parent: int, word: int) -> int:
    """The life of a serving process; its exit status. It ends with its parent, whose lifeline is its own.
    word: a pipe to the parent, for one byte once it serves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    try:
        if setup.device != "cpu":
            import torch

            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
            except RuntimeError:
                return _BAD_FORK
        os.write(word, b"!")
        os.close(word)
        say(wire.Born(os.getpid(), forks=True))
        _serve_all(target, say)
        return 0
    except BrokenPipeError:
        return 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stderr.flush()


# --- requests ----------------------------------------------------------------------------------------


def _serve_all(target: Target, say: Say) -> None:
    """Answer requests until there are no more, or until the device is lost to this process."""
    for line in sys.stdin.buffer:
        try:
            lost = answer(target, wire.request_of(line), say)
        except KvproofError as error:
            lost = False
            say(wire.Refused(str(error), error.exit_code))
        except msgspec.MsgspecError as error:
            lost = False
            say(wire.Refused(f"not a request: {error}", 3))
        if lost:
            return


def answer(target: Target, request: wire.Request, say: Say) -> bool:
    """Answer one request. Whether the device was lost on it, after which this process can answer no other."""
    match request:
        case wire.RunLease():
            return _run_lease(target, request, say)
        case wire.Confirm():
            confirmed = _confirm(target, request)
            say(confirmed)
            return confirmed.lost
        case wire.Replay():
            replayed = _replay(target, request)
            say(replayed)
            return replayed.lost
        case wire.Script():
            say(_script(target, request))
        case wire.RunControls():
            say(_controls())
        case wire.Setup() | wire.Revive():
            say(wire.Refused("a worker serves one target, and is revived when it is gone", 3))
    return False


def _run_lease(target: Target, request: wire.RunLease, say: Say) -> bool:
    def tell(part: Verdict, left: int) -> None:
        say(wire.TraceDone(wire.lease_done(part), left, part.lost))

    lease = request.lease
    if lease.lane == "hypothesis":
        verdict = run_hypothesis_lease(target, lease, tell=tell)
    else:
        verdict = run_lease(target, lease, first=request.first, left=request.left, tell=tell)
    say(wire.LeaseEnd())
    return verdict.lost


def _confirm(target: Target, request: wire.Confirm) -> wire.Confirmed:
    trace, failure = wire.trace_of(request.trace), request.failure
    lost = wire.Confirmed(0, request.times, request.trace, lost=True)
    again = []
    for _ in range(request.times):
        result = replay.attempt(target, trace, failure)
        if result.lost:
            return lost
        again.append(result.get(failure.fingerprint))
    failed = sum(found is not None for found in again)
    if not failed:
        return wire.Confirmed(0, request.times, request.trace)
    small, runs, was_lost = replay.shrink(target, trace, failure, most_runs=request.most_runs)
    if was_lost:
        return lost
    finds = [replay.find(target, small, failure) for _ in range(request.times)]
    last = next((found for found in finds if found is not None), failure)
    failed_small = sum(found is not None for found in finds)
    maps = page_maps(target, small, last)
    return wire.Confirmed(failed, request.times, wire.text_of(small), last, maps, runs, failed_small)


def _replay(target: Target, request: wire.Replay) -> wire.Replayed:
    trace, seek = wire.trace_of(request.trace), request.seek
    results = []
    for _ in range(request.times):
        results.append(replay.replay(target, trace) if seek is None else replay.attempt(target, trace, seek))
        if results[-1].lost:
            break
    failures = [result.failures for result in results]
    first = next((run[0] for run in failures if run), None)
    lost = results[-1].lost
    maps = None if first is None or lost or seek is not None else page_maps(target, trace, first)
    tally = results[-1].tally
    return wire.Replayed(failures, maps, tally.accepted, dict(tally.skipped), tally.checked, lost)


def _script(target: Target, request: wire.Script) -> wire.Reply:
    # Only here: no other request needs to know how a release is spelt.
    from kvproof.ci.script import refuse_unless_scriptable, script
    from kvproof.impl.targets.sglang.load import load
    from kvproof.impl.targets.sglang.spelling import spell

    trace = wire.trace_of(request.trace)
    result = replay.replay(target, trace)
    fingerprint, property_id = request.prefer
    same = [failure for failure in result.failures if failure.property_id == property_id]
    failure = result.get(fingerprint) or next(iter((*same, *result.serious, *result.failures)), None)
    if failure is None:
        raise UserError(f"the trace passes on {target.name}: there is no fault for a script to show")
    refuse_unless_scriptable(failure)
    kernels = target.path == "kernels"
    cut = dataclasses.replace(trace, ops=trace.ops[: failure.step + 1])
    records = record(target, cut)
    spelling = spell(load(target.name), trace.config, kernels)
    text = script(failure, trace.config, records, spelling, request.device, kernels=kernels)
    return wire.Scripted(text, failure)


def _controls() -> wire.Reply:
    # Only here: it imports torch, and a worker whose target does without it is there in a fifth of the time.
    from kvproof.properties import controls

    done = controls.quick_controls()
    caught = tuple(control.name for control in done if control.passed)
    return wire.ControlsDone(caught, tuple(control.name for control in done if not control.passed))


if __name__ == "__main__":
    sys.exit(main())
