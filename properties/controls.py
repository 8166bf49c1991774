"""Positive controls: hunts for planted faults. The harness must find them, or its silence means nothing.

A hunt draws leases from seed 0 with the same generator as every campaign, which knows nothing of the fault,
until a failure names one of the properties that the plant may break. Beside the plants stand the canary,
which must fail on its first call, and copies without a fault, which must not fail at all.

Not covered: targets that are not ours. The faults' texts are `kvproof.impl.targets.planted`'s business.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal

from kvproof.impl.targets.instruments import interpreter_on
from kvproof.impl.targets.planted.catalogue import PLANTS
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.planted.target import UNCHANGED, Canary, Planted, plant_named
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.model.config import ALLOCATORS
from kvproof.properties.failure import Found
from kvproof.properties.lease import Lease, Verdict, run_lease
from kvproof.properties.space import space_for

QUICK: Final = ("padding-page-free", "pages-not-taken", "free-repeats")
"""The plants of `quick_controls`: all on the torch path, which runs everywhere."""

HUNT_OPS: Final = {"torch": 20_000, "kernels": 10_000}
"""The budget of one hunt by path, in ops drawn. Caught or not is known after that many."""

CLEAN_OPS: Final = {"torch": 2_000, "kernels": 300}
"""The same for a copy without a fault, which costs all of it, for every kind of allocator."""

_FIRST_LEASE_OPS: Final = 64
_LONGEST_TRACE: Final = 300

Outcome = Literal["caught", "caught otherwise", "missed", "clean", "not clean", "cannot run here"]


@dataclass(frozen=True, slots=True)
class Catch:
    """What a hunt found. property_id, divergence: of the failure. ops: drawn up to the end of the lease that
    found it. seconds: of this process. expected: whether the plant names the property; where none of its
    failures did, this is the first of them. found: the failure and its trace."""

    property_id: str
    divergence: str
    ops: int
    seconds: float
    expected: bool
    found: Found


@dataclass(frozen=True, slots=True)
class Control:
    """One control and what came of it. name: of the target. what: one sentence. catch: None when nothing was
    found. "cannot run here" is neither success nor failure, and must be counted and shown."""

    name: str
    what: str
    outcome: Outcome
    catch: Catch | None = None

    @property
    def passed(self) -> bool:
        """Whether the harness did on this control what it should."""
        return self.outcome in ("caught", "caught otherwise", "clean")


def hunt(plant: Plant, *, ops: int | None = None) -> Catch | None:
    """Look for the fault on a fresh copy; None when `ops` ops (HUNT_OPS when None) show nothing.

    Deterministic, but for the seconds. Raises UserError for a kernel plant where Triton does not interpret.
    """
    target = Planted(Ticket(f":{plant.id}", plant.path))
    expected = frozenset(plant.caught_by)
    budget = HUNT_OPS[plant.path] if ops is None else ops
    return _hunt(target, plant.allocator, expected, misuse=plant.misuse, ops=budget)


def quick_controls() -> list[Control]:
    """The canary and a few plants: what every campaign runs before anything else."""
    return [_canary("paged", misuse=False), *(_plant(plant_named(plant_id)) for plant_id in QUICK)]


def all_controls() -> Iterator[Control]:
    """Every control, as it ends: the canary, the copies without a fault, all plants.

    Kernels are hunted in the audited lane, which needs TRITON_INTERPRET=1 from the start of the process.
    """
    for allocator in ALLOCATORS:
        for misuse in (False, True):
            yield _canary(allocator, misuse=misuse)
    # Auditing cannot be switched off again, and makes the torch path slower: kernels come last.
    for path in ("torch", "kernels"):
        for allocator in ALLOCATORS:
            for misuse in (False, True):
                yield _clean(path, allocator, misuse=misuse)
        for plant in PLANTS:
            if plant.path == path:
                yield _plant(plant)


def _plant(plant: Plant) -> Control:
    name = f"planted:{plant.id}"
    if not _can_run(plant.path):
        return Control(name, plant.fault, "cannot run here")
    catch = hunt(plant)
    if catch is None:
        return Control(name, plant.fault, "missed")
    return Control(name, plant.fault, "caught" if catch.expected else "caught otherwise", catch)


def _canary(allocator: str, *, misuse: bool) -> Control:
    what = f"Every {'forbidden call' if misuse else 'call'} fails on the canary ({allocator})."
    target = Canary(Ticket())
    space = space_for(target.capabilities, allocator, misuse=misuse)
    started = perf_counter()
    verdict = run_lease(target, Lease(0, 0, target.name, "seeded", space, _FIRST_LEASE_OPS))
    catches = _catches(verdict, frozenset({"P2", "P6"}), _FIRST_LEASE_OPS, started)
    all_failed = 0 < verdict.tally.checked == sum(verdict.seen.values())
    return Control(target.name, what, "caught" if all_failed else "missed", next(catches, None))


def _clean(path: str, allocator: str, *, misuse: bool) -> Control:
    lane = f"{path}, {allocator}{', misuse' if misuse else ''}"
    name, what = f"planted:{UNCHANGED}", f"A copy without a fault does not fail ({lane})."
    if not _can_run(path):
        return Control(name, what, "cannot run here")
    target = Planted(Ticket(f":{UNCHANGED}", path))
    catch = _hunt(target, allocator, frozenset(), misuse=misuse, ops=CLEAN_OPS[path])
    return Control(name, what, "clean" if catch is None else "not clean", catch)


def _can_run(path: str) -> bool:
    return path == "torch" or interpreter_on()


def _hunt(
    target: Target, allocator: str, expected: frozenset[str], *, misuse: bool, ops: int
) -> Catch | None:
    """The first failure by an expected property, else the first failure, else None.

    Leases grow, each twice as long as the one before: what shows at once is found at once, and what takes a
    long trace has its chance. With nothing expected the first failure ends the hunt.
    """
    kernels = target.path == "kernels"
    lane = "audited" if kernels else "seeded"
    space = space_for(target.capabilities, allocator, misuse=misuse, slow=kernels)
    started = perf_counter()
    other: Catch | None = None
    spent = number = 0
    while spent < ops:
        budget = min(_FIRST_LEASE_OPS << number, ops - spent)
        verdict = run_lease(target, Lease(number, 0, target.name, lane, space, budget, _LONGEST_TRACE))
        spent += budget
        number += 1
        for catch in _catches(verdict, expected, spent, started):
            if catch.expected or not expected:
                return catch
            other = other or catch
    return other


def _catches(verdict: Verdict, expected: frozenset[str], spent: int, started: float) -> Iterator[Catch]:
    """The verdict's failures as catches, in the order in which they were found."""
    seconds = perf_counter() - started
    for found in verdict.found.values():
        property_id = found.failure.property_id
        divergence, meant = found.failure.divergence, property_id in expected
        yield Catch(property_id, divergence, spent, seconds, meant, found)
