"""Checks on the form of an answer: did it come, is it an answer at all, was memory left alone.

P6 (an exception where an answer was due), P7 and P8 (what guards, audited lane and sanitizer saw), P9
(dtype), P15 (what the call cost), P16 (what a wrapper forwards), P2 (room and refusal).
"""

import traceback
from collections.abc import Callable
from pathlib import Path

from kvproof.model.base import Outcome
from kvproof.properties.step import Finding, Step

_OUTSIDE = frozenset(
    {
        "guard-words",
        "input-changed",
        "output-changed",
        "read-out-of-bounds",
        "write-out-of-bounds",
        "illegal-access",
        "misaligned-access",
        "sanitizer",
    }
)
_UNDEFINED = frozenset({"undefined-lane-used"})
_COST = frozenset({"synchronised", "recompiled", "launches"})
_GAPS = frozenset({"not-forwarded"})


def check_memory(step: Step) -> Finding | None:
    """P7: every access lies inside its tensor."""
    return _damage(step, lambda kind: kind in _OUTSIDE)


def check_defined(step: Step) -> Finding | None:
    """P8: what a masked load has not loaded is used by nobody. Asked behind all others: some kernels do it in
    every call, and it must not hide what they do now and then."""
    return _damage(step, lambda kind: kind in _UNDEFINED)


def check_cost(step: Step) -> Finding | None:
    """P15: no waiting for the device where none is documented, no recompilation, few launches."""
    return _damage(step, lambda kind: kind in _COST)


def check_forwarding(step: Step) -> Finding | None:
    """P16: a wrapper has every public method of what it wraps."""
    return _damage(step, lambda kind: kind in _GAPS)


def check_written_once(step: Step) -> Finding | None:
    """P8: every element of an output is written, once, by one program."""
    elsewhere = _OUTSIDE | _UNDEFINED | _COST | _GAPS
    found = _damage(step, lambda kind: kind not in elsewhere)
    slots, expected = step.answer.slots, step.expectation.slots
    if found is None and slots is not None and expected is not None and len(slots) != len(expected):
        return Finding("wrong-length", f"{len(slots)} slots came back, {len(expected)} were asked for")
    return found


def _damage(step: Step, counts: Callable[[str], bool]) -> Finding | None:
    """The first damage whose kind counts."""
    for damage in (*step.answer.damage, *step.state.damage):
        if counts(damage.kind):
            return Finding(
                f"{damage.kind} {damage.where}", f"{damage.kind} at {damage.where}: {damage.detail}"
            )
    return None


def check_raised(step: Step) -> Finding | None:
    """P6: a lawful call is answered; OOM is `None`, never an exception."""
    error = step.answer.error
    if error is None or step.expectation.outcome is Outcome.REFUSED:
        return None
    name = type(error).__name__
    message = f"raised {name} at {_place(error)}: {str(error) or 'no message'}; expected {_due(step)}"
    return Finding(f"raised {name}", message)


def _place(error: Exception) -> str:
    """File and line of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


def check_dtype(step: Step) -> Finding | None:
    """P9: slots are int64."""
    if step.answer.slots is None or step.answer.dtype == "int64":
        return None
    return Finding("dtype", f"the slots are {step.answer.dtype}; expected int64")


def check_room(step: Step) -> Finding | None:
    """P2: what is free can be had, and what is not cannot."""
    outcome, slots = step.expectation.outcome, step.answer.slots
    if outcome is Outcome.OOM and slots is not None:
        return Finding("answered-when-short", f"{len(slots)} slots came back; expected {_due(step)}")
    if outcome is Outcome.SLOTS and slots is None:
        free = step.expectation.available + len(step.expectation.taken) * step.model.page_size
        return Finding(
            "refused-with-room", f"None came back with {free} slots available; expected {_due(step)}"
        )
    if outcome is Outcome.DONE and slots is not None:
        return Finding("answer-not-due", "slots came back from a call that has no answer")
    return None


def _due(step: Step) -> str:
    if step.expectation.slots is not None:
        return f"{len(step.expectation.slots)} slots"
    return step.expectation.outcome.value
