"""Marks: model events worth reaching.

A campaign whose budget should have reached a mark and did not is not green: a generator that never exhausts
the pool proves nothing about refusal. `REQUIRED` says which allocators can reach which mark.
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


PAGED_ONLY: Final = frozenset(
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
        Mark.GROUP_OF_BOTH,
    }
)


def reachable(allocator: str) -> frozenset[Mark]:
    """The marks that an allocator of this kind can reach."""
    everything = frozenset(Mark)
    return everything - PAGED_ONLY if allocator == "token" else everything
