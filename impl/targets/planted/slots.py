"""Faults in how the slots of a batch are computed: by plain torch and by the kernels, memory faults included.

Not covered: what happens before and after (`pools`).
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_REFERENCE: Final = (
    Plant(
        "sum-inclusive",
        "The prefix sums include the row itself.",
        "reference.py",
        "return torch.cumsum(counts, 0) - counts",
        "return torch.cumsum(counts, 0)",
        ("P1", "P3", "P4", "P5", "P6"),
    ),
    Plant(
        "boundary-off-by-one",
        "A page that ends exactly at the prefix is taken to have room.",
        "reference.py",
        "return torch.where(position < boundary, continued,",
        "return torch.where(position <= boundary, continued,",
        ("P1", "P3", "P4", "P9"),
    ),
    Plant(
        "old-and-new-swapped",
        "Room in the old page is filled from the new one, and the other way round.",
        "reference.py",
        "return torch.where(position < boundary, continued,",
        "return torch.where(position >= boundary, continued,",
        ("P1", "P3", "P4", "P5"),
    ),
    Plant(
        "last-loc-repeated",
        "An extend begins on the last slot of the row instead of after it.",
        "reference.py",
        "last_loc.to(torch.int64)[row] + 1 + position",
        "last_loc.to(torch.int64)[row] + position",
        ("P5",),
    ),
    Plant(
        "decode-starts-late",
        "A decode starts a page one token late.",
        "reference.py",
        "starts = (seq_lens.to(torch.int64) - 1) % page_size == 0",
        "starts = seq_lens.to(torch.int64) % page_size == 0",
        ("P4", "P5", "P6"),
    ),
    Plant(
        "page-before",
        "A gather is off by one and begins with the padding page.",
        "reference.py",
        "torch.where(wanted, index + 1, 0)",
        "torch.where(wanted, index, 0)",
        ("P3",),
    ),
    Plant(
        "slots-wrap-at-31-bits",
        "New slots of an extend are computed in 32 bits.",
        "reference.py",
        "return torch.where(position < boundary, continued, page * page_size + position % page_size)",
        "return torch.where(position < boundary, continued, (page * page_size + position % page_size).int())",
        ("P9",),
    ),
    Plant(
        "last-loc-wraps-at-31-bits",
        "A decode that goes on in its page computes in 32 bits.",
        "reference.py",
        "last_loc.to(torch.int64) + 1)",
        "last_loc.to(torch.int32) + 1)",
        ("P5",),
    ),
    Plant(
        "slots-of-32-bits",
        "alloc_decode answers with an int32 tensor.",
        "reference.py",
        "return torch.where(starts, page * page_size, last_loc.to(torch.int64) + 1)",
        "return torch.where(starts, page * page_size, last_loc.to(torch.int64) + 1).int()",
        ("P9",),
    ),
    Plant(
        "lengths-changed",
        "alloc_decode counts the caller's own lengths down.",
        "reference.py",
        "starts = (seq_lens.to(torch.int64) - 1) % page_size == 0",
        "starts = seq_lens.to(torch.int64).sub_(1) % page_size == 0",
        ("P7",),
    ),
)

_KERNELS: Final = (
    Plant(
        "kernel-page-after",
        "The extend kernel reads one page past those taken when a batch ends with a full page, and drops it.",
        "kernels.py",
        "takes = mine & (j >= room) & (index < num_pages)",
        "takes = (j <= grown) & (j >= room)",
        ("P7",),
        path="kernels",
    ),
    Plant(
        "kernel-decode-page-after",
        "The decode kernel reads a page for rows that need none, one past the end after the last start.",
        "kernels.py",
        "mask=starts & (index < num_pages), other=0)",
        "mask=mine, other=0)",
        ("P7",),
        path="kernels",
    ),
    Plant(
        "kernel-program-too-many",
        "The extend kernel is launched with one program more than there are rows.",
        "kernels.py",
        "alloc_extend_kernel[(prefix_lens.numel(),)](",
        "alloc_extend_kernel[(prefix_lens.numel() + 1,)](",
        ("P7", "P8"),
        path="kernels",
    ),
    Plant(
        "kernel-writes-on",
        "The extend kernel stores past its row, into the next rows' part of the output.",
        "kernels.py",
        "mask=mine & (out_start + j < num_tokens))",
        "mask=out_start + j < num_tokens)",
        ("P8",),
        path="kernels",
    ),
    Plant(
        "kernel-tail-unmasked",
        "The decode kernel stores a whole block, whatever the batch.",
        "kernels.py",
        "tl.where(starts, page * page_size, last_loc + 1), mask=mine)",
        "tl.where(starts, page * page_size, last_loc + 1))",
        ("P7",),
        path="kernels",
    ),
    Plant(
        "kernel-writes-one-past",
        "The extend kernel stores one element just past the output.",
        "kernels.py",
        "        first += BLOCK_TOKENS\n",
        "        first += BLOCK_TOKENS\n    if row == 0:\n        tl.store(out_ptr + num_tokens, grown)\n",
        ("P7",),
        path="kernels",
    ),
    Plant(
        "kernel-launched-by-row",
        "The decode kernel is launched once for every row of the batch, each time for all of it.",
        "kernels.py",
        "    if batch:\n        alloc_decode_kernel[",
        "    for _ in range(batch):\n        alloc_decode_kernel[",
        ("P15",),
        path="kernels",
    ),
    Plant(
        "kernel-refuses-late",
        "alloc_extend launches its kernel before it refuses, which reads one page past the free list.",
        "paged.py",
        "        if num_new_pages > self.free_pages.numel():\n"
        "            return None\n"
        "        compute = alloc_extend_triton",
        "        if num_new_pages > self.free_pages.numel():\n"
        "            if self.use_triton_kernels:\n"
        "                from kvproof.impl.kernels import alloc_extend_kernel\n\n"
        "                out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)\n"
        "                tensors = prefix_lens, seq_lens, last_loc, self.free_pages, out\n"
        "                sizes = self.free_pages.numel() + 1, extend_num_tokens, self.page_size, 256, 1024\n"
        "                alloc_extend_kernel[(prefix_lens.numel(),)](*tensors, *sizes)\n"
        "            return None\n"
        "        compute = alloc_extend_triton",
        ("P7",),
        path="kernels",
    ),
    Plant(
        "kernel-element-unwritten",
        "The extend kernel leaves the last element of the output unwritten.",
        "kernels.py",
        "mask=mine & (out_start + j < num_tokens))",
        "mask=mine & (out_start + j < num_tokens - 1))",
        ("P8",),
        path="kernels",
    ),
    Plant(
        "kernel-writes-twice",
        "The decode kernel stores a placeholder before the slot.",
        "kernels.py",
        "    tl.store(out_ptr + rows, tl.where(",
        "    tl.store(out_ptr + rows, last_loc, mask=mine)\n    tl.store(out_ptr + rows, tl.where(",
        ("P8",),
        path="kernels",
    ),
    Plant(
        "kernel-sum-inclusive",
        "A row of the extend kernel counts itself among the rows before it.",
        "kernels.py",
        "earlier = rows < row\n",
        "earlier = rows <= row\n",
        ("P1", "P3", "P4", "P5", "P8"),
        path="kernels",
    ),
    Plant(
        "kernel-room-off-by-one",
        "The extend kernel puts one token too many behind the old page.",
        "kernels.py",
        "slot = tl.where(j < room,",
        "slot = tl.where(j <= room,",
        ("P1", "P3", "P4", "P9"),
        path="kernels",
    ),
    Plant(
        "kernel-decode-starts-late",
        "The decode kernel starts a page one token late.",
        "kernels.py",
        "starts = mine & ((seq - 1) % page_size == 0)",
        "starts = mine & (seq % page_size == 0)",
        ("P3", "P4", "P5"),
        path="kernels",
    ),
    Plant(
        "kernel-batch-from-the-back",
        "The extend kernel hands out the right pages, but the last of them first, unlike the torch path.",
        "kernels.py",
        "index = page_start + k // page_size",
        "index = num_pages - 1 - page_start - k // page_size",
        ("P16",),
        path="kernels",
        exact=False,
    ),
    Plant(
        "kernel-wraps-at-31-bits",
        "The extend kernel computes the start of a page in 32 bits.",
        "kernels.py",
        "page * page_size + k % page_size)",
        "(page * page_size).to(tl.int32) + k % page_size)",
        ("P3", "P9"),
        path="kernels",
    ),
)

SLOT_PLANTS: Final = _REFERENCE + _KERNELS
