"""The stored traces: what came up in the field or in a campaign, with the right answers, one file a trace.

They lie in `traces/<allocator>/<name>.json` beside this module and ship with it. Not covered: known faults of
releases (a list of its own) and the format (`format.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvproof.corpus.format import TraceFile, read
from kvproof.model.errors import UserError

TRACES: Final = Path(__file__).resolve().parent / "traces"


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """name: "paged/tight-oom", the file's path without folder and ending. file: what it holds."""

    name: str
    file: TraceFile

    @property
    def allocator(self) -> str:
        """The kind of allocator it is for; also its folder."""
        return self.file.trace.config.allocator


def stored_traces(folder: Path = TRACES) -> tuple[StoredTrace, ...]:
    """Every trace in the folder, by allocator and then by name.

    Raises UserError for a file that is no trace, or that lies in the folder of another allocator.
    """
    stored = (_load(folder, path) for path in folder.glob("*/*.json"))
    return tuple(sorted(stored, key=lambda trace: trace.name))


def _load(folder: Path, path: Path) -> StoredTrace:
    stored = StoredTrace(path.relative_to(folder).with_suffix("").as_posix(), read(path))
    if path.parent.name != stored.allocator:
        raise UserError(f"{path}: $.config.allocator is {stored.allocator!r}; move the file to that folder")
    return stored
