"""Faults of the sliding-window allocator's variants: a ring for each request, and one pool for both sides.

Not covered: two pools (`sides.py`), whose code these share; their lists are `pools.py`'s.
"""

from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_RING: Final = (
    Plant(
        "ring-room-of-pool",
        "swa_available_size() says what a pool nobody uses has, and not what the rings have.",
        "swa_sides.py",
        "        if self.swa_req_ring:\n            return self._free_rings()\n        self._settle",
        "        self._settle",
        ("P2",),
        allocator="swa-ring",
    ),
    Plant(
        "ring-not-rounded-up",
        "A ring is counted by its tokens and not by whole pages.",
        "swa_sides.py",
        "        return pages * self.page_size\n",
        "        return int(ring_size)\n",
        ("P2",),
        allocator="swa-ring",
    ),
    Plant(
        "ring-counted-as-side",
        "available_size() is no more than the rings have.",
        "swa_sides.py",
        "        if self.swa_req_ring:\n            return self.full_available_size()\n",
        "",
        ("P2",),
        allocator="swa-ring",
    ),
    Plant(
        "ring-free-swa-frees-full",
        "free_swa() with rings releases the full slots.",
        "swa.py",
        "        if self.swa_req_ring or not free_index.numel():\n            return\n",
        "        if self.swa_req_ring:\n            self.full_attn_allocator.free(free_index)\n"
        "        if self.swa_req_ring or not free_index.numel():\n            return\n",
        ("P1", "P6"),
        allocator="swa-ring",
    ),
    Plant(
        "ring-swa-segment-frees-full",
        "free_swa_segment() with rings releases the full slots.",
        "swa.py",
        '        if self.swa_req_ring:\n            return\n        call = "free_swa_segment"\n',
        "        if self.swa_req_ring:\n"
        "            return self.full_attn_allocator.free_segment(free_index, start_pos=start_pos)\n"
        '        call = "free_swa_segment"\n',
        ("P1", "P6"),
        allocator="swa-ring",
    ),
    Plant(
        "ring-maps",
        "alloc_extend() with rings maps the new slots to themselves.",
        "swa.py",
        "            return full.alloc_extend(*lens, last_loc, tokens, num_new_pages)\n",
        "            slots = full.alloc_extend(*lens, last_loc, tokens, num_new_pages)\n"
        "            if slots is not None:\n"
        "                self.full_to_swa_index_mapping[slots] = slots\n"
        "            return slots\n",
        ("P10",),
        allocator="swa-ring",
    ),
    Plant(
        "ring-free-full-ignored",
        "free_full() with rings does nothing.",
        "swa.py",
        "            self.full_attn_allocator.free(free_index)\n            return\n"
        "        if self._pair is not None:\n            self._pair.free_full(",
        "            return\n        if self._pair is not None:\n            self._pair.free_full(",
        ("P2", "P11"),
        allocator="swa-ring",
    ),
    Plant(
        "ring-group-not-opened",
        "free_group_begin() opens a group on the swa side alone.",
        "swa_sides.py",
        "        self.full_attn_allocator.free_group_begin()\n",
        "",
        ("P1", "P2", "P6", "P11"),
        allocator="swa-ring",
    ),
    Plant(
        "ring-free-untold",
        "free() with rings does not tell checked mode.",
        "swa.py",
        "            self.full_attn_allocator.free(free_index)\n            return\n"
        "        if self._pair is not None:\n            self._pair.free(",
        "            self._release_full(free_index)\n            return\n"
        "        if self._pair is not None:\n            self._pair.free(",
        ("P6",),
        allocator="swa-ring",
    ),
    Plant(
        "ring-long-tail-accepted",
        "With rings nobody asks whether a tail is longer than the extend.",
        "swa.py",
        "        if not 0 <= tail <= extend_num_tokens:\n",
        "        if not self.swa_req_ring and not 0 <= tail <= extend_num_tokens:\n",
        ("P6",),
        allocator="swa-ring",
        misuse=True,
    ),
)

_PURE: Final = (
    Plant(
        "pure-segment-frees-twice",
        "free_segment() releases the slots for either side.",
        "pure_swa.py",
        "        self._pool.free_segment(free_index, start_pos=start_pos)\n\n    def free_segments",
        "        self._pool.free_segment(free_index, start_pos=start_pos)\n"
        "        self._pool.free_segment(free_index, start_pos=start_pos)\n\n    def free_segments",
        ("P1", "P6", "P11"),
        allocator="pure-swa",
    ),
    Plant(
        "pure-free-full-frees",
        "free_full() releases the slots.",
        "pure_swa.py",
        "    def free_full(self, free_index: Tensor) -> None:\n",
        "    def free_full(self, free_index: Tensor) -> None:\n        self._pool.free(free_index)\n",
        ("P1", "P6"),
        allocator="pure-swa",
    ),
    Plant(
        "pure-full-segment-frees",
        "free_full_segment() releases the slots.",
        "pure_swa.py",
        "    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:\n",
        "    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:\n"
        "        self._pool.free(free_index)\n",
        ("P1", "P6"),
        allocator="pure-swa",
    ),
    Plant(
        "pure-free-swa-ignored",
        "free_swa() does nothing.",
        "pure_swa.py",
        '        """`free`."""\n        self._pool.free(free_index)\n',
        '        """Nothing."""\n',
        ("P2", "P11"),
        allocator="pure-swa",
    ),
    Plant(
        "pure-free-frees-twice",
        "free() releases the slots for either side.",
        "pure_swa.py",
        '`TokenToKVPoolAllocator.free`."""\n        self._pool.free(free_index)\n',
        '`TokenToKVPoolAllocator.free`."""\n'
        "        self._pool.free(free_index)\n        self._pool.free(free_index)\n",
        ("P1", "P6", "P11"),
        allocator="pure-swa",
    ),
    Plant(
        "pure-group-begun-twice",
        "free_group_begin() opens a group for either side, which are one.",
        "pure_swa.py",
        "        self._pool.free_group_begin()\n",
        "        super().free_group_begin()\n",
        ("P6",),
        allocator="pure-swa",
    ),
    Plant(
        "pure-full-side-of-its-own",
        "The full side is a pool of its own, from which nobody takes.",
        "pure_swa.py",
        "        self.full_attn_allocator = self.swa_attn_allocator = self._pool\n",
        "        self.swa_attn_allocator = self._pool\n"
        "        self.full_attn_allocator = TokenToKVPoolAllocator(size_swa, *rest, checked=checked)\n",
        ("P2",),
        allocator="pure-swa",
    ),
    Plant(
        "pure-segments-backwards",
        "free_segments() releases the slots of each segment backwards.",
        "pure_swa.py",
        "        self._pool.free_segments(segments)\n",
        "        self._pool.free_segments([(slots.flip(0), start) for slots, start in segments])\n",
        ("P14",),
        allocator="pure-swa",
    ),
    Plant(
        "pure-paged-call-answered",
        "alloc_extend() answers with a slot.",
        "pure_swa.py",
        'self._unsupported("alloc_extend", "pages of several slots", "Use alloc(number of tokens).")',
        "return self._pool.alloc(1)",
        ("P6",),
        allocator="pure-swa",
        misuse=True,
    ),
    Plant(
        "pure-mapping-edit-accepted",
        "The edits of the mapping are ignored in silence.",
        "pure_swa.py",
        'self._unsupported("set_full_to_swa_mapping", "a mapping between two pools",'
        ' "A slot is its own peer.")\n\n'
        "    def clear_full_to_swa_mapping(self, *_args: Any, **_kwargs: Any) -> NoReturn:\n"
        '        """Not of this allocator: raises UnsupportedCallError."""\n'
        "        self._unsupported(\n"
        '            "clear_full_to_swa_mapping", "a mapping between two pools", "A slot is its own peer."\n'
        "        )\n",
        "pass\n\n    def clear_full_to_swa_mapping(self, *_args: Any, **_kwargs: Any) -> None:\n"
        '        """Nothing."""\n',
        ("P6",),
        allocator="pure-swa",
        misuse=True,
    ),
)

VARIANT_PLANTS: Final = _RING + _PURE
