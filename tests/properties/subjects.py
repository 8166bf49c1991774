"""Targets for the tests of this folder: what builds lawful allocators, and offenders.

The allocators themselves: `page_pool.py`, `paired_pools.py`, `dealt_pools.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvproof.impl.targets.null import NullSubject
from kvproof.impl.targets.protocol import Answer, Capabilities, State, Subject
from kvproof.model import calls
from kvproof.model.base import AllocatorModel, Expectation
from kvproof.model.config import ALLOCATORS, Config
from tests.properties.dealt_pools import ShardPools, StatePool
from tests.properties.page_pool import (
    PagePool,
    PurePool,
    RingPool,
    Style,
    back,
    front,
    highest,
    middle,
)
from tests.properties.paired_pools import CompressedPools, HisparsePools, SwaPools


@dataclass
class PoolTarget:
    """A target that builds whatever `make` makes. See `protocol.Target`."""

    make: Callable[[Config], Subject]
    exact: bool = False
    refuses: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    sibling: PoolTarget | None = None
    name: str = "pool"
    release: str = "pool"
    path: str = "torch"
    stood_in: tuple[str, ...] = ()
    built: int = field(default=0, compare=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(ALLOCATORS, self.lacks, self.exact, checked=True, refuses=self.refuses)

    def build(self, config: Config) -> Subject:
        self.built += 1
        return self.make(config)

    def other_path(self) -> PoolTarget | None:
        return self.sibling


KINDS: Final[dict[str, type[PagePool]]] = {
    "token": PagePool,
    "paged": PagePool,
    "swa": SwaPools,
    "swa-ring": RingPool,
    "pure-swa": PurePool,
    "hisparse": HisparsePools,
    "hisparse-v4": CompressedPools,
    "mamba": StatePool,
    "page-interleave": ShardPools,
}
"""The lawful allocator of each kind."""


def lawful(style: Style) -> Callable[[Config], PagePool]:
    """Builds the lawful allocator of a config's kind, which chooses in this style."""
    return lambda config: KINDS[config.allocator](config, style)


LAWFUL: Final[dict[str, Callable[[Config], PagePool]]] = {
    "back": lawful(Style(back, middle, backwards=True)),
    "middle, last row first": lawful(Style(middle, back, last_row_first=True, late=True)),
    "front, eager": lawful(Style(front, highest, eager=True, early=True)),
    "highest": lawful(Style(highest, front, last_row_first=True, eager=True, late=True, backwards=True)),
}
"""Lawful allocators that all choose pages other than the contract's exact level would, where it is theirs to
choose."""


class Twist(NullSubject):
    """The model's own answers, but for one call. See `protocol.Mirror`.

    at: which call, from 0. answer: given in its place. state: seen after it (None: the model's, still).
    observed: how often anybody looked at the lists.
    """

    def __init__(self, at: int = -1, answer: Answer | None = None, state: State | None = None) -> None:
        super().__init__()
        self.at = at
        self.twisted = answer, state
        self.calls = -1
        self.observed = 0

    def expect(self, expectation: Expectation, model: AllocatorModel) -> None:
        super().expect(expectation, model)
        self.calls += 1

    def apply(self, call: calls.Call) -> Answer:
        right = super().apply(call)
        answer, _ = self.twisted
        return answer if self.calls == self.at and answer is not None else right

    def observe(self) -> State:
        self.observed += 1
        _, state = self.twisted
        return state if self.calls == self.at and state is not None else super().observe()
