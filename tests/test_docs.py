"""The documents say what is: README's tables against the code, its commands against the command line.

Not covered: prose.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvproof.ci.cli import app
from kvproof.impl.targets.sglang.releases import SUPPORTED
from kvproof.properties.catalogue import PROPERTIES
from kvproof.properties.lanes import LANES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_property_stands_in_the_readme_as_in_the_catalogue():
    for entry in PROPERTIES:
        assert f"| {entry.id} | {entry.name} | {entry.statement} |" in README, entry.id


def test_every_lane_and_release_is_named():
    for name in (*LANES, *SUPPORTED):
        assert name in README, name


def test_every_command_in_the_readme_exists_with_its_options():
    commands = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}
    named = set(re.findall(r"kvproof (fuzz|replay|shrink|targets|doctor|properties|bench)\b", README))
    assert named == {*commands, "bench"}


def test_no_placeholder_is_left():
    assert not re.search(r"\b[A-Z]+_TABLE\b|\bTODO\b|\bTBD\b", README)
