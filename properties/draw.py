"""Draw: the source of every choice the generator makes.

An engine is a Draw: Hypothesis (`machine.py`), a seeded generator (here), later bytes or an enumerator. A
Draw only has to give integers; everything else follows, so that two Draws never differ in meaning.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draw(ABC):
    """Choices, one after another. Small results are the simple ones: shrinkers move towards `low`."""

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def boolean(self) -> bool:
        """True half of the time; False is the simple one."""
        return self.integer(0, 1) == 1

    def choice(self, options: Sequence[T]) -> T:
        """One of the options; repeat one to make it likelier."""
        return options[self.integer(0, len(options) - 1)]

    def weighted(self, cumulative: Sequence[int]) -> int:
        """An index, drawn with the weights whose running totals these are. The last total is positive."""
        return bisect_right(cumulative, self.integer(0, cumulative[-1] - 1))


class SeededDraw(Draw):
    """Choices from a seeded Mersenne Twister; the same seed gives the same choices on every machine.

    Only `Random.random` is used: Python promises its stream for a given seed, and no other method's.
    """

    def __init__(self, seed: str) -> None:
        self._random = Random(seed).random

    def integer(self, low: int, high: int) -> int:
        """See Draw."""
        return low + int(self._random() * (high - low + 1))

    # The two below say what Draw says, without a call in between: they are the hottest lines there are.

    def choice(self, options: Sequence[T]) -> T:
        """See Draw."""
        return options[int(self._random() * len(options))]

    def weighted(self, cumulative: Sequence[int]) -> int:
        """See Draw."""
        return bisect_right(cumulative, int(self._random() * cumulative[-1]))
