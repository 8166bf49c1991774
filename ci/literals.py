"""Statements as source text, laid out as ruff's formatter does it: whole where they fit; else a call's
arguments on one line of their own, if they fit there; else one item a line.

Covers what scripts are made of: assignments and calls with literal arguments. Not a formatter for Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

WIDTH: Final = 110
_LONG_RUN: Final = 6


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets: a call's arguments, a list or a dict. open: what stands before the first item,
    its bracket included. each: whether every item has a line of its own, however short they are."""

    open: str
    items: "tuple[str | Group, ...]"
    close: str
    each: bool = False

    def __str__(self) -> str:
        return f"{self.open}{', '.join(map(str, self.items))}{self.close}"


def call(function: str, *arguments: "str | Group", **named: "str | Group | None") -> Group:
    """A call. named: those with None are left out."""
    given = [labelled(f"{name}=", value) for name, value in named.items() if value is not None]
    return Group(f"{function}(", (*arguments, *given), ")")


def labelled(label: str, value: "str | Group") -> "str | Group":
    """The value with something before it, as in `name=value` or `"key": value`."""
    if isinstance(value, str):
        return label + value
    return Group(label + value.open, value.items, value.close, value.each)


def numbers(values: Sequence[int]) -> Group:
    """A list of numbers; a long run of neighbours as a range."""
    items: list[str] = []
    for _, run in groupby(enumerate(values), key=lambda entry: entry[1] - entry[0]):
        found = [value for _, value in run]
        if len(found) > _LONG_RUN:
            items.append(f"*range({found[0]}, {found[-1] + 1})")
        else:
            items.extend(map(str, found))
    return Group("[", tuple(items), "]")


def entries(mapping: dict[int, int]) -> Group:
    """A dict of numbers."""
    return Group("{", tuple(f"{key}: {value}" for key, value in mapping.items()), "}")


def mapping(values: "dict[str, str | Group]") -> Group:
    """A dict with names as keys, one a line."""
    return Group("{", tuple(labelled(f'"{key}": ', value) for key, value in values.items()), "}", each=True)


def listed(items: "Sequence[str | Group]") -> Group:
    """A list."""
    return Group("[", tuple(items), "]")


def statement(before: str, value: "str | Group", indent: int) -> list[str]:
    """`before` and the value, as lines."""
    return _laid_out(labelled(before, value), " " * indent, "")


def _laid_out(value: "str | Group", margin: str, after: str) -> list[str]:
    whole = f"{margin}{value}{after}"
    if isinstance(value, str) or not value.items or (len(whole) <= WIDTH and not _is_tall(value)):
        return [whole]
    inner = f"{margin}    {', '.join(map(str, value.items))}"
    lines = [f"{margin}{value.open}"]
    if value.open.endswith("(") and len(inner) <= WIDTH and not _is_tall(value):
        lines.append(inner)
    else:
        for item in value.items:
            lines += _laid_out(item, f"{margin}    ", ",")
    return [*lines, f"{margin}{value.close}{after}"]


def _is_tall(value: "str | Group") -> bool:
    return isinstance(value, Group) and (value.each or any(map(_is_tall, value.items)))
