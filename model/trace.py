"""Traces: a config, a list of ops, and where they came from.

The JSON form is `kvproof.corpus.format`.
"""

from dataclasses import dataclass, field

from kvproof.model.config import Config
from kvproof.model.ops import Op


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trace came from. Every field may be empty; none changes what the trace does.

    target, lane: what was being fuzzed and how. seed, lease, index: which draw of the campaign it was.
    case: name in the field's case list, for hand-written traces. note: one line for people.
    """

    target: str = ""
    lane: str = ""
    seed: int | None = None
    lease: int | None = None
    index: int | None = None
    case: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A complete, replayable test: build an allocator from `config`, then apply `ops` in order."""

    config: Config
    ops: tuple[Op, ...]
    origin: Origin = field(default_factory=Origin)
