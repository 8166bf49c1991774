"""A step: everything a property may look at after one op.

Made only when the quick comparison in `lockstep.py` did not settle the matter, so it may be rich.
"""

from dataclasses import dataclass

from kvproof.impl.targets.protocol import Answer, State
from kvproof.model.base import AllocatorModel, Expectation
from kvproof.model.config import Config
from kvproof.model.ops import Op


@dataclass(slots=True, eq=False)
class Step:
    """One op, what the model expected, and what the target did.

    model: already past the op, as if the prediction had come true. state: the target's lists.
    exact: whether the target is held to the very slots and their order.
    """

    index: int
    op: Op
    config: Config
    model: AllocatorModel
    expectation: Expectation
    answer: Answer
    state: State
    exact: bool

    def owners_before(self, side: str = "") -> dict[int, str]:
        """Who had each page of a pool when an allocating call was made (see AllocatorModel.owners)."""
        owners = self.model.owners(side)
        portion = self.expectation.portions.get(side)
        owners.update(dict.fromkeys(portion.taken if portion else self.expectation.taken, "free"))
        return owners


@dataclass(frozen=True, slots=True)
class Finding:
    """A property does not hold. divergence: the class of fault, part of the fingerprint, so free of numbers.
    message: for people, with slots, owners, expected and actual."""

    divergence: str
    message: str


def some(numbers: list[int] | set[int], most: int = 8) -> str:
    """Numbers for a message, cut to the first few."""
    ordered = sorted(numbers) if isinstance(numbers, set) else numbers
    text = ", ".join(str(number) for number in ordered[:most])
    return f"[{text}, … {len(ordered)} in all]" if len(ordered) > most else f"[{text}]"
