"""Which releases of SGLang are supported, and where each keeps its allocators.

The layout is found by looking at the files of the package, not at its version, so that a source checkout
between two releases is read like the release it resembles; likewise the kinds beside the token and the paged
allocator, by the classes that stand in the files. This file does NOT describe signatures: those are taken by
inspection from the loaded classes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import UnknownSglang

# One or more for every row of the layout table; all of them are loaded by the tests of the sweep.
SUPPORTED: tuple[str, ...] = (
    "0.4.6.post5",
    "0.4.9.post6",
    "0.5.3.post3",
    "0.5.8",
    "0.5.12",
    "0.5.15",
    "0.5.18",
    "0.5.20",
    "0.5.22",
    "0.5.23",
)
NEWEST: str = SUPPORTED[-1]

# PEP 440 without epochs and local parts, which no published release has. A version becomes part of a path
# and of a command line, so whatever does not match is refused.
_VERSION = re.compile(
    r"[0-9]{1,6}(\.[0-9]{1,6}){0,4}((a|b|rc)[0-9]{1,6})?(\.post[0-9]{1,6})?(\.dev[0-9]{1,10})?"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the releases of one row keep the token and the paged allocator.

    `marker` is a file, relative to the package folder, that this row has and the rows after it in `LAYOUTS`
    do not. Modules are dotted names. `kernel_module` is where the Triton kernels are written; the module of
    the paged class holds the same objects under the same names. `first` names modules to import before the
    others.
    """

    row: str
    marker: str
    token_module: str
    paged_module: str
    kernel_module: str
    first: tuple[str, ...] = ()


# Newest first: the first marker that exists decides.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        row="0.5.16 - 0.5.23",
        marker="kernels/ops/memory/allocator.py",
        token_module="sglang.srt.mem_cache.allocator.token",
        paged_module="sglang.srt.mem_cache.allocator.paged",
        kernel_module="sglang.kernels.ops.memory.allocator",
    ),
    Layout(
        row="0.5.13 - 0.5.15",
        marker="srt/mem_cache/allocator/paged.py",
        token_module="sglang.srt.mem_cache.allocator.token",
        paged_module="sglang.srt.mem_cache.allocator.paged",
        kernel_module="sglang.srt.mem_cache.triton_ops.allocator",
    ),
    Layout(
        row="0.4.8 - 0.5.12",
        marker="srt/mem_cache/allocator.py",
        token_module="sglang.srt.mem_cache.allocator",
        paged_module="sglang.srt.mem_cache.allocator",
        kernel_module="sglang.srt.mem_cache.allocator",
    ),
    Layout(
        row="0.4.4 - 0.4.7",
        marker="srt/mem_cache/paged_allocator.py",
        token_module="sglang.srt.mem_cache.memory_pool",
        paged_module="sglang.srt.mem_cache.paged_allocator",
        kernel_module="sglang.srt.mem_cache.paged_allocator",
        # The pools, linear layers and quantisation import each other; only from here does the circle close.
        first=("sglang.srt.layers.quantization",),
    ),
)


def check_version(version: str) -> str:
    """`version` itself when it is a plausible release number, as `0.5.23` or `0.4.9.post6`; else an error."""
    if _VERSION.fullmatch(version) is None:
        raise UnknownSglang(f"{version!r:.80} is not a release number of SGLang; write one like {NEWEST}")
    return version


def layout_of(package: Path) -> Layout:
    """The layout of the SGLang package in the folder `package` (the folder that holds `srt/`)."""
    for layout in LAYOUTS:
        if (package / layout.marker).is_file():
            return layout
    raise UnknownSglang(
        f"{package} holds none of the allocator layouts known here "
        f"({', '.join(layout.row for layout in LAYOUTS)}); use one of the releases {', '.join(SUPPORTED)}"
    )


@dataclass(frozen=True, slots=True)
class Home:
    """Where releases keep one class.

    names: what it is or was called. modules: below `sglang.srt.mem_cache`, newest first; the first that
    defines one of the names is the one. mentions: a word that its file must have as well.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    mentions: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """One class found: the dotted name of its module, and its own name."""

    module: str
    name: str


_SWA_MODULES = ("allocator.swa", "swa_memory_pool", "allocator")
_SWA: Final = Home(("SWATokenToKVPoolAllocator",), _SWA_MODULES)
_SWA_POOL: Final = Home(("SWAKVPool",), ("swa_memory_pool", "memory_pool"))
_HISPARSE_MODULES = ("allocator.hisparse", "hisparse_memory_pool")

# By kind, the classes that make one up. "allocator" is the class under test, the others are what its
# constructor asks for: KV pools, and the allocator that a wrapper wraps.
KIND_HOMES: Final[dict[str, dict[str, Home]]] = {
    "swa": {"allocator": _SWA, "pool": _SWA_POOL},
    "swa-ring": {
        "allocator": Home(_SWA.names, _SWA_MODULES, mentions="swa_req_ring_size"),
        "pool": _SWA_POOL,
    },
    "pure-swa": {"allocator": Home(("PureSWATokenToKVPoolAllocator",), _SWA_MODULES), "pool": _SWA_POOL},
    "hisparse": {
        "allocator": Home(("HiSparseTokenToKVPoolAllocator",), _HISPARSE_MODULES),
        "pool": Home(("HiSparseDSATokenToKVPool", "HiSparseNSATokenToKVPool"), ("hisparse_memory_pool",)),
    },
    "hisparse-v4": {
        "allocator": Home(("DeepSeekV4HiSparseTokenToKVPoolAllocator",), _HISPARSE_MODULES),
        "logical": _SWA,
        "pool": Home(("DeepSeekV4TokenToKVPool",), ("deepseek_v4_memory_pool",)),
        "device_pool": Home(("HiSparseC4DevicePool",), ("deepseek_v4_memory_pool",)),
    },
    # Up to 0.5.12 the pool of the states itself hands out the slots.
    "mamba": {"allocator": Home(("MambaSlotAllocator", "MambaPool"), ("allocator.mamba", "memory_pool"))},
    "page-interleave": {
        "allocator": Home(("PageInterleavePoolAllocator",), ("allocator.page_interleave",)),
    },
}


def kinds_of(package: Path) -> dict[str, dict[str, Place]]:
    """The kinds, beside token and paged, whose classes stand in the SGLang package in the folder `package`,
    and where. Reads files and imports nothing."""
    kinds: dict[str, dict[str, Place]] = {}
    for kind, homes in KIND_HOMES.items():
        found = {role: _find(package, home) for role, home in homes.items()}
        places = {role: place for role, place in found.items() if place is not None}
        if len(places) == len(homes):
            kinds[kind] = places
    return kinds


def _find(package: Path, home: Home) -> Place | None:
    for module in home.modules:
        path = package.joinpath("srt", "mem_cache", *module.split(".")).with_suffix(".py")
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for name in home.names:
            if re.search(rf"^class {name}\b", text, re.MULTILINE) and home.mentions in text:
                return Place(f"sglang.srt.mem_cache.{module}", name)
    return None
