"""The Triton kernel of the compressed HiSparse allocator, and the function that launches it.

A device slot stands for a block of `ratio` tokens, and is that of its last one: it comes with the token that
completes the block, and its entry in the mapping is at that token's logical slot divided by `ratio`. So a row
that grows from 6 to 17 tokens, at a ratio of 4, completes blocks 1 to 3:

    token            0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 .
                     prefix ---->|               grown ------------->
    device slot      before  |   x     |     x     |      x      |

and on the device side grows from 1 slot to 4, in pages, behind the slot that the mapping has for the last
block before. The extend of the logical side, whose new slots are read here, has come first.

As in `kernels.py` no length, alignment or batch size is compiled in, and for lengths, slots and entries that
break the contract accesses stay inside the tensors; what they compute is then of no use.

Not covered: refusal and the free lists (`hisparse_v4.py`), and the uncompressed extend, which is that of
`swa_kernels.py`.
"""

import torch
import triton.language as tl

from kvproof.impl.kernels import BLOCK_ROWS, BLOCK_TOKENS, jit


@jit(
    do_not_specialize=[
        "prefix_lens_ptr",
        "seq_lens_ptr",
        "last_loc_ptr",
        "slots_ptr",
        "pages_ptr",
        "mapping_ptr",
        "num_pages",
        "num_entries",
        "num_tokens",
    ]
)
def compressed_extend_kernel(
    prefix_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    last_loc_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    num_pages: tl.tensor,
    num_entries: tl.tensor,
    num_tokens: tl.tensor,
    ratio: tl.constexpr,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """The mapping from the blocks that a batch of rows completes to new device slots.

    Grid: (batch,). Program i is row i. Inputs: prefix_lens, seq_lens, last_loc (logical): `batch` elements
    each, int32 or int64, contiguous. slots:
        `num_tokens` int64, the rows' new logical slots in batch order. pages: `num_pages` int64 device page
        numbers, those this call takes. page_size: in device slots.
    Owner of the output: mapping, int64, more than `num_entries` elements. Program i alone writes the entries
        of the blocks that its row completes, each once, and reads the one before when that is in their page.
    Bounds: rows are read below i (masked) and at i, slots inside the row's stretch and below `num_tokens`,
        pages for an index inside it that lies beyond the old page's room, and below `num_pages`. Entries are
        read and written in `[page_size, num_entries)`.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK_ROWS)
    tokens_before = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    pages_before = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    first_row = 0
    while first_row < row:
        rows = first_row + lane
        earlier = rows < row
        prefixes = tl.load(prefix_lens_ptr + rows, mask=earlier, other=0).to(tl.int64)
        seqs = tl.load(seq_lens_ptr + rows, mask=earlier, other=0).to(tl.int64)
        # Never below zero: a row that shrinks, against the contract, must not move others before the tensors.
        tokens_before += tl.maximum(seqs - prefixes, 0)
        pages = (seqs // ratio + (page_size - 1)) // page_size
        pages -= (prefixes // ratio + (page_size - 1)) // page_size
        pages_before += tl.maximum(pages, 0)
        first_row += BLOCK_ROWS
    slots_start = tl.sum(tokens_before, axis=0)
    page_start = tl.sum(pages_before, axis=0)

    prefix = tl.load(prefix_lens_ptr + row).to(tl.int64)
    first_block = prefix // ratio
    grown = tl.load(seq_lens_ptr + row).to(tl.int64) // ratio - first_block
    room = (first_block + (page_size - 1)) // page_size * page_size - first_block
    last_block = (tl.load(last_loc_ptr + row).to(tl.int64) + 1) // ratio - 1
    # At the start of a page the entry before is another page's, which another program may be writing.
    goes_on = (room > 0) & (grown > 0) & (last_block >= page_size) & (last_block < num_entries)
    last_peer = tl.load(mapping_ptr + last_block, mask=goes_on, other=0)

    block = tl.arange(0, BLOCK_TOKENS)
    first = prefix * 0  # zero, as int64 from the start: a loop variable keeps its type
    while first < grown:
        b = first + block
        token = slots_start + (first_block + b) * ratio + (ratio - 1) - prefix
        mine = (b < grown) & (token >= slots_start) & (token < num_tokens)
        entry = tl.load(slots_ptr + token, mask=mine, other=0) // ratio

        k = tl.maximum(b - room, 0)
        index = page_start + k // page_size
        takes = mine & (b >= room) & (index < num_pages)
        page = tl.load(pages_ptr + index, mask=takes, other=0)
        peer = tl.where(b < room, last_peer + 1 + b, page * page_size + k % page_size)
        # No device slot lies in the padding page: behind an unmapped block there is none.
        peer = tl.where(peer < page_size, 0, peer)
        tl.store(mapping_ptr + entry, peer, mask=mine & (entry >= page_size) & (entry < num_entries))
        first += BLOCK_TOKENS


def compressed_extend_triton(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    mapping: torch.Tensor,
    num_blocks: int,
    ratio: int,
    page_size: int,
) -> None:
    """Launch `compressed_extend_kernel` once, unless no block is completed.

    prefix_lens, seq_lens, last_loc (logical): [batch], int32 or int64, any stride. slots: [sum of seq -
    prefix] int64, the new logical slots. pages: int64, exactly the device pages the batch takes. mapping:
    [entries + 1] int64, written at the new blocks. num_blocks: sum of seq // ratio - prefix // ratio.
    page_size: in device slots. Does not synchronise.
    """
    if num_blocks:
        compressed_extend_kernel[(prefix_lens.numel(),)](
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            last_loc.contiguous(),
            slots,
            pages,
            mapping,
            pages.numel(),
            mapping.numel() - 1,
            slots.numel(),
            ratio=ratio,
            page_size=page_size,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
