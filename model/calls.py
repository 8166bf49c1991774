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
    tokens: sum of seq - prefix. pages: new pages the batch needs. logical: `alloc_logical_only` is called
    instead. tail: `alloc_extend_swa_tail` is, with this tail. bases: the caller's list of rotation bases
    (page-interleave), which the call may write to.
    """

    prefix_lens: list[int]
    seq_lens: list[int]
    last_locs: list[int]
    tokens: int
    pages: int
    logical: bool = False
    tail: int | None = None
    bases: list[int | None] | None = None


@dataclass(slots=True, eq=False)
class DecodeCall:
    """`alloc_decode`: seq_lens are the lengths after the step; last_locs as for ExtendCall."""

    seq_lens: list[int]
    last_locs: list[int]


@dataclass(slots=True, eq=False)
class FreeCall:
    """`free(slots)`, or another method that takes slots alone.

    method: "free", "free_swa", "free_full", "free_hisparse" or "free_hisparse_indices".
    """

    slots: list[int]
    method: str = "free"


@dataclass(slots=True, eq=False)
class FreeSegmentCall:
    """`free_segment(slots, start_pos=start)`: start in tokens from the row's beginning.

    method: "free_segment", "free_swa_segment" or "free_full_segment".
    """

    slots: list[int]
    start: int
    method: str = "free_segment"


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
    """`resize` to this size in slots; side_size: of the second side, 0 where there is none."""

    size: int
    side_size: int = 0


@dataclass(slots=True, eq=False)
class RemapCall:
    """`set_full_to_swa_mapping(full, swa)`, then `clear_full_to_swa_mapping(cleared)`: full and swa side
    slots, in pairs; cleared: full slots."""

    full: list[int]
    swa: list[int]
    cleared: list[int]


@dataclass(slots=True, eq=False)
class BufferCall:
    """`alloc_device_buffer(slots, need)`: logical slots, and device slots wanted."""

    slots: list[int]
    need: int


@dataclass(slots=True, eq=False)
class AllocGroupBeginCall:
    """`alloc_group_begin(slots)`."""

    slots: int


@dataclass(slots=True, eq=False)
class AllocGroupEndCall:
    """`alloc_group_end()`."""


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
    | RemapCall
    | BufferCall
    | AllocGroupBeginCall
    | AllocGroupEndCall
    | NoCall
)
