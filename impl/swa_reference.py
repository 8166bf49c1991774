"""What the sliding-window allocator's kernels do, in plain torch: same inputs, same slots, same mapping.

Written independently of `swa_kernels.py`; the allocator uses it where Triton does not run. Not covered, as
there: refusal, the free lists, and calls that break the contract.
"""

import torch

from kvproof.impl.reference import alloc_decode_reference, alloc_extend_reference


def swa_extend_reference(
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
    """Full slots of a batch of rows that grow, and the mapping to their swa slots.

    prefix_lens, seq_lens, last_loc: [batch], int32 or int64. full_pages, swa_pages: int64, exactly the pages
    the batch takes, in order. mapping: [entries + 1] int64, written at the new slots. num_tokens: sum of
    seq - prefix. tail: None, or how many tokens at the end of the only row have peers, in pages of their own.
    Returns [num_tokens] int64 full slots, new memory. Does not synchronise.
    """
    lens = prefix_lens, seq_lens
    slots = alloc_extend_reference(*lens, last_loc, full_pages, num_tokens, page_size)
    if tail is None:
        last_peer = _peers(mapping, last_loc)
        peers = alloc_extend_reference(*lens, last_peer, swa_pages, num_tokens, page_size)
    else:
        peers = torch.zeros_like(slots)
        offsets = torch.arange(page_size, device=slots.device)
        peers[num_tokens - tail :] = (swa_pages[:, None] * page_size + offsets).reshape(-1)[:tail]
    _write(mapping, slots, peers, page_size)
    return slots


def swa_decode_reference(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    full_pages: torch.Tensor,
    swa_pages: torch.Tensor,
    mapping: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Full slots of a batch of rows that grow by one token each, and the mapping to their swa slots.

    seq_lens (after the step), last_loc: [batch], int32 or int64. full_pages, swa_pages: int64, exactly the
    pages the batch takes, in order. mapping: [entries + 1] int64, written at the new slots. Returns [batch]
    int64 full slots, new memory. Does not synchronise.
    """
    slots = alloc_decode_reference(seq_lens, last_loc, full_pages, page_size)
    peers = alloc_decode_reference(seq_lens, _peers(mapping, last_loc), swa_pages, page_size)
    _write(mapping, slots, peers, page_size)
    return slots


def take_peers_reference(slots: torch.Tensor, mapping: torch.Tensor, page_size: int) -> torch.Tensor:
    """The swa pages that full pages are mapped to; the full pages' entries are cleared.

    slots: [n], int32 or int64, each of another page, for which it stands. mapping: [entries + 1] int64.
    Returns [n] int64 page numbers, 0 where a page has no peer, new memory. Does not synchronise.
    """
    offsets = torch.arange(page_size, device=slots.device)
    entries = (slots.to(torch.int64) // page_size * page_size)[:, None] + offsets
    pages = mapping[entries].amax(1) // page_size
    mapping.index_fill_(0, entries.reshape(-1), 0)
    return pages


def _peers(mapping: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor:
    """The entries of these slots. Of an empty row's last_loc, -1, it is the last entry, -1 as well."""
    return mapping[last_loc.to(torch.int64).clamp(-1, mapping.numel() - 1)]


def _write(mapping: torch.Tensor, slots: torch.Tensor, peers: torch.Tensor, page_size: int) -> None:
    """Map slots to peers; a peer in the padding page, behind an unmapped slot, is none."""
    mapping[slots] = torch.where(peers < page_size, 0, peers)
