"""Release numbers and layouts. Not covered: that real releases load (test_load)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import (
    KIND_HOMES,
    LAYOUTS,
    NEWEST,
    SUPPORTED,
    Place,
    check_version,
    kinds_of,
    layout_of,
)
from kvproof.model.config import ALLOCATORS


@pytest.mark.parametrize("version", [*SUPPORTED, "0.5.0rc1", "1.0.0.dev20250101", "0.5.1.post1"])
def test_release_numbers_are_accepted(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize(
    "version",
    [
        "",
        "..",
        "0.5.23/..",
        "../0.5.23",
        "0.5.23; rm -rf x",
        "0.5.23\n",
        "--help",
        "0.5.*",
        "1!0.5",
        "0.5.2 3",
        "٠.٥",
    ],
)
def test_anything_else_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(SglangUnavailable, match="is not a release number") as caught:
        check_version(version)
    assert "\n" not in str(caught.value)
    assert NEWEST in str(caught.value)


def test_every_row_of_the_specification_has_a_supported_release() -> None:
    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".") if part.isdigit())

    for layout in LAYOUTS:
        first, last = (number(end) for end in layout.row.split(" - "))
        assert any(first <= number(version) <= last for version in SUPPORTED), layout.row


@pytest.mark.parametrize("position", range(len(LAYOUTS)))
def test_the_newest_marker_decides(tmp_path: Path, position: int) -> None:
    """A package that also has the files of older rows is read as the newest row it matches."""
    for layout in LAYOUTS[position:]:
        marker = tmp_path / layout.marker
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    assert layout_of(tmp_path) is LAYOUTS[position]


def test_an_unknown_layout_names_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(SglangUnavailable, match="none of the allocator layouts") as caught:
        layout_of(tmp_path)
    assert all(layout.row in str(caught.value) for layout in LAYOUTS)


def write(package: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = package / "srt" / "mem_cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_every_kind_has_a_home() -> None:
    assert ["token", "paged", *KIND_HOMES] == list(ALLOCATORS)


def test_a_kind_is_there_when_all_its_classes_are(tmp_path: Path) -> None:
    assert kinds_of(tmp_path) == {}
    swa, pool = "class SWATokenToKVPoolAllocator(Base):\n", "class SWAKVPool:\n"
    write(tmp_path, {"allocator.py": f"class Token: ...\n{swa}"})
    assert kinds_of(tmp_path) == {}
    write(tmp_path, {"memory_pool.py": pool})
    places = {
        "allocator": Place("sglang.srt.mem_cache.allocator", "SWATokenToKVPoolAllocator"),
        "pool": Place("sglang.srt.mem_cache.memory_pool", "SWAKVPool"),
    }
    assert kinds_of(tmp_path) == {"swa": places}


def test_the_newest_home_counts_and_only_a_definition_does(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "memory_pool.py": "class MambaPool:\n",
            "allocator/mamba.py": "# class MambaSlotAllocator\nclass MambaSlotAllocatorBase: ...\n",
        },
    )
    old = Place("sglang.srt.mem_cache.memory_pool", "MambaPool")
    assert kinds_of(tmp_path) == {"mamba": {"allocator": old}}
    write(tmp_path, {"allocator/mamba.py": "class MambaSlotAllocator:\n"})
    new = Place("sglang.srt.mem_cache.allocator.mamba", "MambaSlotAllocator")
    assert kinds_of(tmp_path) == {"mamba": {"allocator": new}}


def test_the_ring_is_a_sliding_window_that_knows_rings(tmp_path: Path) -> None:
    swa = "class SWATokenToKVPoolAllocator:\n"
    write(tmp_path, {"allocator/swa.py": swa, "swa_memory_pool.py": "class SWAKVPool: ...\n"})
    assert set(kinds_of(tmp_path)) == {"swa"}
    write(tmp_path, {"allocator/swa.py": f"{swa}    ring = pool.swa_req_ring_size\n"})
    assert set(kinds_of(tmp_path)) == {"swa", "swa-ring"}
