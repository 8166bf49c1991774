"""Faults of allocators that deal from several lists: state slots set aside for a batch, pages sharded over
classes.

Not covered: kernels (`side_kernels.py`).
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_MAMBA: Final = (
    Plant(
        "mamba-dummy-handed-out",
        "The free list begins with the dummy.",
        "mamba.py",
        "torch.arange(1, self.size + 1,",
        "torch.arange(0, self.size,",
        ("P3",),
        allocator="mamba",
    ),
    Plant(
        "mamba-begin-loses-aside",
        "A begin inside a group loses what the group had set aside.",
        "mamba.py",
        "        self._return_aside()\n        if count <=",
        "        if count <=",
        ("P1", "P2"),
        allocator="mamba",
    ),
    Plant(
        "mamba-clear-keeps-aside",
        "clear() leaves what is set aside where it is, and frees it as well.",
        "mamba.py",
        "self._aside = self.free_slots[:0]\n        self._ledger",
        'self._aside = getattr(self, "_aside", self.free_slots[:0])\n        self._ledger',
        ("P1", "P2", "P6", "P14"),
        allocator="mamba",
    ),
    Plant(
        "mamba-single-from-list",
        "alloc(1) takes from the free list and not from what is set aside.",
        "mamba.py",
        "from_aside = need == 1 and self._aside.numel() > 0",
        "from_aside = False",
        ("P2", "P14"),
        allocator="mamba",
    ),
    Plant(
        "mamba-any-from-aside",
        "alloc(n) takes from what is set aside whenever that is enough.",
        "mamba.py",
        "from_aside = need == 1 and self._aside.numel() > 0",
        "from_aside = 0 < need <= self._aside.numel()",
        ("P2", "P14"),
        allocator="mamba",
    ),
    Plant(
        "mamba-aside-kept",
        "A slot that was set aside and handed out stays set aside.",
        "mamba.py",
        "            self._aside = self._aside[need:]\n",
        "            pass\n",
        ("P1", "P6"),
        allocator="mamba",
    ),
    Plant(
        "mamba-part-set-aside",
        "alloc_group_begin() sets aside what there is when there is less than asked for.",
        "mamba.py",
        "        if count <= self.free_slots.numel():\n            self._aside",
        "        if True:\n            self._aside",
        ("P2",),
        allocator="mamba",
    ),
    Plant(
        "mamba-end-keeps-rest",
        "alloc_group_end() drops what is left.",
        "mamba.py",
        "        self.free_slots = torch.cat((self.free_slots, self._aside))\n",
        "",
        ("P2",),
        allocator="mamba",
    ),
    Plant(
        "mamba-rest-to-the-front",
        "What is left of a group goes to the front of the free list.",
        "mamba.py",
        "torch.cat((self.free_slots, self._aside))",
        "torch.cat((self._aside, self.free_slots))",
        ("P14",),
        allocator="mamba",
    ),
    Plant(
        "mamba-aside-counted",
        "available_size() counts what is set aside.",
        "mamba.py",
        "        return self.free_slots.numel()\n",
        "        return self.free_slots.numel() + self._aside.numel()\n",
        ("P2",),
        allocator="mamba",
    ),
    Plant(
        "mamba-double-free-accepted",
        "Checked mode takes a free of any slot for a lawful one.",
        "mamba.py",
        "        if self._ledger is not None:\n            self._ledger.release_slots(",
        "        if self._ledger is not None:\n"
        "            self._ledger._live.update((slot, [(1, None)]) for slot in free_index.tolist())\n"
        "            self._ledger.release_slots(",
        ("P6",),
        allocator="mamba",
        misuse=True,
    ),
    Plant(
        "mamba-negative-size-accepted",
        "A negative number of slots counts as none.",
        "mamba.py",
        "number = operator.index(value)",
        "number = max(operator.index(value), 0)",
        ("P6",),
        allocator="mamba",
        misuse=True,
    ),
)

_REFUSED: Final = """\
        if any(need > count for need, count in zip(needs, self.class_free_page_counts(), strict=True)):
            return None
"""

_INTERLEAVE: Final = (
    Plant(
        "interleave-prefix-ignored",
        "A row that grows starts again with the class of its base.",
        "interleave.py",
        "start = (base + prefix // ps) % shards",
        "start = base % shards",
        ("P4", "P6"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-class-after",
        "A row starts with the class after its own.",
        "interleave_reference.py",
        "(starts[row] + place) % shards",
        "(starts[row] + place + 1) % shards",
        ("P1", "P4", "P6"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-fullest-class",
        "A base is drawn from the class with fewest pages.",
        "interleave.py",
        "return counts.index(max(counts))",
        "return counts.index(min(counts))",
        ("P2", "P14"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-last-on-ties",
        "Where classes tie, the last of them is drawn.",
        "interleave.py",
        "return counts.index(max(counts))",
        "return max(range(len(counts)), key=lambda rank: (counts[rank], rank))",
        ("P2", "P14"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-draws-at-once",
        "All bases of a batch are drawn by what was free before it.",
        "interleave.py",
        "                counts[rank] -= share\n",
        "",
        ("P2", "P14"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-refusal-writes-bases",
        "A refused alloc_extend has written the drawn bases into the caller's list.",
        "interleave.py",
        _REFUSED,
        _REFUSED.replace(
            "            return None\n", "            given[:] = bases\n            return None\n"
        ),
        ("P6",),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-refusal-merges",
        "A refused alloc_extend has merged staged pages.",
        "interleave.py",
        _REFUSED,
        "        if any(need > free.numel() for need, free in zip(needs, self.class_free_pages)):\n"
        "            self.merge_and_sort_free()\n" + _REFUSED,
        ("P14",),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-base-not-written",
        "The bases drawn are not written into the caller's list.",
        "interleave.py",
        "        given[:] = bases\n",
        "",
        ("P14",),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-staged-not-counted",
        "Staged pages count for nothing.",
        "interleave.py",
        "            free.numel() + sum(ids.numel() for ids in staged)\n            for free, staged",
        "            free.numel()\n            for free, staged",
        ("P2", "P14"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-available-is-sum",
        "available_size() is what all classes have together.",
        "interleave.py",
        "self.shard_size * self.page_size * min(self.class_free_page_counts())",
        "self.page_size * sum(self.class_free_page_counts())",
        ("P2",),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-aggregate-is-least",
        "aggregate_free_size() is what can be had at once.",
        "interleave.py",
        "self.page_size * sum(self.class_free_page_counts())",
        "self.available_size()",
        ("P2",),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-freed-next-door",
        "A freed page goes to the class beside its own.",
        "interleave.py",
        "owners = ids % self.shard_size",
        "owners = (ids + 1) % self.shard_size",
        ("P2", "P6", "P9", "P11"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-merges-short-classes",
        "A merge joins only the staged pages of classes that have run out.",
        "interleave.py",
        "            if staged:\n                joined",
        "            if staged and not self.class_free_pages[rank].numel():\n                joined",
        ("P2", "P6", "P8", "P14"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-padding-free",
        "Class lists begin with the padding pages.",
        "interleave.py",
        "torch.arange(1, self.num_pages // shards + 1,",
        "torch.arange(0, self.num_pages // shards,",
        ("P3", "P6"),
        allocator="page-interleave",
    ),
    Plant(
        "interleave-uneven-prefix-accepted",
        "An extend from inside a page is answered as if there were no room.",
        "interleave.py",
        "        self._require_lens(call, prefixes, seqs, extend_num_tokens)\n",
        "        if any(prefix % self.page_size for prefix in prefixes):\n"
        "            return None\n"
        "        self._require_lens(call, prefixes, seqs, extend_num_tokens)\n",
        ("P6",),
        allocator="page-interleave",
        misuse=True,
    ),
)

DEALT_PLANTS: Final = _MAMBA + _INTERLEAVE
