"""`kvproof bench isolation`: what journal, pipes and supervision cost, and how soon a worker is there again.

The same leases are run in this process, by the plain loop, and by an isolated worker, turn about, so that
what the machine does meanwhile falls on both. Not here: what the harness itself costs (`bench.py`).
"""

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec

from kvproof.ci import wire
from kvproof.ci.campaign import ALLOCATOR_SHARES
from kvproof.ci.isolation import LeaseRun
from kvproof.ci.process import Worker, WorkerDied
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.config import ALLOCATORS
from kvproof.properties.lanes import Lane, lane_for
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.space import space_for

_LEASE_OPS = 4000
_WARM_LEASES = 2


@dataclass(frozen=True, slots=True)
class Throughput:
    """One allocator's figures, or those of a campaign, which gives each its share of leases. ratio: isolated
    to plain ops/s, the median over the rounds; low, high: its range."""

    allocator: str
    plain_ops_per_s: float
    isolated_ops_per_s: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of each round, by the plain loop and isolated, and the ops checked in all of them."""

    plain: list[float]
    isolated: list[float]
    checked: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds until a worker can be asked again, at most of three: its process died, and all of it did."""

    process_s: float
    whole_s: float


def run(target: str, rounds: int, *, device: str, as_json: bool) -> int:
    """Measure and print the table."""
    lane = lane_for("seeded", device=device)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton's first import, as for a worker
    loaded = load_target(target, Ticket("", lane.path, lane.device, lane.audited))
    import torch

    torch.set_num_threads(1)
    with Worker(target, lane) as worker:
        times = {
            allocator: _times(loaded, worker, lane, target, allocator, rounds) for allocator in ALLOCATORS
        }
        restart = _restart(worker)
    rows = [_throughput(allocator, figures) for allocator, figures in times.items()]
    rows.append(_throughput("campaign", _mixed(times)))
    if as_json:
        report = {"throughput": [asdict(row) for row in rows], "restart": asdict(restart)}
        print(msgspec.json.encode(report).decode())
        return 0
    print("| allocator | plain loop, checked ops/s | isolated, checked ops/s | isolated / plain (range) |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.allocator} | {row.plain_ops_per_s:,.0f} | {row.isolated_ops_per_s:,.0f} |"
            f" {100 * row.ratio:.1f} % ({100 * row.low:.1f} to {100 * row.high:.1f} %) |"
        )
    print(
        f"restart: {restart.process_s:.2f} s when a process died, {restart.whole_s:.2f} s with torch's import"
        " and the target's loading"
    )
    return 0


def _times(loaded: Target, worker: Worker, lane: Lane, target: str, allocator: str, rounds: int) -> _Times:
    """The same leases both ways, turn about; the first few only warm both up."""
    space = space_for(loaded.capabilities, allocator)
    believed: set[str] = set()
    plain: list[float] = []
    isolated: list[float] = []
    checked = 0
    for number in range(_WARM_LEASES + rounds):
        lease = Lease(number, 0, target, lane.name, space, _LEASE_OPS)

        def by_the_loop(lease: Lease = lease) -> int:
            return run_lease(loaded, lease).tally.checked

        def by_the_worker(lease: Lease = lease) -> int:
            return LeaseRun(worker, lease, believed, print).run().checked

        one, two = (by_the_loop, by_the_worker) if number % 2 else (by_the_worker, by_the_loop)
        first, done = _timed(one)
        second, again = _timed(two)
        assert done == again
        if number >= _WARM_LEASES:
            checked += done
            plain.append(first if one is by_the_loop else second)
            isolated.append(second if one is by_the_loop else first)
    return _Times(plain, isolated, checked)


def _mixed(times: dict[str, _Times]) -> _Times:
    """As in a campaign: each round has every allocator's lease as often as its share says."""
    shares = [(ALLOCATOR_SHARES[allocator], figures) for allocator, figures in times.items()]
    rounds = range(len(shares[0][1].plain))
    return _Times(
        [sum(share * figures.plain[number] for share, figures in shares) for number in rounds],
        [sum(share * figures.isolated[number] for share, figures in shares) for number in rounds],
        sum(share * figures.checked for share, figures in shares),
    )


def _throughput(name: str, times: _Times) -> Throughput:
    ratios = [mine / theirs for mine, theirs in zip(times.plain, times.isolated, strict=True)]
    return Throughput(
        name,
        times.checked / sum(times.plain),
        times.checked / sum(times.isolated),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def _timed(work: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    done = work()
    return time.perf_counter() - started, done


def _restart(worker: Worker) -> Restart:
    """Kill it and time its return."""
    process = [_revival(worker, whole=False) for _ in range(3)]
    whole = [_revival(worker, whole=True) for _ in range(3)]
    return Restart(max(process), max(whole))


def _revival(worker: Worker, *, whole: bool) -> float:
    os.kill(worker.parent if whole else worker.pid, signal.SIGKILL)
    started = time.perf_counter()
    try:
        worker.ask(wire.RunControls(), wire.ControlsDone)
    except WorkerDied:
        worker.revive()
    return time.perf_counter() - started
