"""Release numbers and layouts. Not covered: that real releases load (test_load)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import LAYOUTS, NEWEST, SUPPORTED, check_version, layout_of


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
