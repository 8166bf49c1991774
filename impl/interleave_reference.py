"""What the page-interleave allocator's kernel does, in plain torch: same inputs, same slots.

Written independently of `interleave_kernels.py`; the allocator uses it where Triton does not run. Not
covered, as there: bases, refusal, the class lists, and calls that break the contract.
"""

import torch


def interleave_extend_reference(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Slots of a batch of rows that grow from page boundaries, page by page from one class after the other.

    prefix_lens, seq_lens: [batch], int32 or int64. plan: [batch, 1 + shards] int64, each row's first class
    and where its share of each class begins in pages. pages: int64, exactly the pages the batch takes, class
    after class. num_tokens: sum of seq - prefix. Returns [num_tokens] int64 slots, new memory. Mutates
    nothing and does not synchronise.
    """
    shards = plan.shape[1] - 1
    grown = seq_lens.to(torch.int64) - prefix_lens.to(torch.int64)
    # Giving the size spares a read of the sum from the device.
    row = torch.repeat_interleave(grown, output_size=num_tokens)
    behind = torch.arange(num_tokens, device=row.device) - (torch.cumsum(grown, 0) - grown)[row]
    place = behind // page_size
    starts, shares = plan[:, 0], plan[:, 1:]
    index = shares[row, (starts[row] + place) % shards] + place // shards
    return pages[index] * page_size + behind % page_size
