"""Positive controls that end their process: planted crashes, hangs and memory without end, hunted by isolated
workers. What `properties.controls` hunts in its own process would end that.
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Final

from kvproof.ci import wire
from kvproof.ci.isolation import LeaseRun
from kvproof.ci.process import Limits, Seat, Worker
from kvproof.impl.targets.planted.catalogue import DEADLY
from kvproof.impl.targets.planted.plant import Plant
from kvproof.properties.controls import Catch, Control
from kvproof.properties.failure import CRASH, HANG, OUT_OF_MEMORY, Found
from kvproof.properties.lanes import lane_for
from kvproof.properties.lease import Lease
from kvproof.properties.space import space_for

LIMITS: Final = Limits(hang_seconds=5.0, memory_mib=512)
"""Short ones: the plants wait for them, and hang or grow for ever."""

_DIVERGENCE: Final = {"crash": f"{CRASH} SIG", "exit": f"{CRASH} exit", "hang": HANG, "memory": OUT_OF_MEMORY}
_LEASE_OPS: Final = (64, 256, 1024)
_LONGEST_TRACE: Final = 100


def deadly_controls() -> Iterator[Control]:
    """Every deadly plant, as its hunt ends."""
    for plant in DEADLY:
        yield hunt(plant)


def hunt(plant: Plant) -> Control:
    """Look for the fault with a worker to spare: it must end the process, in the way that the plant says."""
    name = f"planted:{plant.id}"
    lane = lane_for("audited" if plant.path == "kernels" else "seeded", device="cpu")
    started = perf_counter()
    spent = 0
    with Worker(name, lane, Seat(limits=LIMITS)) as worker:
        space = space_for(worker.ready.capabilities, plant.allocator, slow=plant.path == "kernels")
        for number, ops in enumerate(_LEASE_OPS):
            lease = Lease(number, 0, name, lane.name, space, ops, _LONGEST_TRACE)
            done = LeaseRun(worker, lease, set(), lambda _why: None).run()
            spent += ops
            if done.found:
                catch = _catch(plant, done.found, spent, perf_counter() - started)
                return Control(name, plant.fault, "caught" if catch.expected else "caught otherwise", catch)
    return Control(name, plant.fault, "missed")


def _catch(plant: Plant, found: list[wire.FoundLine], spent: int, seconds: float) -> Catch:
    """The failure that the plant should cause, else the first."""
    divergence = _DIVERGENCE[plant.deadly]
    meant = [line for line in found if line.failure.divergence.startswith(divergence)]
    line = (meant or found)[0]
    failure, trace = line.failure, wire.trace_of(line.trace)
    expected = bool(meant) and failure.property_id in plant.caught_by
    return Catch(failure.property_id, failure.divergence, spent, seconds, expected, Found(failure, trace))
