"""Faults of pools with two sides, as the sliding-window allocator has them: sizes, the mapping between the
sides, what is taken from both or from neither, and what a release of one side leaves.

Not covered: its variants (`variants.py`), device sides (`devices.py`), and the kernels (`side_kernels.py`).
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_KEPT: Final = (
    Plant(
        "swa-side-not-counted",
        "available_size() says what the full side has, however little the other has.",
        "swa_sides.py",
        "return min(self.full_available_size(), self.swa_available_size())",
        "return self.full_available_size()",
        ("P2",),
        allocator="swa",
    ),
    Plant(
        "swa-mapping-end-lost",
        "clear() overwrites the -1 at the end of the mapping.",
        "swa_sides.py",
        "mapping[:-1].zero_()",
        "mapping.zero_()",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-clear-keeps-mapping",
        "clear() leaves every entry of the mapping as it is.",
        "swa_sides.py",
        "        mapping[:-1].zero_()\n",
        "",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-clear-one-side",
        "clear() forgets the swa pool.",
        "swa_sides.py",
        "        full.clear()\n        swa.clear()\n",
        "        full.clear()\n",
        ("P2", "P11"),
        allocator="swa",
    ),
    Plant(
        "swa-mapping-kept-on-resize",
        "resize() goes on with a mapping of the old size.",
        "swa_sides.py",
        ".resize(swa)\n        self._make_mapping()\n",
        ".resize(swa)\n",
        ("P9",),
        allocator="swa",
    ),
    Plant(
        "swa-mapping-short",
        "The mapping has no room for the slots of the last page.",
        "swa_sides.py",
        "entries = self.full_attn_allocator.size + self.page_size",
        "entries = self.full_attn_allocator.size",
        ("P9",),
        allocator="swa",
    ),
    Plant(
        "swa-remap-ignored",
        "set_full_to_swa_mapping() does nothing.",
        "swa_sides.py",
        "mapping[full_indices.to(torch.int64)] = swa_indices.to(torch.int64)",
        "pass",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-remap-late",
        "set_full_to_swa_mapping() takes effect when it is called the next time.",
        "swa_sides.py",
        "mapping[full_indices.to(torch.int64)] = swa_indices.to(torch.int64)",
        'waiting = getattr(self, "_edit", (full_indices[:0].to(torch.int64), swa_indices[:0]))\n'
        "            mapping[waiting[0].clamp(max=mapping.numel() - 2)] = waiting[1]\n"
        "            self._edit = full_indices.to(torch.int64), swa_indices.to(torch.int64)",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-unmap-ignored",
        "clear_full_to_swa_mapping() does nothing.",
        "swa_sides.py",
        "mapping.index_fill_(0, full_indices.to(torch.int64), 0)",
        "pass",
        ("P10",),
        allocator="swa",
    ),
)

_REFUSED: Final = """\
        if not self._fit(num_full, num_swa):
            return None
        # Each side merges"""
_REFUSED_DECODE: Final = """\
        if not self._fit(need, need):
            return None
        full._merge_if_short(seq_lens.numel())
"""
_REFUSED_ALLOC: Final = """\
        if not self._fit(need, need):
            return None
        full._merge_if_short(need)
"""
_COMPUTED: Final = """\
        slots = compute(prefix_lens, seq_lens, last_loc, *pages, mapping, tokens, tail, self.page_size)
"""
_TAIL: Final = """\
        offsets = torch.arange(page_size, device=slots.device)
        peers[num_tokens - tail :] = (swa_pages[:, None] * page_size + offsets).reshape(-1)[:tail]
"""

_ALLOCATION: Final = (
    Plant(
        "swa-extend-keeps-full",
        "alloc_extend has taken the full pages when it refuses for want of swa pages.",
        "swa.py",
        _REFUSED,
        _REFUSED.replace(
            "            return None\n",
            "            if tail is None and self._fit(num_full, 0):\n"
            "                full.free_pages = full.free_pages[num_full:]\n"
            "            return None\n",
        ),
        ("P6",),
        allocator="swa",
    ),
    Plant(
        "swa-tail-keeps-swa",
        "alloc_extend_swa_tail has taken the tail's pages when it refuses for want of full ones.",
        "swa.py",
        _REFUSED,
        _REFUSED.replace(
            "            return None\n",
            "            if tail is not None and self._fit(0, num_swa):\n"
            "                swa.free_pages = swa.free_pages[num_swa:]\n"
            "            return None\n",
        ),
        ("P6",),
        allocator="swa",
    ),
    Plant(
        "swa-decode-keeps-full",
        "alloc_decode has taken the full pages when it refuses for want of swa pages.",
        "swa.py",
        _REFUSED_DECODE,
        _REFUSED_DECODE.replace(
            "            return None\n",
            "            if self._fit(need, 0):\n"
            "                full.free_pages = full.free_pages[need:]\n"
            "            return None\n",
        ),
        ("P6",),
        allocator="swa",
    ),
    Plant(
        "swa-alloc-keeps-swa",
        "alloc() has taken the swa slots when it refuses for want of full ones.",
        "swa.py",
        _REFUSED_ALLOC,
        _REFUSED_ALLOC.replace(
            "            return None\n",
            "            if self._fit(0, need):\n"
            "                swa.free_pages = swa.free_pages[need:]\n"
            "            return None\n",
        ),
        ("P6",),
        allocator="swa",
    ),
    Plant(
        "swa-refusal-merges",
        "A refused alloc_extend has merged the full side's staged pages.",
        "swa.py",
        _REFUSED,
        _REFUSED.replace(
            "            return None\n", "            full.merge_and_sort_free()\n            return None\n"
        ),
        ("P14",),
        allocator="swa",
    ),
    Plant(
        "swa-side-merged-by-count",
        "The swa side merges by the exact page count and not by the estimate all ranks share.",
        "swa.py",
        "swa._merge_if_short(max(part // self.page_size + rows + 1, num_swa))",
        "swa._merge_if_short(num_swa)",
        ("P14",),
        allocator="swa",
    ),
    Plant(
        "swa-pages-not-taken",
        "The swa pages that an extend hands out stay in the free list.",
        "swa.py",
        "full.free_pages[num_full:], swa.free_pages[num_swa:]",
        "full.free_pages[num_full:], swa.free_pages",
        ("P1", "P2"),
        allocator="swa",
    ),
    Plant(
        "swa-tail-counted-up",
        "A tail of whole pages takes one page more than it fills.",
        "swa.py",
        "num_full if tail is None else -(-tail // self.page_size)",
        "num_full if tail is None else tail // self.page_size + 1",
        ("P2",),
        allocator="swa",
    ),
    Plant(
        "swa-tail-goes-on",
        "A tail goes on behind the row's last peer and does not start a page.",
        "swa_reference.py",
        _TAIL,
        "        behind = prefix_lens, prefix_lens + tail, _peers(mapping, last_loc), swa_pages\n"
        "        peers[num_tokens - tail :] = alloc_extend_reference(*behind, tail, page_size)\n",
        ("P1", "P4", "P6", "P10"),
        allocator="swa",
    ),
    Plant(
        "swa-head-mapped",
        "An extend with a tail gives peers to its first tokens and not to its last.",
        "swa_reference.py",
        "peers[num_tokens - tail :] = ",
        "peers[:tail] = ",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-stale-head",
        "The head of an extend with a tail keeps the entries that its slots had in an earlier life.",
        "swa.py",
        _COMPUTED,
        _COMPUTED
        + "        earlier, head = getattr(self, '_earlier', mapping), slots[: tokens - (tail or 0)]\n"
        "        if tail is not None and earlier.numel() == mapping.numel():\n"
        "            mapping[head] = earlier[head]\n"
        "        self._earlier = mapping.clone()\n",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-goes-on-behind-full",
        "Where a row goes on inside its page, the new peers follow the full slot and not its peer.",
        "swa_reference.py",
        "last_peer = _peers(mapping, last_loc)",
        "last_peer = last_loc",
        ("P4", "P5", "P10"),
        allocator="swa",
    ),
    Plant(
        "swa-decode-behind-full",
        "A decode inside a page puts the peer behind the full slot and not behind its peer.",
        "swa_reference.py",
        "alloc_decode_reference(seq_lens, _peers(mapping, last_loc), swa_pages",
        "alloc_decode_reference(seq_lens, last_loc, swa_pages",
        ("P5", "P10"),
        allocator="swa",
    ),
)

_PEERS: Final = '''\
    def _release_peers(self, slots: Tensor) -> None:
        """Release the swa side of full slots as `free` does."""
'''
_RESOLVED: Final = """\
    _late: tuple[Tensor, ...] = ()

    def free_group_end(self) -> None:
        late, self._late = self._late, ()
        for slots in late:
            self._resolve(slots)
        super().free_group_end()

    def _release_peers(self, slots: Tensor) -> None:
        if self.swa_attn_allocator._held is None:
            self._resolve(slots)
        else:
            self._late = *self._late, slots.clone()

    def _resolve(self, slots: Tensor) -> None:
"""

_RELEASE: Final = (
    Plant(
        "swa-one-entry-cleared",
        "A release clears the entry of one slot of each page and leaves the others.",
        "swa_reference.py",
        "mapping.index_fill_(0, entries.reshape(-1), 0)",
        "mapping.index_fill_(0, entries[:, 0], 0)",
        ("P10",),
        allocator="swa",
    ),
    Plant(
        "swa-page-zero-released",
        "A free of pages without peers releases the padding page of the swa side.",
        "swa.py",
        "        pages = pages[pages > 0]\n",
        "",
        ("P3",),
        allocator="swa",
    ),
    Plant(
        "swa-strays-unheard",
        "Nobody takes the padding page out again when a segment without peers has been released.",
        "swa.py",
        "        self._strays.note(pages)\n",
        "",
        ("P3",),
        allocator="swa",
    ),
    Plant(
        "swa-stray-told-once",
        "Only the first padding page that a segment without peers has released is heard of.",
        "strays.py",
        "return self._heard > heard",
        "return self._heard > heard == 0",
        ("P3",),
        allocator="swa",
    ),
    Plant(
        "swa-peers-at-group-end",
        "A group resolves the peers of what it holds at its end and not when they are freed.",
        "swa.py",
        _PEERS,
        _RESOLVED,
        ("P10", "P11"),
        allocator="swa",
    ),
    Plant(
        "swa-free-keeps-peers",
        "free() forgets the swa side.",
        "swa.py",
        "        self._release_peers(free_index)\n        self._release_full(free_index)\n",
        "        self._release_full(free_index)\n",
        ("P2", "P10"),
        allocator="swa",
    ),
    Plant(
        "swa-segment-repeats",
        "free_segment releases the peer of a page once for every slot.",
        "swa.py",
        "self._release_peers_in_order([slots[:: self.page_size] for slots, _ in parts])",
        "self._release_peers_in_order([slots for slots, _ in parts])",
        ("P1", "P11"),
        allocator="swa",
    ),
    Plant(
        "swa-peers-in-full-order",
        "free() releases swa pages in the order of the full ones and not ascending.",
        "swa.py",
        "            self.swa_attn_allocator._take_back(pages, repeats=True)\n",
        "            self.swa_attn_allocator._take_back(pages, repeats=False)\n",
        ("P14",),
        allocator="swa",
    ),
    Plant(
        "swa-free-full-frees-peers",
        "free_full() releases what the mapping says of its slots too, which is the padding page.",
        "swa.py",
        '            self._pair.free_full("free_full", free_index.tolist(), repeats=self.page_size > 1)\n',
        '            self._pair.free_full("free_full", free_index.tolist(), repeats=self.page_size > 1)\n'
        "        peers = self.full_to_swa_index_mapping[free_index.to(torch.int64)] // self.page_size\n"
        "        self.swa_attn_allocator._take_back(peers, repeats=True)\n",
        ("P3",),
        allocator="swa",
    ),
    Plant(
        "swa-group-end-one-side",
        "free_group_end() releases what the full side held and leaves the swa side's group open.",
        "swa_sides.py",
        "        self.full_attn_allocator.free_group_end()\n"
        "        self.swa_attn_allocator.free_group_end()\n",
        "        self.full_attn_allocator.free_group_end()\n",
        ("P2", "P6", "P11"),
        allocator="swa",
    ),
)

_MISUSE: Final = (
    Plant(
        "swa-mapped-free-full-accepted",
        "Checked mode lets free_full release a page that has a peer.",
        "swa_checked.py",
        "for slot, peer in self._mapped(pages)[:1]:",
        "for slot, peer in self._mapped(pages)[:0]:",
        ("P6",),
        allocator="swa",
        misuse=True,
    ),
    Plant(
        "swa-unmapped-segment-accepted",
        "Checked mode lets free_swa_segment release pages that have no peer.",
        "swa_checked.py",
        "                if page in bare:\n",
        "                if False:\n",
        ("P6",),
        allocator="swa",
        misuse=True,
    ),
    Plant(
        "swa-long-tail-accepted",
        "A tail longer than the extend is cut to it in silence.",
        "swa.py",
        "        tail = operator.index(swa_tail_len)\n",
        "        tail = min(operator.index(swa_tail_len), extend_num_tokens)\n",
        ("P6",),
        allocator="swa",
        misuse=True,
    ),
)

_CHOICE: Final = (
    Plant(
        "swa-side-order-of-birth",
        "The order of the swa pool's free list depends on how many allocators were cleared before.",
        "swa_sides.py",
        "        full.clear()\n        swa.clear()\n",
        "        full.clear()\n        swa.clear()\n"
        '        SwaSides.births = getattr(SwaSides, "births", 0) + 1\n'
        "        swa.free_pages = swa.free_pages.roll(SwaSides.births)\n",
        ("P14",),
        allocator="swa",
        exact=False,
    ),
)

SIDE_PLANTS: Final = _CHOICE + _KEPT + _ALLOCATION + _RELEASE + _MISUSE
