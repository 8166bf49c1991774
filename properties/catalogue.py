"""The catalogue: every property by its id, what it says, and which checks and relations ask it.

`kvproof properties` prints this table; README's is made from it. The order of the checks is the order of
asking: a broken answer is named by its most telling property, and the first finding names the failure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvproof.properties.checks import answer, buffer, slots, state
from kvproof.properties.step import Finding, Step

Check = Callable[[Step], Finding | None]


@dataclass(frozen=True, slots=True)
class Property:
    """One entry. name: two or three words. statement: one sentence. asked: "step" (after every op),
    "relation" (by running a trace twice, differently), "both", or "later" (allocators not there yet)."""

    id: str
    name: str
    statement: str
    asked: str = "step"


PROPERTIES: Final = (
    Property(
        "P1",
        "single ownership",
        "No slot or page has two live owners; none is twice in free + staged; free and live are disjoint.",
    ),
    Property(
        "P2",
        "conservation",
        "Free + staged + deferred + live are all pages; available_size() says how many are free or staged.",
    ),
    Property("P3", "padding page", "The padding page is never handed out and never enters a free list."),
    Property(
        "P4",
        "row shape",
        "row[j] % page_size == j % page_size, and a page-aligned stretch of a row lies in one page.",
    ),
    Property(
        "P5",
        "last_loc continuity",
        "While the old last page has room, the first new slot is last_loc + 1; otherwise it starts a page.",
    ),
    Property(
        "P6",
        "refusal changes nothing",
        "After None or an error everything is what it was; a lawful call never raises, hangs or crashes.",
    ),
    Property(
        "P7", "no stray access", "No access outside the logical tensors, even when its result is thrown away."
    ),
    Property(
        "P8", "written once", "Every element of an output is written, exactly once, by exactly one program."
    ),
    Property(
        "P9", "range and dtype", "Slots are int64 inside the pool, with no 32-bit wrap up to 2**40 slots."
    ),
    Property("P10", "side mappings", "Live paired slots are mapped, page-injective, and cleared on release."),
    Property(
        "P11",
        "deferred release",
        "A group of frees ends in the state of the frees done at its end; it owns the values it was given.",
    ),
    Property(
        "P12",
        "sound estimates",
        "When the admission estimate says it fits, the allocation succeeds.",
        "later",
    ),
    Property("P13", "watermarks", "committed <= allocated <= row width; nothing is orphaned.", "later"),
    Property(
        "P14", "determinism", "The same trace gives the same slots, and exact targets the contract's.", "both"
    ),
    Property(
        "P15",
        "no hidden cost",
        "Sync-free calls do not synchronise; no length or alignment recompiles; at most 4 launches a call.",
    ),
    Property(
        "P16",
        "equivalent paths",
        "Frees that mean the same do the same; torch path and kernels agree; wrappers forward all.",
        "both",
    ),
    Property(
        "P17",
        "metamorphic",
        "A batch extend equals its rows one by one, and extending by k equals k decodes.",
        "relation",
    ),
)

ANSWER_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("P6", answer.check_raised),
    ("P9", answer.check_dtype),
    ("P2", answer.check_room),
    ("P8", answer.check_written_once),
    ("P14", state.check_bases),
    ("P3", slots.check_padding),
    ("P9", slots.check_range),
    ("P5", slots.check_continuity),
    ("P4", slots.check_shape),
    ("P10", slots.check_peers),
    ("P1", slots.check_single_owner),
    ("P3", buffer.check_buffer_padding),
    ("P9", buffer.check_buffer_range),
    ("P1", buffer.check_buffer),
    ("P4", buffer.check_buffer_shape),
    ("P14", slots.check_exact_slots),
)
"""Asked first, while the model still stands where it predicted; then a legal choice is adopted."""

STATE_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("P6", state.check_refusal),
    ("P3", state.check_lists_padding),
    ("P9", state.check_lists_range),
    ("P1", state.check_lists_single),
    ("P2", state.check_available),
    ("P2", state.check_lists_complete),
    ("P9", state.check_mapping_size),
    ("P10", state.check_mappings),
    ("P2", state.check_sizes),
    ("P14", state.check_lists_order),
    ("P7", answer.check_memory),
    ("P15", answer.check_cost),
    ("P8", answer.check_defined),
    ("P10", state.check_stale),
    ("P16", answer.check_forwarding),
)
"""What is tolerable comes last: it must not hide a wrong answer."""

TOLERABLE: Final = frozenset(
    {
        answer.check_memory,
        answer.check_cost,
        answer.check_defined,
        state.check_stale,
        answer.check_forwarding,
    }
)
"""Checks behind which a trace can go on: a stray read whose result was thrown away, a right answer that was
dear, or right by luck, an entry that nobody relies on yet, a method that is not there."""

BUILT_SO: Final = frozenset({answer.check_forwarding})
"""Checks of what was built, which blame no op."""


def by_id(property_id: str) -> Property:
    """The entry with this id. Raises KeyError for an unknown one."""
    return {entry.id: entry for entry in PROPERTIES}[property_id]
