"""The Triton kernels of the sliding-window allocator, and the functions that launch them, one launch each.

An extend or a decode gives every new token two slots, one of each pool, and writes the mapping from the one
to the other; only full slots are returned. A row goes on behind its last slot on both sides, and where that
is on the swa side the mapping says:

    full     last_loc ------------> 10 11 | new full page 3: 12 13 14
               |                     |  |                     |  |  |
    mapping    v                     v  v                     v  v  v
    swa      mapping[last_loc] ---> 22 23 | new swa page 7:  28 29 30

With a tail only the last tokens of the (one) row have peers, in pages of their own, and the entries of the
others, the head, become 0 whatever an earlier life of their slots left there.

Entries below the page size mean unmapped: no peer lies in the padding page. The last entry, -1, is never
written. As in `kernels.py` no length, alignment or batch size is compiled in, and for lengths, slots and
entries that break the contract accesses stay inside the tensors; what they compute is then of no use.

Not covered: refusal and the free lists (`swa.py`), and what the same slot named twice in one call does.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kvproof.impl.kernels import BLOCK_ROWS, BLOCK_TOKENS, jit, starts_before_row, sums_before_row

_BLOCK_PAGES: Final = 64
_BLOCK_OFFSETS: Final = 16
_NO_TAIL: Final = -1


@jit(
    do_not_specialize=[
        "prefix_lens_ptr",
        "seq_lens_ptr",
        "last_loc_ptr",
        "full_pages_ptr",
        "swa_pages_ptr",
        "mapping_ptr",
        "out_ptr",
        "num_full_pages",
        "num_swa_pages",
        "num_entries",
        "num_tokens",
        "head",
    ]
)
def swa_extend_kernel(
    prefix_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    last_loc_ptr: tl.tensor,
    full_pages_ptr: tl.tensor,
    swa_pages_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_full_pages: tl.tensor,
    num_swa_pages: tl.tensor,
    num_entries: tl.tensor,
    num_tokens: tl.tensor,
    head: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Full slots of a batch of rows that grow, and the mapping to their swa slots.

    Grid: (batch,). Program i is row i.
    Inputs: prefix_lens, seq_lens, last_loc (full slots): `batch` elements each, int32 or int64, contiguous.
        full_pages, swa_pages: `num_full_pages` and `num_swa_pages` int64 page numbers, those this call takes.
        head: -1, or how many of the only row's new tokens have no peer; the others then start a swa page.
    Outputs: out, `num_tokens` int64, as `alloc_extend_kernel` writes it. mapping: int64, more than
        `num_entries` elements; program i alone reads entry last_loc_i and writes those of its row's new
        slots, each once.
    Bounds: rows are read below i (masked) and at i. Full and swa pages are read for an index inside the row's
        stretch that lies beyond the old page's room, and below their counts. Entries are read and written at
        slots in `[page_size, num_entries)`, `out` below `num_tokens`.
    """
    row = tl.program_id(0)
    out_start, page_start = sums_before_row(prefix_lens_ptr, seq_lens_ptr, row, page_size, BLOCK_ROWS)

    prefix = tl.load(prefix_lens_ptr + row).to(tl.int64)
    grown = tl.load(seq_lens_ptr + row).to(tl.int64) - prefix
    last = tl.load(last_loc_ptr + row).to(tl.int64)
    room = (prefix + (page_size - 1)) // page_size * page_size - prefix
    paired = head < 0  # the whole row is
    in_pool = paired & (last >= page_size) & (last < num_entries)
    last_peer = tl.load(mapping_ptr + last, mask=in_pool, other=0)
    swa_room = tl.where(paired, room, 0)
    first_peer = tl.where(paired, 0, head)

    token = tl.arange(0, BLOCK_TOKENS)
    first = prefix * 0  # zero, as int64 from the start: a loop variable keeps its type
    while first < grown:
        j = first + token
        mine = (j < grown) & (out_start + j < num_tokens)
        k = tl.maximum(j - room, 0)
        index = page_start + k // page_size
        takes = mine & (j >= room) & (index < num_full_pages)
        page = tl.load(full_pages_ptr + index, mask=takes, other=0)
        slot = tl.where(j < room, last + 1 + j, page * page_size + k % page_size)
        tl.store(out_ptr + out_start + j, slot, mask=mine)

        j -= first_peer
        k = tl.maximum(j - swa_room, 0)
        index = page_start + k // page_size
        takes = mine & (j >= swa_room) & (index < num_swa_pages)
        page = tl.load(swa_pages_ptr + index, mask=takes, other=0)
        peer = tl.where(j < swa_room, last_peer + 1 + j, page * page_size + k % page_size)
        # A peer in the padding page is none: of the head, j < 0, or behind a slot that has none.
        peer = tl.where(peer < page_size, 0, peer)
        there = mine & (slot >= page_size) & (slot < num_entries)
        tl.store(mapping_ptr + slot, peer, mask=there)
        first += BLOCK_TOKENS


@jit(
    do_not_specialize=[
        "seq_lens_ptr",
        "last_loc_ptr",
        "full_pages_ptr",
        "swa_pages_ptr",
        "mapping_ptr",
        "out_ptr",
        "num_pages",
        "num_entries",
        "batch",
    ]
)
def swa_decode_kernel(
    seq_lens_ptr: tl.tensor,
    last_loc_ptr: tl.tensor,
    full_pages_ptr: tl.tensor,
    swa_pages_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pages: tl.tensor,
    num_entries: tl.tensor,
    batch: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Full slots of a batch of rows that grow by one token each, and the mapping to their swa slots.

    Grid: (ceil(batch / BLOCK_ROWS),). Program b is the rows `[b * BLOCK_ROWS, (b + 1) * BLOCK_ROWS)`.
    Inputs: seq_lens (after the step, at least 1), last_loc (full slots): `batch` elements each, int32 or
        int64, contiguous. full_pages, swa_pages: `num_pages` int64 page numbers each, those this call takes.
    Outputs: out, `batch` int64; mapping, int64, more than `num_entries` elements. The program of row i alone
        writes element i and the entry of its new slot, each once, and reads the entry of its last_loc.
    Bounds: rows are read and written below `batch` (masked), pages for a row that starts one and below
        `num_pages`, entries at slots in `[page_size, num_entries)`.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_ROWS)
    starts_before = starts_before_row(seq_lens_ptr, block * BLOCK_ROWS, batch, page_size, BLOCK_ROWS)

    rows = block * BLOCK_ROWS + lane
    mine = rows < batch
    seq = tl.load(seq_lens_ptr + rows, mask=mine, other=1).to(tl.int64)
    last = tl.load(last_loc_ptr + rows, mask=mine, other=0).to(tl.int64)
    starts = mine & ((seq - 1) % page_size == 0)
    start = starts.to(tl.int64)
    index = starts_before + tl.cumsum(start, axis=0) - start
    takes = starts & (index < num_pages)
    page = tl.load(full_pages_ptr + index, mask=takes, other=0)
    slot = tl.where(starts, page * page_size, last + 1)
    tl.store(out_ptr + rows, slot, mask=mine)

    swa_page = tl.load(swa_pages_ptr + index, mask=takes, other=0)
    goes_on = mine & (starts == 0) & (last >= page_size) & (last < num_entries)
    last_peer = tl.load(mapping_ptr + last, mask=goes_on, other=0)
    peer = tl.where(starts, swa_page * page_size, last_peer + 1)
    peer = tl.where(peer < page_size, 0, peer)
    there = mine & (slot >= page_size) & (slot < num_entries)
    tl.store(mapping_ptr + slot, peer, mask=there)


@jit(
    do_not_specialize=[
        "slots_ptr",
        "mapping_ptr",
        "out_ptr",
        "num_slots",
        "num_entries",
    ]
)
def take_peers_kernel(
    slots_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_slots: tl.tensor,
    num_entries: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_OFFSETS: tl.constexpr,
) -> None:
    """The swa pages that full pages are mapped to; the full pages' entries are cleared.

    Grid: (ceil(num_slots / BLOCK_PAGES),). Program b is the slots `[b * BLOCK_PAGES, (b + 1) * BLOCK_PAGES)`.
    Inputs: slots, `num_slots` full slots, int32 or int64, contiguous, each of another page, for which it
    stands.
    Outputs: out, `num_slots` int64 page numbers, 0 where a page has no peer; mapping, int64, more than
        `num_entries` elements. The program of slot i alone writes element i, and reads and clears the entries
        of its page.
    Bounds: slots are read and `out` written below `num_slots` (masked), entries at slots in
        `[page_size, num_entries)`.
    """
    at = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    mine = at < num_slots
    slot = tl.load(slots_ptr + at, mask=mine, other=0).to(tl.int64)
    in_pool = mine & (slot >= page_size) & (slot < num_entries)
    start = slot // page_size * page_size
    peer = tl.zeros([BLOCK_PAGES], dtype=tl.int64)
    first = 0
    while first < page_size:
        offset = first + tl.arange(0, BLOCK_OFFSETS)
        entry = start[:, None] + offset[None, :]
        there = in_pool[:, None] & (offset < page_size)[None, :] & (entry < num_entries)
        # All mapped entries of a page lead to one page, and an unmapped one is 0.
        peer = tl.maximum(peer, tl.max(tl.load(mapping_ptr + entry, mask=there, other=0), axis=1))
        # Threads may have loaded copies of what others are about to clear.
        tl.debug_barrier()
        tl.store(mapping_ptr + entry, 0, mask=there)
        first += BLOCK_OFFSETS
    tl.store(out_ptr + at, peer // page_size, mask=mine)


def swa_extend_triton(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    full_pages: torch.Tensor,
    swa_pages: torch.Tensor,
    mapping: torch.Tensor,
    num_tokens: int,
    tail: int | None,
    page_size: int,
) -> torch.Tensor:
    """Launch `swa_extend_kernel` once, unless there is nothing to write.

    prefix_lens, seq_lens, last_loc: [batch], int32 or int64, any stride. full_pages, swa_pages: int64,
    exactly the pages the batch takes. mapping: [entries + 1] int64, written at the new slots. num_tokens: sum
    of seq - prefix. tail: None, or how many tokens at the end of the only row have peers. Returns
    [num_tokens] int64 full slots, new memory. Does not synchronise.
    """
    out = torch.empty(num_tokens, dtype=torch.int64, device=mapping.device)
    if num_tokens:
        swa_extend_kernel[(prefix_lens.numel(),)](
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            last_loc.contiguous(),
            full_pages,
            swa_pages,
            mapping,
            out,
            full_pages.numel(),
            swa_pages.numel(),
            mapping.numel() - 1,
            num_tokens,
            _NO_TAIL if tail is None else num_tokens - tail,
            page_size=page_size,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return out


def swa_decode_triton(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    full_pages: torch.Tensor,
    swa_pages: torch.Tensor,
    mapping: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Launch `swa_decode_kernel` once, unless the batch is empty.

    seq_lens (after the step), last_loc: [batch], int32 or int64, any stride. full_pages, swa_pages: int64,
    exactly the pages the batch takes, as many of one as of the other. mapping: [entries + 1] int64, written
    at the new slots. Returns [batch] int64 full slots, new memory. Does not synchronise.
    """
    batch = seq_lens.numel()
    out = torch.empty(batch, dtype=torch.int64, device=mapping.device)
    if batch:
        swa_decode_kernel[(triton.cdiv(batch, BLOCK_ROWS),)](
            seq_lens.contiguous(),
            last_loc.contiguous(),
            full_pages,
            swa_pages,
            mapping,
            out,
            full_pages.numel(),
            mapping.numel() - 1,
            batch,
            page_size=page_size,
            BLOCK_ROWS=BLOCK_ROWS,
        )
    return out


def take_peers_triton(slots: torch.Tensor, mapping: torch.Tensor, page_size: int) -> torch.Tensor:
    """Launch `take_peers_kernel` once, unless there are no slots.

    slots: [n], int32 or int64, any stride: full slots of n pages. mapping: [entries + 1] int64; the entries
    of these pages become 0. Returns [n] int64 swa page numbers, 0 for none, new memory. Does not synchronise.
    """
    count = slots.numel()
    out = torch.empty(count, dtype=torch.int64, device=mapping.device)
    if count:
        take_peers_kernel[(triton.cdiv(count, _BLOCK_PAGES),)](
            slots.contiguous(),
            mapping,
            out,
            count,
            mapping.numel() - 1,
            page_size=page_size,
            BLOCK_PAGES=_BLOCK_PAGES,
            BLOCK_OFFSETS=_BLOCK_OFFSETS,
        )
    return out
