"""`kvproof bench harness`: how fast the harness is, what share of the time it takes, whether it grows.

Everything is measured in fresh processes on one thread. The share on a real target is what is left of the
wall time when the calls made to the target (building their tensors and reading answers back included) are
taken out; both come from one run, so the machine's speed cancels.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from kvproof.impl.targets.protocol import Answer, Capabilities, State, Subject, Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.calls import Call
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import InfrastructureError
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.space import space_for

_LEASE_OPS = 10_000
_WARM_OPS = 10_000
_TARGET_OPS = 30_000


@dataclass(frozen=True, slots=True)
class Row:
    """One allocator's figures. share, call_us, other_us: of the real target, per checked op."""

    allocator: str
    null_ops_per_s: float
    share: float
    target_ops_per_s: float
    rss_first_mib: float
    rss_last_mib: float


def run(target: str, ops: int, *, as_json: bool) -> int:
    """Measure and print the table."""
    rows = [_measure(target, allocator, ops) for allocator in ALLOCATORS]
    if as_json:
        print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows]))
        return 0
    print(
        f"| allocator | null target, checked ops/s | {target}, checked ops/s | harness's share |"
        f" memory after 10^4 ops | after {ops:,} ops |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        growth = 100 * (row.rss_last_mib / row.rss_first_mib - 1)
        print(
            f"| {row.allocator} | {row.null_ops_per_s:,.0f} | {row.target_ops_per_s:,.0f} |"
            f" {100 * row.share:.1f} % |"
            f" {row.rss_first_mib:.0f} MiB | {row.rss_last_mib:.0f} MiB ({growth:+.1f} %) |"
        )
    return 0


def _measure(target: str, allocator: str, ops: int) -> Row:
    null = _in_process("null", allocator, ops)
    real = _in_process(target, allocator, _TARGET_OPS)
    return Row(
        allocator,
        null["ops_per_s"],
        1 - real["call_seconds"] / real["seconds"],
        real["ops_per_s"],
        null["rss_first_mib"],
        null["rss_last_mib"],
    )


def _in_process(target: str, allocator: str, ops: int) -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvproof.ci.bench", target, allocator, str(ops)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise InfrastructureError(
            f"the benchmark of {target} failed: {words[-1] if words else done.returncode}"
        )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


class _Timed:
    """A target whose calls are timed: everything that is not the harness's own work."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.name, self.release, self.path = target.name, target.release, target.path
        self.stood_in = target.stood_in
        self.capabilities: Capabilities = target.capabilities
        self.seconds = 0.0

    def build(self, config: Config) -> "_TimedSubject":
        """See `protocol.Target`."""
        started = time.perf_counter()
        subject = self._target.build(config)
        self.seconds += time.perf_counter() - started
        return _TimedSubject(self, subject)

    def other_path(self) -> None:
        """See `protocol.Target`: one path is enough to time."""


class _TimedSubject:
    def __init__(self, timed: _Timed, subject: Subject) -> None:
        self._timed = timed
        self._subject = subject

    def apply(self, call: Call) -> Answer:
        started = time.perf_counter()
        answer = self._subject.apply(call)
        self._timed.seconds += time.perf_counter() - started
        return answer

    def observe(self) -> State:
        started = time.perf_counter()
        state = self._subject.observe()
        self._timed.seconds += time.perf_counter() - started
        return state


def _child(name: str, allocator: str, ops: int) -> dict[str, float]:
    """Run leases in this process until so many ops are checked."""
    import torch

    torch.set_num_threads(1)
    target = load_target(name, Ticket())
    timed = _Timed(target) if name != "null" else None
    space = space_for(target.capabilities, allocator)
    checked = number = 0
    first = 0.0
    started = time.perf_counter()
    while checked < ops:
        verdict = run_lease(timed or target, Lease(number, 0, name, "seeded", space, _LEASE_OPS))
        checked += verdict.tally.checked
        number += 1
        if checked >= _WARM_OPS and not first:
            first = _resident_mib()
    seconds = time.perf_counter() - started
    return {
        "ops_per_s": checked / seconds,
        "seconds": seconds,
        "call_seconds": timed.seconds if timed else 0.0,
        "rss_first_mib": first,
        "rss_last_mib": _resident_mib(),
    }


def _resident_mib() -> float:
    """Peak resident memory so far: what must not grow."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
