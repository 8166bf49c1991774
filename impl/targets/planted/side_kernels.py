"""Faults in the kernels of pools with several sides and of sharded pools, memory faults included.

Not covered: the kernels of the paged allocator (`slots.py`), which these pools use as well.
"""

from dataclasses import replace
from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_SWA: Final = (
    Plant(
        "kernel-swa-page-after",
        "The extend kernel reads one swa page past those taken, and drops it.",
        "swa_kernels.py",
        "takes = mine & (j >= swa_room) & (index < num_swa_pages)",
        "takes = (j <= grown - first_peer) & (j >= swa_room)",
        ("P7",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-entry-before",
        "The extend kernel looks up the peer of an empty row's last_loc, before the mapping begins.",
        "swa_kernels.py",
        "in_pool = paired & (last >= page_size) & (last < num_entries)",
        "in_pool = paired & (last < num_entries)",
        ("P7",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-maps-on",
        "The extend kernel writes entries of whole blocks, behind the row's last token too.",
        "swa_kernels.py",
        "        there = mine & (slot >= page_size) & (slot < num_entries)\n",
        "        there = (slot >= page_size) & (slot < num_entries)\n",
        ("P7", "P8", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-end-overwritten",
        "The extend kernel writes what it has no entry for to the end of the mapping.",
        "swa_kernels.py",
        "        tl.store(mapping_ptr + slot, peer, mask=there)\n        first",
        "        place = tl.where(there, slot, num_entries)\n"
        "        tl.store(mapping_ptr + place, tl.where(there, peer, 0))\n        first",
        ("P8", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-writes-past-end",
        "The extend kernel writes what it has no entry for just past the mapping.",
        "swa_kernels.py",
        "        tl.store(mapping_ptr + slot, peer, mask=there)\n        first",
        "        tl.store(mapping_ptr + tl.where(there, slot, num_entries + 1), peer)\n        first",
        ("P7", "P8"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-launched-again",
        "The decode kernel is launched five times over, each time for the whole batch.",
        "swa_kernels.py",
        "    if batch:\n        swa_decode_kernel[",
        "    for _ in range(batch and 5):\n        swa_decode_kernel[",
        ("P15",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-head-mapped",
        "The extend kernel gives the tail's peers to the head.",
        "swa_kernels.py",
        "first_peer = tl.where(paired, 0, head)",
        "first_peer = 0 * head",
        ("P1", "P3", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-tail-goes-on",
        "The extend kernel fills the room of the row's old swa page with a tail.",
        "swa_kernels.py",
        "swa_room = tl.where(paired, room, 0)",
        "swa_room = room",
        ("P1", "P3", "P4", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-entries-twice",
        "The extend kernel clears an entry before it writes it.",
        "swa_kernels.py",
        "        tl.store(mapping_ptr + slot, peer, mask=there)\n        first",
        "        tl.store(mapping_ptr + slot, 0 * peer, mask=there)\n"
        "        tl.store(mapping_ptr + slot, peer, mask=there)\n        first",
        ("P8",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-decode-page-after",
        "The decode kernel reads a swa page for rows that need none.",
        "swa_kernels.py",
        "swa_page = tl.load(swa_pages_ptr + index, mask=takes, other=0)",
        "swa_page = tl.load(swa_pages_ptr + index, mask=mine, other=0)",
        ("P7",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-decode-repeats",
        "The decode kernel maps the new slot to the last one's peer.",
        "swa_kernels.py",
        "peer = tl.where(starts, swa_page * page_size, last_peer + 1)",
        "peer = tl.where(starts, swa_page * page_size, last_peer)",
        ("P5", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-one-entry-cleared",
        "A release clears the entry of one slot of each page and leaves the others.",
        "swa_kernels.py",
        "tl.store(mapping_ptr + entry, 0, mask=there)",
        "tl.store(mapping_ptr + entry, 0, mask=there & (offset == 0)[None, :])",
        ("P10",),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-last-block-counts",
        "Of a page of many slots a release looks for the peer among the last few.",
        "swa_kernels.py",
        "peer = tl.maximum(peer, tl.max(tl.load(mapping_ptr + entry, mask=there, other=0), axis=1))",
        "peer = tl.max(tl.load(mapping_ptr + entry, mask=there, other=0), axis=1)",
        ("P2", "P3", "P11"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-clears-on",
        "A release clears entries in blocks, behind the page's last slot too.",
        "swa_kernels.py",
        "there = in_pool[:, None] & (offset < page_size)[None, :] & (entry < num_entries)",
        "there = in_pool[:, None] & (offset[None, :] >= 0) & (entry < num_entries)",
        ("P1", "P8", "P10"),
        path="kernels",
        allocator="swa",
    ),
    Plant(
        "kernel-swa-slot-after",
        "A release reads slots in blocks, behind the last one too.",
        "swa_kernels.py",
        "slot = tl.load(slots_ptr + at, mask=mine, other=0).to(tl.int64)",
        "slot = tl.load(slots_ptr + at).to(tl.int64)",
        ("P7",),
        path="kernels",
        allocator="swa",
    ),
)

_DEVICE: Final = (
    Plant(
        "kernel-v4-prefix-rounded-up",
        "A block that a prefix has begun is taken for one that it has completed.",
        "hisparse_kernels.py",
        "first_block = prefix // ratio",
        "first_block = (prefix + (ratio - 1)) // ratio",
        ("P1", "P4", "P5", "P10"),
        path="kernels",
        allocator="hisparse-v4",
    ),
    Plant(
        "kernel-v4-tokens-for-blocks",
        "A row counts the tokens of the rows before it and not their blocks when it looks for its pages.",
        "hisparse_kernels.py",
        "pages = (seqs // ratio + (page_size - 1)) // page_size",
        "pages = (seqs + (page_size - 1)) // page_size",
        ("P3", "P10"),
        path="kernels",
        allocator="hisparse-v4",
    ),
    Plant(
        "kernel-v4-page-after",
        "The kernel reads one device page past those taken, and drops it.",
        "hisparse_kernels.py",
        "takes = mine & (b >= room) & (index < num_pages)",
        "takes = (b <= grown) & (b >= room)",
        ("P7",),
        path="kernels",
        allocator="hisparse-v4",
    ),
    Plant(
        "kernel-v4-first-token",
        "An entry is looked up by the block's first token, which may have come before.",
        "hisparse_kernels.py",
        "token = slots_start + (first_block + b) * ratio + (ratio - 1) - prefix",
        "token = slots_start + (first_block + b) * ratio - prefix",
        ("P10",),
        path="kernels",
        allocator="hisparse-v4",
    ),
    Plant(
        "kernel-v4-slot-after",
        "The kernel reads slots behind the last new one when the last block is not complete.",
        "hisparse_kernels.py",
        "entry = tl.load(slots_ptr + token, mask=mine, other=0) // ratio",
        "entry = tl.load(slots_ptr + token, mask=(b <= grown) & (token >= slots_start), other=0) // ratio",
        ("P7",),
        path="kernels",
        allocator="hisparse-v4",
    ),
    Plant(
        "kernel-v4-neighbours-entry",
        "A row that starts a device page reads the entry before, which may be another row's.",
        "hisparse_kernels.py",
        "goes_on = (room > 0) & (grown > 0) & (last_block >= page_size) & (last_block < num_entries)",
        "goes_on = (grown > 0) & (last_block >= page_size) & (last_block < num_entries)",
        ("P8",),
        path="kernels",
        allocator="hisparse-v4",
    ),
)

_INTERLEAVE: Final = (
    Plant(
        "kernel-interleave-plan-askew",
        "A row reads its plan one entry too early for each row before it.",
        "interleave_kernels.py",
        "plan_row_ptr = plan_ptr + row.to(tl.int64) * (1 + shards)",
        "plan_row_ptr = plan_ptr + row.to(tl.int64) * shards",
        ("P1", "P3", "P4", "P8"),
        path="kernels",
        allocator="page-interleave",
    ),
    Plant(
        "kernel-interleave-rounds-off",
        "A second page of the same class is looked for in the next class's share.",
        "interleave_kernels.py",
        "mask=mine, other=0) + k // shards",
        "mask=mine, other=0) + k",
        ("P1", "P3", "P4"),
        path="kernels",
        allocator="page-interleave",
    ),
    Plant(
        "kernel-interleave-class-before",
        "A row starts with the class before its own.",
        "interleave_kernels.py",
        "(start + k) % shards, mask=mine",
        "(start + k + shards - 1) % shards, mask=mine",
        ("P1", "P3", "P4"),
        path="kernels",
        allocator="page-interleave",
    ),
    Plant(
        "kernel-interleave-page-after",
        "The kernel reads pages for whole blocks, past those taken.",
        "interleave_kernels.py",
        "takes = mine & (index >= 0) & (index < num_pages)",
        "takes = index >= 0",
        ("P7",),
        path="kernels",
        allocator="page-interleave",
    ),
    Plant(
        "kernel-interleave-writes-on",
        "The kernel stores past its row, into the next rows' part of the output.",
        "interleave_kernels.py",
        "page * page_size + j % page_size, mask=mine)",
        "page * page_size + j % page_size, mask=out_start + j < num_tokens)",
        ("P8",),
        path="kernels",
        allocator="page-interleave",
    ),
    Plant(
        "kernel-interleave-unwritten",
        "The kernel leaves the last element of the output unwritten.",
        "interleave_kernels.py",
        "mine = (j < grown) & (out_start + j < num_tokens)",
        "mine = (j < grown) & (out_start + j < num_tokens - 1)",
        ("P8",),
        path="kernels",
        allocator="page-interleave",
    ),
)


def _also(plant_id: str, name: str, allocator: str) -> Plant:
    """The same fault in a kernel that several kinds share, hunted on another of them."""
    (plant,) = (plant for plant in _SWA if plant.id == f"kernel-swa-{plant_id}")
    return replace(plant, id=f"kernel-{name}-{plant_id}", allocator=allocator)


_CHOICE: Final = (
    Plant(
        "kernel-swa-peers-from-the-back",
        "The extend kernel hands out the right swa pages, but the last first, unlike the torch path.",
        "swa_kernels.py",
        "        page = tl.load(swa_pages_ptr + index, mask=takes, other=0)\n        peer",
        "        page = tl.load(swa_pages_ptr + (num_swa_pages - 1 - index), mask=takes, other=0)\n"
        "        peer",
        ("P16",),
        path="kernels",
        allocator="swa",
        exact=False,
    ),
)

SIDE_KERNEL_PLANTS: Final = (
    _SWA
    + _DEVICE
    + _INTERLEAVE
    + _CHOICE
    + (
        _also("page-after", "hisparse", "hisparse"),
        _also("entry-before", "hisparse", "hisparse"),
        _also("maps-on", "hisparse", "hisparse"),
        _also("one-entry-cleared", "hisparse", "hisparse"),
        _also("clears-on", "hisparse", "hisparse"),
        _also("one-entry-cleared", "v4", "hisparse-v4"),
    )
)
