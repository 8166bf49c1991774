"""Replaying: does this trace still fail on this target, and does it fail every time?"""

from typing import NamedTuple

from kvproof.impl.targets.protocol import Target
from kvproof.model.errors import UserError
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.relations import RELATIONS, check_paths, check_relation
from kvproof.properties.run import Result, run_trace
from kvproof.properties.shrink import Shrinker


def is_relation(op: str) -> bool:
    """Whether a failure's op names a relation (two runs) and not a step: ops are spelt CamelCase."""
    return op[:1].islower()


def replay(target: Target, trace: Trace, *, relations: bool = True, misuse_fails: bool = True) -> Result:
    """Run the trace, looking after every op; when it passes, ask every relation as well.

    What fails in a varied trace only is that trace's failure and not this one's.
    """
    result = run_trace(target, trace, misuse_fails=misuse_fails, record=True)
    if relations and not result.serious and not result.tally.accepted:
        asked = [check_relation(target, trace, result, relation) for relation in RELATIONS]
        asked.append(check_paths(target, trace, result))
        result.failures.extend(found.failure for found in asked if found is not None and found.trace is trace)
    return result


def attempt(target: Target, trace: Trace, failure: Failure) -> Result:
    """Run a trace in the way in which this failure was found."""
    return replay(target, trace, relations=is_relation(failure.op), misuse_fails=is_misuse(failure))


def find(target: Target, trace: Trace, failure: Failure) -> Failure | None:
    """The failure with the same fingerprint when the trace is run again, or None."""
    return attempt(target, trace, failure).get(failure.fingerprint)


def is_misuse(failure: Failure) -> bool:
    """Whether the failure is a misuse that was taken."""
    return failure.op == "Misuse"


class Shrunk(NamedTuple):
    """What shrinking came to. trace: the smallest found, in `runs` runs. lost: some candidate took the device
    with it; nothing was tried behind it, and no process but another can shrink this trace."""

    trace: Trace
    runs: int
    lost: bool = False


def shrink(target: Target, trace: Trace, failure: Failure, *, most_runs: int = 4000) -> Shrunk:
    """The smallest trace with the same fingerprint."""
    lost = False

    def reproduce(candidate: Trace) -> int | None:
        nonlocal lost
        if lost:
            return None
        try:
            result = attempt(target, candidate, failure)
        except UserError:  # a config that this target cannot be built with
            return None
        lost = result.lost
        again = result.get(failure.fingerprint)
        return None if again is None else again.step

    shrinker = Shrinker(reproduce, trace, most_runs=most_runs)
    return Shrunk(shrinker.shrink(), shrinker.runs, lost)
