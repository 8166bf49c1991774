"""Faults in what the allocators keep and in what they refuse: lists, groups, releases, page counts.

Not covered: which slots a batch gets (`slots`).
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_LISTS: Final = (
    Plant(
        "padding-page-free",
        "The initial free list begins with the padding page.",
        "base.py",
        "torch.arange(1, self.num_pages + 1,",
        "torch.arange(0, self.num_pages,",
        ("P3",),
    ),
    Plant(
        "last-page-lost",
        "The initial free list ends one page early.",
        "base.py",
        "torch.arange(1, self.num_pages + 1,",
        "torch.arange(1, self.num_pages,",
        ("P2",),
    ),
    Plant(
        "staged-not-counted",
        "available_size() leaves staged pages out.",
        "base.py",
        "(self.free_pages.numel() + sum(ids.numel() for ids in self.staged_pages)) * self.page_size",
        "self.free_pages.numel() * self.page_size",
        ("P2",),
    ),
    Plant(
        "merge-loses-staged",
        "A merge sorts the free list and forgets the staged pages.",
        "base.py",
        "torch.sort(self.get_all_free_pages()).values",
        "torch.sort(self.free_pages).values",
        ("P2", "P6"),
    ),
    Plant(
        "merge-unsorted",
        "A merge joins the staged pages to the free list without sorting.",
        "base.py",
        "torch.sort(self.get_all_free_pages()).values",
        "self.get_all_free_pages()",
        ("P14",),
    ),
    Plant(
        "merge-when-exactly-short",
        "alloc_extend merges by the exact page count and not by the estimate all ranks share.",
        "paged.py",
        "self._merge_if_short(extend_num_tokens // self.page_size + prefix_lens.numel() + 1)",
        "self._merge_if_short(num_new_pages)",
        ("P14",),
    ),
    Plant(
        "decode-never-merges",
        "alloc_decode refuses while staged pages would do.",
        "paged.py",
        "        self._merge_if_short(batch)\n",
        "",
        ("P2",),
    ),
    Plant(
        "released-to-the-end",
        "The paged allocator puts released pages at the end of its free list.",
        "paged.py",
        "_releases_to_front = True",
        "_releases_to_front = False",
        ("P14",),
    ),
    Plant(
        "token-free-reversed",
        "The token allocator appends released slots in reverse order.",
        "base.py",
        "torch.cat((self.free_pages, ids))",
        "torch.cat((self.free_pages, ids.flip(0)))",
        ("P14",),
        allocator="token",
    ),
    Plant(
        "clear-keeps-staged",
        "clear() forgets to empty the staged pages.",
        "base.py",
        "self.staged_pages = []\n        self._held = None",
        'self.staged_pages = getattr(self, "staged_pages", [])\n        self._held = None',
        ("P1", "P2"),
        allocator="token",
    ),
    Plant(
        "resize-keeps-size",
        "resize() clears the pool but keeps its old page count.",
        "base.py",
        'self.size = positive("resize", "size", size)',
        'positive("resize", "size", size)',
        ("P2",),
    ),
    Plant(
        "order-of-birth",
        "The initial order of the free list depends on how many allocators this process has cleared before.",
        "base.py",
        "self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)\n",
        'PoolAllocator.births = getattr(PoolAllocator, "births", 0) + 1\n'
        "        first = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)\n"
        "        self.free_pages = first.roll(PoolAllocator.births)\n",
        ("P14",),
        exact=False,
    ),
)

_CHECK: Final = """\
        if num_new_pages > self.free_pages.numel():
            return None
"""
_COMPUTE: Final = """\
        compute = alloc_extend_triton if self.use_triton_kernels else alloc_extend_reference
        taken = self.free_pages[:num_new_pages]
        slots = compute(prefix_lens, seq_lens, last_loc, taken, extend_num_tokens, self.page_size)
"""

_ALLOCATION: Final = (
    Plant(
        "alloc-unlimited",
        "alloc() answers although the free list is too short.",
        "base.py",
        "        if pages > self.free_pages.numel():\n            return None\n        offsets",
        "        offsets",
        ("P2",),
        allocator="token",
    ),
    Plant(
        "last-page-refused",
        "alloc_decode refuses when it needs exactly what is free.",
        "paged.py",
        "self._merge_if_short(batch)\n        if num_new_pages > self.free_pages.numel():",
        "self._merge_if_short(batch)\n        if num_new_pages >= self.free_pages.numel():",
        ("P2",),
    ),
    Plant(
        "capacity-checked-late",
        "alloc_extend computes slots first and looks afterwards whether the pages are there.",
        "paged.py",
        _CHECK + _COMPUTE,
        _COMPUTE + _CHECK,
        ("P6",),
    ),
    Plant(
        "refusal-takes-pages",
        "alloc_decode has taken what was free when it refuses.",
        "paged.py",
        "self._merge_if_short(batch)\n"
        "        if num_new_pages > self.free_pages.numel():\n"
        "            return None",
        "self._merge_if_short(batch)\n"
        "        if num_new_pages > self.free_pages.numel():\n"
        "            self.free_pages = self.free_pages[num_new_pages:]\n"
        "            return None",
        ("P6",),
    ),
    Plant(
        "pages-not-taken",
        "The pages alloc_extend hands out stay in the free list.",
        "paged.py",
        "(seq_lens_cpu - prefix_lens_cpu).tolist())\n"
        "        self.free_pages = self.free_pages[num_new_pages:]\n",
        "(seq_lens_cpu - prefix_lens_cpu).tolist())\n",
        ("P1",),
    ),
    Plant(
        "twelfth-extend-forgets",
        "Every twelfth alloc_extend that takes pages leaves the first of them in the free list.",
        "paged.py",
        "(seq_lens_cpu - prefix_lens_cpu).tolist())\n"
        "        self.free_pages = self.free_pages[num_new_pages:]\n",
        "(seq_lens_cpu - prefix_lens_cpu).tolist())\n"
        '        self.extends = getattr(self, "extends", 0) + (num_new_pages > 0)\n'
        "        kept = self.free_pages[: num_new_pages and self.extends % 12 == 0]\n"
        "        self.free_pages = torch.cat((kept, self.free_pages[num_new_pages:]))\n",
        ("P1",),
    ),
    Plant(
        "pages-counted-short",
        "alloc_extend rounds the page count of every length the wrong way.",
        "paged.py",
        "(lens.to(torch.int64) + (self.page_size - 1)) // self.page_size",
        "(lens.to(torch.int64) + self.page_size) // self.page_size",
        ("P2", "P4", "P6"),
    ),
    Plant(
        "decode-count-off-by-one",
        "alloc_decode counts the rows whose page has just become full, not those that start one.",
        "paged.py",
        "((seq_lens_cpu - 1) % self.page_size == 0).sum()",
        "(seq_lens_cpu % self.page_size == 0).sum()",
        ("P1", "P2", "P3", "P6"),
    ),
    Plant(
        "batch-from-the-back",
        "A batch gets the right pages, but its last row the first of them.",
        "paged.py",
        "taken = self.free_pages[:num_new_pages]",
        "taken = self.free_pages[:num_new_pages].flip(0)",
        ("P14",),
    ),
)

_RELEASE: Final = (
    Plant(
        "free-first-page-only",
        "free() releases the page of its first slot and leaks the others.",
        "paged.py",
        "self._take_back((free_index // self.page_size)",
        "self._take_back((free_index[:1] // self.page_size)",
        ("P2", "P11"),
    ),
    Plant(
        "free-repeats",
        "free() releases a page once for every slot named of it.",
        "paged.py",
        "(free_index // self.page_size).to(torch.int64), repeats=True)",
        "(free_index // self.page_size).to(torch.int64), repeats=False)",
        ("P1", "P11", "P14"),
    ),
    Plant(
        "segment-tail-leaks",
        "free_segment leaks a last page that is only partly filled.",
        "base.py",
        "slots[:: self.page_size] // self.page_size",
        "slots[self.page_size - 1 :: self.page_size] // self.page_size",
        ("P2", "P11"),
    ),
    Plant(
        "segments-first-only",
        "free_segments releases the first segment only.",
        "base.py",
        "        for slots, _ in parts:\n            #",
        "        for slots, _ in parts[:1]:\n            #",
        ("P2", "P11"),
    ),
    Plant(
        "token-free-by-reference",
        "The token allocator keeps the caller's tensor while a free is staged or held.",
        "token.py",
        "free_index.to(torch.int64, copy=True)",
        "free_index.to(torch.int64)",
        ("P11",),
        allocator="token",
    ),
    Plant(
        "page-ids-by-reference",
        "free_page_ids keeps the caller's tensor while it is staged or held.",
        "base.py",
        "page_ids.to(torch.int64, copy=True)",
        "page_ids.to(torch.int64)",
        ("P11",),
    ),
    Plant(
        "group-not-deferred",
        "A free inside a group acts at once.",
        "base.py",
        "        if self._held is not None:\n            self._held.append((ids, repeats))\n        else:",
        "        if True:",
        ("P1", "P2"),
    ),
    Plant(
        "group-repeats",
        "The end of a group releases a page as often as its frees named it.",
        "base.py",
        "self._release(torch.unique(torch.cat(sets)))",
        "self._release(torch.cat(sets))",
        ("P11", "P14"),
    ),
    Plant(
        "group-ids-first",
        "The end of a group releases page ids before the slots of its frees.",
        "base.py",
        "        if sets:\n"
        "            self._release(torch.unique(torch.cat(sets)))\n"
        "        if lists:\n"
        "            self._release(torch.cat(lists))\n",
        "        if lists:\n"
        "            self._release(torch.cat(lists))\n"
        "        if sets:\n"
        "            self._release(torch.unique(torch.cat(sets)))\n",
        ("P14",),
    ),
    Plant(
        "group-released-twice",
        "All groups share one list, so that the end of the second releases again what the first held.",
        "base.py",
        "        self._held = []\n",
        '        self._held = self.__dict__.setdefault("_group", [])\n',
        ("P11",),
    ),
    Plant(
        "group-survives-clear",
        "clear() leaves a group open.",
        "base.py",
        "self.staged_pages = []\n        self._held = None",
        'self.staged_pages = []\n        self._held = getattr(self, "_held", None)',
        ("P2", "P6"),
    ),
)

_MISUSE: Final = (
    Plant(
        "double-free-accepted",
        "Checked mode takes a free of what is not live for a lawful one.",
        "checked.py",
        '        if page in self._released_by:\n            remedy = "Free every page once;',
        '        self._live[page] = [(1, Owner("nobody", None))]\n'
        "        return\n"
        '        if page in self._released_by:\n            remedy = "Free every page once;',
        ("P6",),
        misuse=True,
    ),
    Plant(
        "half-page-accepted",
        "Checked mode lets a free of one slot release a page whose other slots are live.",
        "checked.py",
        "            if kept:\n",
        "            if False:\n",
        ("P6",),
        misuse=True,
    ),
    Plant(
        "last-loc-unchecked",
        "Checked mode no longer compares last_loc with the prefix.",
        "checked.py",
        "if (last + 1) % size != prefix % size:",
        "if False:",
        ("P6",),
        misuse=True,
    ),
    Plant(
        "nested-group-accepted",
        "A second free_group_begin starts a new group and forgets the first.",
        "base.py",
        "        if self._held is not None:\n            raise AllocatorError(\n",
        "        if False:\n            raise AllocatorError(\n",
        ("P6",),
        misuse=True,
    ),
    Plant(
        "refused-segments-begun",
        "A refused free_segments has released its first segment.",
        "base.py",
        "            if page < page_after:\n",
        "            if page < page_after:\n"
        "                first = parts[0][0][:: self.page_size] // self.page_size\n"
        "                self._take_back(first.to(torch.int64), repeats=False)\n",
        ("P6",),
        misuse=True,
    ),
    Plant(
        "odd-size-floored",
        "alloc() rounds a size that is no multiple of the page size down.",
        "base.py",
        "if pages < 0 or remainder:",
        "if pages < 0:",
        ("P6",),
        misuse=True,
    ),
)

POOL_PLANTS: Final = _LISTS + _ALLOCATION + _RELEASE + _MISUSE
