"""The Triton kernel of the page-interleave allocator, and the function that launches it.

The pages that a batch takes lie class after class; a row's new pages go round the classes from the one it
starts with. With 3 classes, of which the batch takes 3, 2 and 2 pages, and a row of 5 new pages that starts
with class 2 and is the second of the batch (the first took one page of class 0 and one of class 1):

    pages        a0 a1 a2 | b0 b1 | c0 c1          plan of the row:  start 2, shares from 1, 4, 5
    new page k   0  1  2  3  4                     owner of k: (start + k) % 3
    comes from   c0 a1 b1 c1 a2                    index of k: share of its owner + k // 3

So the plan, which the host makes since bases and page counts are known there, is all that a row needs.

As in `kernels.py` no length, alignment or batch size is compiled in, and for lengths that break the contract
accesses stay inside the tensors; what they compute is then of no use.

Not covered: bases, refusal and the class lists (`interleave.py`).
"""

import torch
import triton.language as tl

from kvproof.impl.kernels import BLOCK_ROWS, BLOCK_TOKENS, jit, sums_before_row


@jit(
    do_not_specialize=[
        "prefix_lens_ptr",
        "seq_lens_ptr",
        "plan_ptr",
        "pages_ptr",
        "out_ptr",
        "num_pages",
        "num_tokens",
    ]
)
def interleave_extend_kernel(
    prefix_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pages: tl.tensor,
    num_tokens: tl.tensor,
    page_size: tl.constexpr,
    shards: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Slots of a batch of rows that grow from page boundaries, page by page from one class after the other.

    Grid: (batch,). Program i is row i.
    Inputs: prefix_lens (multiples of the page size), seq_lens: `batch` elements each, int32 or int64,
        contiguous. plan: `batch * (1 + shards)` int64, contiguous: each row's first class, in `[0, shards)`,
        and where its share of each class begins in pages. pages: `num_pages` int64 page numbers, those that
        this call takes, class after class.
    Owner of the output: out, `num_tokens` int64, as `alloc_extend_kernel` writes it.
    Bounds: rows are read below i (masked) and at i, the plan at i. A page is read for an index inside the
        row's stretch and in `[0, num_pages)`; stores stay below `num_tokens`.
    """
    row = tl.program_id(0)
    out_start, _ = sums_before_row(prefix_lens_ptr, seq_lens_ptr, row, page_size, BLOCK_ROWS)

    prefix = tl.load(prefix_lens_ptr + row).to(tl.int64)
    grown = tl.load(seq_lens_ptr + row).to(tl.int64) - prefix
    plan_row_ptr = plan_ptr + row.to(tl.int64) * (1 + shards)
    start = tl.load(plan_row_ptr)

    token = tl.arange(0, BLOCK_TOKENS)
    first = prefix * 0  # zero, as int64 from the start: a loop variable keeps its type
    while first < grown:
        j = first + token
        mine = (j < grown) & (out_start + j < num_tokens)
        k = j // page_size
        index = tl.load(plan_row_ptr + 1 + (start + k) % shards, mask=mine, other=0) + k // shards
        takes = mine & (index >= 0) & (index < num_pages)
        page = tl.load(pages_ptr + index, mask=takes, other=0)
        tl.store(out_ptr + out_start + j, page * page_size + j % page_size, mask=mine)
        first += BLOCK_TOKENS


def interleave_extend_triton(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Launch `interleave_extend_kernel` once, unless there is nothing to write.

    prefix_lens, seq_lens: [batch], int32 or int64, any stride. plan: [batch, 1 + shards] int64, contiguous,
    each row's first class and where its share of each class begins. pages: int64, exactly the pages the batch
    takes, class after class. num_tokens: sum of seq - prefix. Returns [num_tokens] int64 slots, new memory.
    Mutates nothing and does not synchronise.
    """
    out = torch.empty(num_tokens, dtype=torch.int64, device=pages.device)
    if num_tokens:
        interleave_extend_kernel[(prefix_lens.numel(),)](
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            plan,
            pages,
            out,
            pages.numel(),
            num_tokens,
            page_size=page_size,
            shards=plan.shape[1] - 1,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return out
