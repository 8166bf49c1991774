"""Which releases of SGLang are supported, and where each keeps its allocators.

The layout is found by looking at the files of the package, not at its version, so that a source checkout
between two releases is read like the release it resembles. This file does NOT describe signatures: those
are taken by inspection from the loaded classes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
