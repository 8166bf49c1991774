"""Faults that end the process that meets them: crashes, hangs, memory without end, an exit.

Hunted with a process to spare only. Not covered: faults that end a GPU's context, not the process (`slots`).
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_TAKEN: Final = """\
(seq_lens_cpu - prefix_lens_cpu).tolist())
        self.free_pages = self.free_pages[num_new_pages:]
"""

DEATH_PLANTS: Final = (
    Plant(
        "decode-crashes",
        "alloc_decode reads address 0 when a row starts a page.",
        "paged.py",
        "        self._merge_if_short(batch)\n",
        "        if num_new_pages:\n"
        "            import ctypes\n\n"
        "            ctypes.string_at(0)\n"
        "        self._merge_if_short(batch)\n",
        ("P7",),
        deadly="crash",
    ),
    Plant(
        "group-end-aborts",
        "free_group_end aborts the process when the group held a free.",
        "base.py",
        "        if sets:\n            self._release(torch.unique(torch.cat(sets)))\n",
        "        if sets:\n            os.abort()\n",
        ("P6",),
        deadly="crash",
    ),
    Plant(
        "last-page-hangs",
        "alloc_extend waits for ever once it has handed out the last free page.",
        "paged.py",
        _TAKEN,
        _TAKEN + "        while num_new_pages and not self.free_pages.numel():\n            pass\n",
        ("P6",),
        deadly="hang",
    ),
    Plant(
        "release-grows",
        "Every release keeps 64 MiB of host memory.",
        "base.py",
        "        if self._held is not None:\n            self._held.append((ids, repeats))\n",
        '        kept = PoolAllocator.__dict__.get("kept", [])\n'
        '        PoolAllocator.kept = [*kept, bytearray(b"\\1" * (64 << 20))]\n'
        "        if self._held is not None:\n            self._held.append((ids, repeats))\n",
        ("P6",),
        deadly="memory",
    ),
    Plant(
        "batch-exits",
        "alloc_extend of more than one row ends the process with status 7.",
        "paged.py",
        "        if num_new_pages is None:\n            num_new_pages = self._count_pages(seq_lens_cpu)",
        "        if prefix_lens_cpu.numel() > 1:\n"
        "            import os\n\n"
        "            os._exit(7)\n"
        "        if num_new_pages is None:\n            num_new_pages = self._count_pages(seq_lens_cpu)",
        ("P6",),
        deadly="exit",
    ),
    Plant(
        "kernel-hangs",
        "The extend kernel loops for ever on a row that takes two pages or more, while memory says it grows.",
        "kernels.py",
        "        first += BLOCK_TOKENS\n",
        "        # Read anew each time, and with stores in the loop: no compiler may drop it.\n"
        "        more = tl.load(seq_lens_ptr + row, volatile=True).to(tl.int64) > prefix\n"
        "        first += tl.where(more & (grown - room > page_size), 0, BLOCK_TOKENS)\n",
        ("P6",),
        path="kernels",
        deadly="hang",
    ),
)
