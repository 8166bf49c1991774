"""Marks: model events worth reaching.

A campaign whose budget should have reached a mark and did not is not green: a generator that never exhausts
the pool proves nothing about refusal. `reachable` says which allocators can reach which mark.
"""

from enum import StrEnum
from typing import Final

WIDE_ROWS: Final = 256
LONG_TOKENS: Final = 1024
"""Beyond these a kernel is likely to need more than one block of rows, or of one row's tokens."""


class Mark(StrEnum):
    """One event, named for people. The model counts each while it applies ops."""

    EXACT_EXHAUSTION = "the last free page is handed out"
    ONE_SHORT = "a call needs one page more than there is"
    REFUSAL = "a call is refused"
    EMPTY_BATCH = "a batch has no rows"
    ZERO_ROW = "a row of a batch grows by nothing"
    INSIDE_PAGE = "an extend stays inside the row's old page"
    OLD_PAGE_FILLED = "an extend fills the row's old page exactly"
    THREE_PARTS = "an extend fills the old page, takes whole pages and starts one"
    WHOLE_PAGES = "an extend takes whole pages and nothing else"
    DECODE_INSIDE_PAGE = "a decode step goes on in the old page"
    DECODE_NEW_PAGE = "a decode step starts a page"
    DECODE_MIXED = "one decode batch does both"
    WIDE_EXTEND = "an extend batch has more than 256 rows"
    WIDE_DECODE = "a decode batch has more than 256 rows"
    LONG_ROW = "a row grows by more than 1024 tokens at once"
    RECYCLED = "a released page is handed out again"
    TAIL_FREE = "a row's tail is freed and the rest lives on"
    PARTLY_USED_PAGE_FREE = "a page that was only partly used is freed"
    MANY_ROW_FREE = "one free releases several rows"
    STAGED_MERGE = "staged pages are merged into the free list"
    REFUSAL_AFTER_MERGE = "a call is refused although staged pages were merged"
    FREE_IN_GROUP = "a free is deferred by a group"
    GROUP_OF_BOTH = "a group holds both slots and page ids"
    ALLOC_IN_GROUP = "a call allocates while frees are deferred"
    CLOBBER_DEFERRED = "a tensor is overwritten while its free is deferred"
    CLEAR_IN_GROUP = "clear drops a group that holds frees"
    GROWN = "a resize makes the pool larger"
    SHRUNK = "a resize makes the pool smaller"
    BEYOND_31_BITS = "a slot does not fit in 31 bits"
    SHORT_ON_MAIN = "a call is refused for the main side alone"
    SHORT_ON_SIDE = "a call is refused for a second side alone"
    SIDE_EXHAUSTED = "the last free page of a second side is handed out"
    RECYCLED_ON_SIDE = "a released page of a second side is handed out again"
    FREED_ON_SIDE = "a second side of a live row is released alone"
    PART_OF_PAGE = "a sliding-window free touches part of a page"
    FULL_ALONE = "full slots without peers are freed"
    TAIL_ONLY = "an extend gives peers to its tail alone"
    NO_TAIL = "an extend gives peers to nothing"
    REMAPPED = "a row takes over another's peers"
    REMAP_IN_GROUP = "a row takes over peers while peers are held by a group"
    LOGICAL_ONLY = "an extend takes logical pages alone"
    BUFFER_SURPLUS = "a device buffer leaves pages over"
    BUFFER_COMPLETED = "a device buffer completes a partial page"
    BUFFER_GROWN = "a device buffer takes pages beside the row's own"
    BUFFER_REFUSED = "a device buffer is refused"
    SERVED_FROM_ASIDE = "a slot that was set aside is handed out"
    ASIDE_RETURNED = "slots that were set aside go back"
    ASIDE_REFUSED = "more slots are to be set aside than there are"
    ASIDE_TWICE = "slots are set aside while some are"
    BASE_DRAWN = "a rotation base is drawn"
    BASE_TIED = "a rotation base is drawn where classes tie"
    CLASS_SHORT = "a call is refused for one class alone"


_PAGED: Final = frozenset(
    {
        Mark.EMPTY_BATCH,
        Mark.ZERO_ROW,
        Mark.INSIDE_PAGE,
        Mark.OLD_PAGE_FILLED,
        Mark.THREE_PARTS,
        Mark.WHOLE_PAGES,
        Mark.DECODE_INSIDE_PAGE,
        Mark.DECODE_NEW_PAGE,
        Mark.DECODE_MIXED,
        Mark.WIDE_EXTEND,
        Mark.WIDE_DECODE,
        Mark.LONG_ROW,
        Mark.PARTLY_USED_PAGE_FREE,
    }
)
_TOKEN: Final = frozenset(
    {
        Mark.EXACT_EXHAUSTION,
        Mark.ONE_SHORT,
        Mark.REFUSAL,
        Mark.RECYCLED,
        Mark.TAIL_FREE,
        Mark.MANY_ROW_FREE,
        Mark.STAGED_MERGE,
        Mark.REFUSAL_AFTER_MERGE,
        Mark.FREE_IN_GROUP,
        Mark.ALLOC_IN_GROUP,
        Mark.CLOBBER_DEFERRED,
        Mark.CLEAR_IN_GROUP,
    }
)
_SIZED: Final = frozenset({Mark.GROWN, Mark.SHRUNK})
_PAIRED: Final = frozenset(
    {
        Mark.SHORT_ON_MAIN,
        Mark.SHORT_ON_SIDE,
        Mark.SIDE_EXHAUSTED,
        Mark.RECYCLED_ON_SIDE,
        Mark.FREED_ON_SIDE,
    }
)
_SWA: Final = frozenset(
    {
        Mark.PART_OF_PAGE,
        Mark.FULL_ALONE,
        Mark.TAIL_ONLY,
        Mark.NO_TAIL,
        Mark.REMAPPED,
        Mark.REMAP_IN_GROUP,
    }
)
_DEVICE: Final = frozenset(
    {
        Mark.LOGICAL_ONLY,
        Mark.BUFFER_SURPLUS,
        Mark.BUFFER_COMPLETED,
        Mark.BUFFER_GROWN,
        Mark.BUFFER_REFUSED,
    }
)
_GROUPED: Final = frozenset(
    {Mark.FREE_IN_GROUP, Mark.ALLOC_IN_GROUP, Mark.CLOBBER_DEFERRED, Mark.CLEAR_IN_GROUP}
)
# Refused before anything is merged, and for want of pages on some side: other marks say of which.
_ONE_POOL: Final = frozenset({Mark.ONE_SHORT, Mark.REFUSAL_AFTER_MERGE})
_DECODE: Final = frozenset(
    {Mark.DECODE_INSIDE_PAGE, Mark.DECODE_NEW_PAGE, Mark.DECODE_MIXED, Mark.WIDE_DECODE}
)
# An extend of whole prefixes alone starts at a page.
_FROM_INSIDE: Final = frozenset({Mark.INSIDE_PAGE, Mark.OLD_PAGE_FILLED, Mark.THREE_PARTS})
_EVERY: Final = _PAGED | _TOKEN

_REACHABLE: Final[dict[str, frozenset[Mark]]] = {
    "token": _TOKEN | _SIZED | {Mark.BEYOND_31_BITS},
    "paged": _EVERY | _SIZED | {Mark.BEYOND_31_BITS, Mark.GROUP_OF_BOTH},
    "swa": _EVERY - _ONE_POOL | _SIZED | _PAIRED | _SWA | {Mark.GROUP_OF_BOTH},
    "swa-ring": _EVERY | {Mark.GROUP_OF_BOTH},
    "pure-swa": _TOKEN,
    "hisparse": (_EVERY - _GROUPED | _PAIRED | _DEVICE),
    "hisparse-v4": _EVERY - _ONE_POOL | _PAIRED | _SWA | _DEVICE | {Mark.GROUP_OF_BOTH},
    "mamba": frozenset(
        {
            Mark.EXACT_EXHAUSTION,
            Mark.ONE_SHORT,
            Mark.REFUSAL,
            Mark.RECYCLED,
            Mark.TAIL_FREE,
            Mark.MANY_ROW_FREE,
            Mark.SERVED_FROM_ASIDE,
            Mark.ASIDE_RETURNED,
            Mark.ASIDE_REFUSED,
            Mark.ASIDE_TWICE,
        }
    ),
    "page-interleave": _EVERY - _ONE_POOL - _DECODE - _FROM_INSIDE
    | {Mark.BASE_DRAWN, Mark.BASE_TIED, Mark.CLASS_SHORT},
}


def reachable(allocator: str) -> frozenset[Mark]:
    """The marks that an allocator of this kind can reach."""
    return _REACHABLE[allocator]
