"""The kernels' work in plain torch: same inputs, same slots, on any device, without a loop over rows.

Written independently of `kernels.py`; the allocator uses it where Triton does not run. Not covered, as there:
refusal, bookkeeping, and lengths that break the contract.
"""

import torch


def alloc_extend_reference(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Slots of a batch of rows that grow from prefix_lens to seq_lens.

    prefix_lens, seq_lens, last_loc: [batch], int32 or int64. free_pages: int64, exactly the pages the batch
    takes, in order. num_tokens: sum of seq - prefix. Returns [num_tokens] int64 slots, new memory. Mutates
    nothing and does not synchronise.
    """
    prefix, seq = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
    pages = _pages(seq, page_size) - _pages(prefix, page_size)
    # Giving the size spares a read of the sum from the device.
    row = torch.repeat_interleave(seq - prefix, output_size=num_tokens)
    position = torch.arange(num_tokens, device=row.device) + (prefix - _sum_before(seq - prefix))[row]
    boundary = (_pages(prefix, page_size) * page_size)[row]
    continued = last_loc.to(torch.int64)[row] + 1 + position - prefix[row]
    index = _sum_before(pages)[row] + (position - boundary) // page_size
    page = _gather(free_pages, index, position >= boundary)
    return torch.where(position < boundary, continued, page * page_size + position % page_size)


def alloc_decode_reference(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of a batch of rows that grow by one token to seq_lens.

    seq_lens, last_loc: [batch], int32 or int64. free_pages: int64, exactly the pages the batch takes, in
    order. Returns [batch] int64 slots, new memory. Mutates nothing and does not synchronise.
    """
    starts = (seq_lens.to(torch.int64) - 1) % page_size == 0
    page = _gather(free_pages, _sum_before(starts.to(torch.int64)), starts)
    return torch.where(starts, page * page_size, last_loc.to(torch.int64) + 1)


def _pages(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + (page_size - 1)) // page_size


def _sum_before(counts: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(counts, 0) - counts


def _gather(free_pages: torch.Tensor, index: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """free_pages[index] where wanted, the padding page elsewhere.

    torch evaluates a gather for every element, so those that want no page need an entry of their own: the
    padding page is put before the list. Without it they would read past a list that is exactly long enough.
    """
    padded = torch.cat((free_pages.new_zeros(1), free_pages))
    return padded[torch.where(wanted, index + 1, 0)]
