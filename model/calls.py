"""Calls: what an op comes to for one allocator in one state, with concrete slots.

The model makes them, a target carries them out. Values are plain ints and lists; a target builds whatever
tensors its signatures want. Calls are made for one step and must not be changed by whoever receives them.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class AllocCall:
    """`alloc(need)`: need in slots."""

    need: int


@dataclass(slots=True, eq=False)
class ExtendCall:
    """`alloc_extend`. All lists have one entry per row, in batch order.

    prefix_lens, seq_lens: row lengths before and after, in tokens.
    last_locs: slot of the row's last token before the call, -1 for an empty row.
    tokens: sum of seq - prefix. pages: new pages the batch needs.
    """

    prefix_lens: list[int]
    seq_lens: list[int]
    last_locs: list[int]
    tokens: int
    pages: int


@dataclass(slots=True, eq=False)
class DecodeCall:
    """`alloc_decode`: seq_lens are the lengths after the step; last_locs as for ExtendCall."""

    seq_lens: list[int]
    last_locs: list[int]


@dataclass(slots=True, eq=False)
class FreeCall:
    """`free(slots)`."""

    slots: list[int]


@dataclass(slots=True, eq=False)
class FreeSegmentCall:
    """`free_segment(slots, start_pos=start)`: start in tokens from the row's beginning."""

    slots: list[int]
    start: int


@dataclass(slots=True, eq=False)
class FreeSegmentsCall:
    """`free_segments([(slots, start), ...])`."""

    segments: list[tuple[list[int], int]]


@dataclass(slots=True, eq=False)
class FreePageIdsCall:
    """`free_page_ids(pages)`: page numbers, not slots."""

    pages: list[int]


@dataclass(slots=True, eq=False)
class GroupBeginCall:
    """`free_group_begin()`."""


@dataclass(slots=True, eq=False)
class GroupEndCall:
    """`free_group_end()`."""


@dataclass(slots=True, eq=False)
class ClobberCall:
    """Overwrite the caller's own tensors (see ops.Clobber) with this slot. No call of the allocator."""

    slot: int


@dataclass(slots=True, eq=False)
class ClearCall:
    """`clear()`."""


@dataclass(slots=True, eq=False)
class ResizeCall:
    """`resize` to this size in slots."""

    size: int


@dataclass(slots=True, eq=False)
class NoCall:
    """The op comes to nothing in this state; the target is not called."""


Call = (
    AllocCall
    | ExtendCall
    | DecodeCall
    | FreeCall
    | FreeSegmentCall
    | FreeSegmentsCall
    | FreePageIdsCall
    | GroupBeginCall
    | GroupEndCall
    | ClobberCall
    | ClearCall
    | ResizeCall
    | NoCall
)
