"""The Triton kernels of the paged allocator, and the two functions that launch them.

Both kernels turn "which rows grow, and by how much" into slots. In the picture below a row of 6 tokens grows
to 15 in pages of 4; its old last page has room for 2, and 2 new pages are taken from the free list:

    position      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 .
                  prefix ------>| room | new page 0 | new page 1
    output index j              0 1   2 3 4  5    6  7  8
    beyond room, k = j - room         0 1 2  3    4  5  6     page k // 4, offset k % 4

Output index j < room continues the old page: `last_loc + 1 + j`. Any other is an offset in a new page.
Where a row's output and its pages begin is the sum over the rows before it, which every program forms itself,
in blocks of BLOCK_ROWS.

No length, no alignment and no batch size is compiled in: sizes and pointers are not specialised on, so that
one compilation per page size (and dtype of the lengths) serves all calls. Loops are `while` loops, because
Triton 3.6's interpreter cannot turn a tensor into the bound of a `range` with a recent NumPy.

The tensors' device must be the current one, as for any Triton launch.

Not covered: refusal, the free list's own bookkeeping, and lengths that break the contract (`paged.py`).
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

BLOCK_ROWS: Final = 256
BLOCK_TOKENS: Final = 1024

# Triton is untyped: a kernel is whatever its decorator makes of it, its arguments are Triton's own tensors.
jit: Callable[..., Callable[[Callable[..., Any]], Any]] = triton.jit


@jit()
def sums_before_row(
    prefix_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    row: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """New tokens and new pages, as int64, of the rows before this one. Rows are read below `row` (masked)."""
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
        pages = (seqs + (page_size - 1)) // page_size - (prefixes + (page_size - 1)) // page_size
        pages_before += tl.maximum(pages, 0)
        first_row += BLOCK_ROWS
    return tl.sum(tokens_before, axis=0), tl.sum(pages_before, axis=0)


@jit()
def starts_before_row(
    seq_lens_ptr: tl.tensor,
    row: tl.tensor,
    batch: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> tl.tensor:
    """How many rows before this one, a multiple of BLOCK_ROWS, start a page by one token, as int64.

    Rows are read below `batch` (masked).
    """
    lane = tl.arange(0, BLOCK_ROWS)
    starts_before = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    first_row = 0
    while first_row < row:
        earlier = first_row + lane
        there = earlier < batch
        seqs = tl.load(seq_lens_ptr + earlier, mask=there, other=1).to(tl.int64)
        starts_before += (there & ((seqs - 1) % page_size == 0)).to(tl.int64)
        first_row += BLOCK_ROWS
    return tl.sum(starts_before, axis=0)


@jit(
    do_not_specialize=[
        "prefix_lens_ptr",
        "seq_lens_ptr",
        "last_loc_ptr",
        "free_pages_ptr",
        "out_ptr",
        "num_pages",
        "num_tokens",
    ]
)
def alloc_extend_kernel(
    prefix_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    last_loc_ptr: tl.tensor,
    free_pages_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pages: tl.tensor,
    num_tokens: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Slots of a batch of rows that grow from their prefix lengths to their sequence lengths.

    Grid: (batch,). Program i is row i.
    Inputs: prefix_lens, seq_lens, last_loc: `batch` elements each, int32 or int64, contiguous.
        free_pages: `num_pages` int64 page numbers, the ones this call takes. out: `num_tokens` int64.
    Owner of the output: program i alone writes its row's stretch,
        `[sum(seq - prefix of rows < i), + seq_i - prefix_i)`, each element once.

        out   | row 0 ....... | row 1 | row 3 ............. |      (row 2 grows by nothing)
        taken | p0 p1 p2      | p3    | p4 p5               |

    Bounds: rows are read below i (masked) and at i. A page is read only for an index inside the row's stretch
        that lies beyond the old page's room, and only below `num_pages`; stores stay below `num_tokens`.
        For lengths that keep the contract the last two limits never bite; for others they keep the damage
        inside the tensors.
    """
    row = tl.program_id(0)
    out_start, page_start = sums_before_row(prefix_lens_ptr, seq_lens_ptr, row, page_size, BLOCK_ROWS)

    prefix = tl.load(prefix_lens_ptr + row).to(tl.int64)
    grown = tl.load(seq_lens_ptr + row).to(tl.int64) - prefix
    after_last = tl.load(last_loc_ptr + row).to(tl.int64) + 1
    room = (prefix + (page_size - 1)) // page_size * page_size - prefix

    token = tl.arange(0, BLOCK_TOKENS)
    first = prefix * 0  # zero, as int64 from the start: a loop variable keeps its type
    while first < grown:
        j = first + token
        mine = j < grown
        k = tl.maximum(j - room, 0)
        index = page_start + k // page_size
        takes = mine & (j >= room) & (index < num_pages)
        page = tl.load(free_pages_ptr + index, mask=takes, other=0)
        slot = tl.where(j < room, after_last + j, page * page_size + k % page_size)
        tl.store(out_ptr + out_start + j, slot, mask=mine & (out_start + j < num_tokens))
        first += BLOCK_TOKENS


@jit(
    do_not_specialize=[
        "seq_lens_ptr",
        "last_loc_ptr",
        "free_pages_ptr",
        "out_ptr",
        "num_pages",
        "batch",
    ]
)
def alloc_decode_kernel(
    seq_lens_ptr: tl.tensor,
    last_loc_ptr: tl.tensor,
    free_pages_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pages: tl.tensor,
    batch: tl.tensor,
    page_size: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Slots of a batch of rows that grow by one token each.

    Grid: (ceil(batch / BLOCK_ROWS),). Program b is the rows `[b * BLOCK_ROWS, (b + 1) * BLOCK_ROWS)`.
    Inputs: seq_lens (lengths after the step, at least 1), last_loc: `batch` elements each, int32 or int64,
        contiguous. free_pages: `num_pages` int64 page numbers, the ones this call takes. out: `batch` int64.
    Owner of the output: element i belongs to program `i // BLOCK_ROWS` alone, written once.

        seq - 1     4   5   8   0        pages of 4
        starts      x   .   x   x        a page starts where (seq - 1) % 4 == 0
        page index  0   .   1   2        the number of starts before

    Bounds: rows are read and written below `batch` (masked). A page is read only for a row that starts one,
        and only below `num_pages`, a limit that never bites for lengths that keep the contract.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_ROWS)
    starts_before = starts_before_row(seq_lens_ptr, block * BLOCK_ROWS, batch, page_size, BLOCK_ROWS)

    rows = block * BLOCK_ROWS + lane
    mine = rows < batch
    seq = tl.load(seq_lens_ptr + rows, mask=mine, other=1).to(tl.int64)
    last_loc = tl.load(last_loc_ptr + rows, mask=mine, other=0).to(tl.int64)
    starts = mine & ((seq - 1) % page_size == 0)
    start = starts.to(tl.int64)
    index = starts_before + tl.cumsum(start, axis=0) - start
    page = tl.load(free_pages_ptr + index, mask=starts & (index < num_pages), other=0)
    tl.store(out_ptr + rows, tl.where(starts, page * page_size, last_loc + 1), mask=mine)


def kernels_run_on(device: torch.device) -> bool:
    """Whether the kernels can be launched on tensors of this device: CUDA, or any under the interpreter."""
    return device.type == "cuda" or not isinstance(alloc_extend_kernel, JITFunction)


def alloc_extend_triton(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Launch `alloc_extend_kernel` once, unless there is nothing to write.

    prefix_lens, seq_lens, last_loc: [batch], int32 or int64, any stride. free_pages: int64, exactly the pages
    the batch takes. num_tokens: sum of seq - prefix. Returns [num_tokens] int64 slots, new memory. Mutates
    nothing and does not synchronise.
    """
    out = torch.empty(num_tokens, dtype=torch.int64, device=free_pages.device)
    if num_tokens:
        alloc_extend_kernel[(prefix_lens.numel(),)](
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            last_loc.contiguous(),
            free_pages,
            out,
            free_pages.numel(),
            num_tokens,
            page_size=page_size,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return out


def alloc_decode_triton(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Launch `alloc_decode_kernel` once, unless the batch is empty.

    seq_lens (after the step), last_loc: [batch], int32 or int64, any stride. free_pages: int64, exactly the
    pages the batch takes. Returns [batch] int64 slots, new memory. Mutates nothing and does not synchronise.
    """
    batch = seq_lens.numel()
    out = torch.empty(batch, dtype=torch.int64, device=free_pages.device)
    if batch:
        alloc_decode_kernel[(triton.cdiv(batch, BLOCK_ROWS),)](
            seq_lens.contiguous(),
            last_loc.contiguous(),
            free_pages,
            out,
            free_pages.numel(),
            batch,
            page_size=page_size,
            BLOCK_ROWS=BLOCK_ROWS,
        )
    return out
