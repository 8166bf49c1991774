"""What the compressed HiSparse allocator's kernel does, in plain torch: same inputs, same mapping.

Written independently of `hisparse_kernels.py`; the allocator uses it where Triton does not run. Not covered,
as there: refusal, the free lists, and calls that break the contract.
"""

import torch

from kvproof.impl.reference import alloc_extend_reference


def compressed_extend_reference(
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
    """The mapping from the blocks of `ratio` tokens that a batch of rows completes to new device slots.

    prefix_lens, seq_lens, last_loc (logical): [batch], int32 or int64. slots: [sum of seq - prefix] int64,
    the new logical slots. pages: int64, exactly the device pages the batch takes, in order. mapping:
    [entries + 1] int64, written at the new blocks. num_blocks: sum of seq // ratio - prefix // ratio.
    page_size: in device slots. Does not synchronise.
    """
    prefix, seq, last = (tensor.to(torch.int64) for tensor in (prefix_lens, seq_lens, last_loc))
    first, end = prefix // ratio, seq // ratio
    # The entry of a row's last complete block; -1, which is mapped to -1, when it has none.
    last_entry = torch.div(last - (ratio - 1), ratio, rounding_mode="floor")
    last_peer = mapping[last_entry.clamp(-1, mapping.numel() - 1)]
    peers = alloc_extend_reference(first, end, last_peer, pages, num_blocks, page_size)

    # Giving the size spares a read of the sum from the device.
    row = torch.repeat_interleave(end - first, output_size=num_blocks)
    number = torch.arange(num_blocks, device=row.device) - (torch.cumsum(end - first, 0) - end)[row]
    last_token = number * ratio + ratio - 1
    at = last_token + (torch.cumsum(seq - prefix, 0) - seq)[row]
    mapping[slots[at] // ratio] = torch.where(peers < page_size, 0, peers)
