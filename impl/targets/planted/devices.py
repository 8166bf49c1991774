"""Faults of the allocators with a device side: what is taken with the logical slots, buffers, what a release
leaves on the device, compressed slots, and what a wrapper passes on.

Not covered: the sliding-window side under the compressed one (`sides.py`), and kernels (`side_kernels.py`).
"""

from dataclasses import replace
from typing import Final

from kvproof.impl.targets.planted.plant import Plant

_REFUSED: Final = """\
        if need > min(logical.available_size(), device.available_size()) // ps:
            return None
"""
_BUFFER_REFUSED: Final = """\
        if extra > device.free_pages.numel():
            return None

        mapping.index_fill_(0, entries, 0)
"""

_SHARED: Final = (
    Plant(
        "hisparse-one-entry-cleared",
        "A release clears the entry of one slot of each page and leaves the others.",
        "swa_reference.py",
        "mapping.index_fill_(0, entries.reshape(-1), 0)",
        "mapping.index_fill_(0, entries[:, 0], 0)",
        ("P10",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-page-zero-released",
        "A free of logical pages without device pages releases the padding page.",
        "hisparse_sides.py",
        "mapped = part[part > 0]",
        "mapped = part",
        ("P3", "P11"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-free-keeps-device",
        "free() leaves the device pages taken and mapped.",
        "hisparse_sides.py",
        "        self.logical_attn_allocator.free(free_index)\n"
        "        self._release_device([torch.unique(free_index // self.page_size)])\n",
        "        self.logical_attn_allocator.free(free_index)\n",
        ("P2", "P6", "P10"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-segment-keeps-device",
        "free_segment() leaves the device page of the segment's last page taken and mapped.",
        "hisparse_sides.py",
        "        self._release_device([slots[:: self.page_size] // self.page_size for slots, _ in parts])\n",
        "        firsts = [slots[:: self.page_size][:-1] // self.page_size for slots, _ in parts]\n"
        "        self._release_device(firsts)\n",
        ("P2", "P6", "P10"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-mapping-end-lost",
        "clear() overwrites the -1 at the end of the mapping.",
        "hisparse_sides.py",
        "mapping[:-1].zero_()",
        "mapping.zero_()",
        ("P10",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-device-not-counted",
        "available_size() says what the logical side has, however little the device has.",
        "hisparse_sides.py",
        "return min(self.logical_attn_allocator.available_size(), device)",
        "return self.logical_attn_allocator.available_size()",
        ("P2",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-logical-only-maps",
        "alloc_logical_only() takes device pages as well.",
        "hisparse_sides.py",
        "return self.logical_attn_allocator.alloc_extend(*lens, last_loc, extend_num_tokens)",
        "return self.alloc_extend(*lens, last_loc, extend_num_tokens)",
        ("P2", "P6", "P10"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-buffer-page-twice",
        "Every page that a device buffer takes beside the row's own is the same one.",
        "hisparse_sides.py",
        "fresh = device.free_pages[:extra].unsqueeze(1) * ps",
        "fresh = device.free_pages[:1].repeat(extra).unsqueeze(1) * ps",
        ("P1",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-refused-buffer-unmaps",
        "A refused device buffer has cut the row off its device slots.",
        "hisparse_sides.py",
        _BUFFER_REFUSED,
        "        mapping.index_fill_(0, entries, 0)\n"
        "        if extra > device.free_pages.numel():\n            return None\n\n",
        ("P6",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-refused-buffer-takes",
        "A refused device buffer has taken the pages that were free.",
        "hisparse_sides.py",
        _BUFFER_REFUSED,
        _BUFFER_REFUSED.replace(
            "            return None\n",
            "            device.free_pages = device.free_pages[extra:]\n            return None\n",
        ),
        ("P6",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-buffer-stays-mapped",
        "The row of a device buffer keeps its entries.",
        "hisparse_sides.py",
        "        mapping.index_fill_(0, entries, 0)\n",
        "",
        ("P10",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-surplus-kept",
        "A device buffer smaller than the row's own leaks the pages that are left over.",
        "hisparse_sides.py",
        "        if count > need_size:\n",
        "        if False:\n",
        ("P2",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-buffer-page-doubled",
        "A device buffer takes a page although the row's partial one has the room.",
        "hisparse_sides.py",
        "extra = max(pages - -(-count // ps), 0)",
        "extra = max(pages - count // ps, 0)",
        ("P2", "P8"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-new-pages-first",
        "A device buffer begins with its new pages and not with those of the row.",
        "hisparse_sides.py",
        "torch.cat((own, own[-1:] + room, fresh.reshape(-1)))",
        "torch.cat((fresh.reshape(-1), own, own[-1:] + room))",
        ("P14",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-buffer-freed-by-slot",
        "free_hisparse_indices() releases a page once for every slot of it.",
        "hisparse_sides.py",
        "device._take_back(slots // ps, repeats=True)",
        "device._take_back(slots // ps, repeats=False)",
        ("P1", "P11"),
        allocator="hisparse",
    ),
)

_HISPARSE: Final = (
    Plant(
        "hisparse-extend-keeps-logical",
        "alloc_extend has taken the logical pages when it refuses for want of device pages.",
        "hisparse.py",
        _REFUSED,
        _REFUSED.replace(
            "            return None\n",
            "            if need <= logical.available_size() // ps:\n"
            "                logical.free_pages = logical.free_pages[need:]\n"
            "            return None\n",
        ),
        ("P6",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-rows-share-device-page",
        "All rows of an extend are given the same device page.",
        "hisparse.py",
        "pages = logical.free_pages[:need], device.free_pages[:need]",
        "pages = logical.free_pages[:need], device.free_pages[:1].repeat(need)",
        ("P1", "P6"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-ratio-ignored",
        "The logical pool is no larger than the device's.",
        "hisparse.py",
        'positive(name, "size", size) * positive(name, "host_to_device_ratio", host_to_device_ratio)',
        'positive(name, "size", size)',
        ("P2", "P6", "P9"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-buffer-not-noted",
        "Checked mode does not know a buffer when it is released.",
        "hisparse_checked.py",
        "        self._buffers.update(buffer)\n",
        "",
        ("P6",),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-group-holds-device",
        "A group holds the device side of its frees, and its end forgets them.",
        "hisparse.py",
        '        """Nothing: frees act at once, in a group or not."""\n',
        "        self.hisparse_attn_allocator._held = []\n",
        ("P2", "P6", "P11"),
        allocator="hisparse",
    ),
    Plant(
        "hisparse-uneven-buffer-accepted",
        "The size of a device buffer is rounded down to whole pages.",
        "hisparse_sides.py",
        "        if pages < 0 or remainder:\n",
        "        need_size = pages * ps\n        if pages < 0:\n",
        ("P6",),
        allocator="hisparse",
        misuse=True,
    ),
)

_DECIDED: Final = """\
        if need > device.available_size() // device.page_size:
            return None
"""
_ASKED: Final = """\
        slots = logical.alloc_extend(*lens, last_loc, extend_num_tokens, num_new_pages)
        if slots is None:
            return None
"""

_COMPRESSED: Final = (
    Plant(
        "v4-prefix-rounded-up",
        "A block that a prefix has begun is taken for one that it has completed.",
        "hisparse_v4.py",
        "        first, end = prefix_lens_cpu // _RATIO, seq_lens_cpu // _RATIO\n",
        "        end = seq_lens_cpu // _RATIO\n"
        "        first = ((prefix_lens_cpu + (_RATIO - 1)) // _RATIO).minimum(end)\n"
        "        prefix_lens = first.to(prefix_lens.device) * _RATIO\n",
        ("P1", "P4", "P5", "P6", "P10"),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-blocks-counted-up",
        "alloc_extend counts device pages for a block that is not complete.",
        "hisparse_v4.py",
        "need = device._new_pages(call, first, end, blocks, None)",
        "need = device._new_pages(call, first, -(-seq_lens_cpu // _RATIO), blocks, None)",
        ("P2", "P6"),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-last-block-rounded-up",
        "The last complete block of a row is looked for where the next one will be.",
        "hisparse_reference.py",
        "torch.div(last - (ratio - 1), ratio,",
        "torch.div(last + 1, ratio,",
        ("P5", "P10"),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-device-decided-late",
        "alloc_extend has taken the logical pages when it refuses for want of device pages.",
        "hisparse_v4.py",
        _DECIDED + _ASKED,
        _ASKED + _DECIDED,
        ("P6",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-refusal-takes-device",
        "alloc_extend has taken the device pages when the logical side refuses.",
        "hisparse_v4.py",
        _ASKED,
        _ASKED.replace(
            "            return None\n",
            "            device.free_pages = device.free_pages[need:]\n            return None\n",
        ),
        ("P6",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-device-slots-not-tokens",
        "available_size() counts device slots as tokens.",
        "hisparse_sides.py",
        "device = self.hisparse_attn_allocator.available_size() * self.compress_ratio",
        "device = self.hisparse_attn_allocator.available_size()",
        ("P2",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-mapping-short",
        "The mapping has no room for the blocks of the last page.",
        "hisparse_v4.py",
        "self._make_mapping(entries + self.hisparse_page_size, self.hisparse_kvcache)",
        "self._make_mapping(entries, self.hisparse_kvcache)",
        ("P9",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-merged-by-count",
        "The device side merges by the exact page count and not by the estimate all ranks share.",
        "hisparse_v4.py",
        "device._merge_if_short(blocks // device.page_size + prefix_lens.numel() + 1)",
        "device._merge_if_short(need)",
        ("P14",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-method-not-forwarded",
        "The wrapper lacks a method of the allocator that it wraps.",
        "hisparse_v4.py",
        "    def new_pages_available(",
        "    def _new_pages_available(",
        ("P16",),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-group-begins-logically",
        "free_group_begin() is passed on to the logical side alone.",
        "hisparse_v4.py",
        "        self.hisparse_attn_allocator.free_group_begin()\n",
        "",
        ("P1", "P2", "P6", "P11"),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-group-end-not-forwarded",
        "free_group_end() does not reach the device side.",
        "hisparse_v4.py",
        "        self.hisparse_attn_allocator.free_group_end()\n",
        "",
        ("P2", "P6", "P11"),
        allocator="hisparse-v4",
    ),
    Plant(
        "v4-rows-share-device-page",
        "All rows of an extend are given the same device page.",
        "hisparse_v4.py",
        "device.free_pages[:need]\n",
        "device.free_pages[:1].repeat(need)\n",
        ("P1", "P6"),
        allocator="hisparse-v4",
    ),
)


def _also(plant_id: str) -> Plant:
    """The same fault in the code that both kinds share, hunted on the compressed one."""
    (plant,) = (plant for plant in (*_SHARED, *_HISPARSE) if plant.id == f"hisparse-{plant_id}")
    return replace(plant, id=f"v4-{plant_id}", allocator="hisparse-v4")


DEVICE_PLANTS: Final = (
    _SHARED
    + _HISPARSE
    + _COMPRESSED
    + (
        _also("one-entry-cleared"),
        _also("page-zero-released"),
        _also("free-keeps-device"),
        _also("refused-buffer-unmaps"),
        _also("buffer-page-twice"),
        _also("buffer-freed-by-slot"),
        _also("uneven-buffer-accepted"),
    )
)
