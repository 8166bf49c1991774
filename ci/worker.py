"""A worker: one process, one loaded target, requests on standard input, replies on standard output.

Started as `python -m kvproof.ci.worker` by `process.py`, which sets Triton's environment first. Whatever a
target prints goes to standard error, so that it cannot garble a reply. Not here: what happens when a worker
dies or hangs.
"""

import os
import signal
import sys
from typing import BinaryIO

import msgspec

from kvproof.ci import lifeline, wire
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.errors import KvproofError
from kvproof.properties import controls, replay
from kvproof.properties.hypothesis_lane import run_hypothesis_lease
from kvproof.properties.lease import run_lease
from kvproof.properties.pagemap import page_maps


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command line's to handle
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lifeline.hold(sys.stdin.fileno())
    target: Target | None = None
    for line in sys.stdin.buffer:
        try:
            request = wire.request_of(line)
            if target is None and isinstance(request, wire.Setup):
                target = _load(request)
                reply: wire.Reply = _ready(target)
            elif target is None:
                reply = wire.Refused("the first request must be Setup", 3)
            else:
                reply = _serve(target, request)
        except KvproofError as error:
            reply = wire.Refused(str(error), error.exit_code)
        except msgspec.MsgspecError as error:
            reply = wire.Refused(f"not a request: {error}", 3)
        _send(replies, reply)
        if isinstance(reply, wire.LeaseDone | wire.Confirmed | wire.Replayed) and reply.lost:
            return 0  # the device is lost to this process; whoever asks next needs another
    return 0


def _send(replies: BinaryIO, reply: wire.Reply) -> None:
    replies.write(wire.to_line(reply))
    replies.flush()


def _load(setup: wire.Setup) -> Target:
    import torch

    # Calls are small; threads would only fight over the cores that other workers use.
    torch.set_num_threads(1)
    return load_target(setup.target, Ticket("", setup.path, setup.device, setup.audited))


def _ready(target: Target) -> wire.Ready:
    return wire.Ready(target.name, target.release, target.path, target.capabilities, target.stood_in)


def _serve(target: Target, request: wire.Request) -> wire.Reply:
    match request:
        case wire.RunLease(lease):
            run = run_hypothesis_lease if lease.lane == "hypothesis" else run_lease
            return wire.lease_done(run(target, lease))
        case wire.Confirm():
            return _confirm(target, request)
        case wire.Replay():
            return _replay(target, request)
        case wire.RunControls():
            return _controls()
        case wire.Setup():
            return wire.Refused("a worker serves one target", 3)


def _confirm(target: Target, request: wire.Confirm) -> wire.Reply:
    trace, failure = wire.trace_of(request.trace), request.failure
    if failure.lost:
        result = replay.replay(target, trace, relations=False, misuse_fails=False)
        found = result.get(failure.fingerprint)
        failed = int(found is not None)
        return wire.Confirmed(failed, 1, request.trace, found, failed_small=failed, lost=result.lost)
    again = [replay.find(target, trace, failure) for _ in range(request.times)]
    failed = sum(found is not None for found in again)
    if not failed:
        return wire.Confirmed(0, request.times, request.trace)
    small, runs = trace, 0
    if request.most_runs:
        avoid = [wire.trace_of(text) for text in request.avoid]
        small, runs, lost_by = replay.shrink(target, trace, failure, most_runs=request.most_runs, avoid=avoid)
        if lost_by is not None:
            text, by = wire.text_of(small), wire.text_of(lost_by)
            return wire.Confirmed(failed, request.times, text, failure, runs=runs, lost=True, lost_by=by)
    finds = [replay.find(target, small, failure) for _ in range(request.times)]
    last = next((found for found in finds if found is not None), failure)
    failed_small = sum(found is not None for found in finds)
    maps = page_maps(target, small, last)
    return wire.Confirmed(failed, request.times, wire.text_of(small), last, maps, runs, failed_small)


def _replay(target: Target, request: wire.Replay) -> wire.Reply:
    trace = wire.trace_of(request.trace)
    results = []
    for _ in range(request.times):
        results.append(replay.replay(target, trace))
        if results[-1].lost:
            return wire.Replayed([results[-1].failures], None, {}, {}, results[-1].tally.checked, lost=True)
    failures = [result.failures for result in results]
    first = next((run[0] for run in failures if run), None)
    maps = None if first is None else page_maps(target, trace, first)
    tally = results[-1].tally
    return wire.Replayed(failures, maps, tally.accepted, dict(tally.skipped), tally.checked)


def _controls() -> wire.Reply:
    done = controls.quick_controls()
    caught = tuple(control.name for control in done if control.passed)
    return wire.ControlsDone(caught, tuple(control.name for control in done if not control.passed))


if __name__ == "__main__":
    sys.exit(main())
