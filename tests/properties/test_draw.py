"""Draws: the seeded one is the plain stream of `random.Random`, and everything follows from its integers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvproof.properties.draw import Draw, SeededDraw


class Fixed(Draw):
    """Gives these integers, and remembers what was asked."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)
        self.asked: list[tuple[int, int]] = []

    def integer(self, low: int, high: int) -> int:
        self.asked.append((low, high))
        return self.values.pop(0)


def test_the_seeded_draw_is_the_stream_that_python_promises():
    stream = Random("0/seeded/0/0")
    draw = SeededDraw("0/seeded/0/0")
    ranges = [(0, 1), (0, 9), (-3, 3), (5, 5), (1, 1 << 40)] * 40
    assert [draw.integer(low, high) for low, high in ranges] == [
        low + int(stream.random() * (high - low + 1)) for low, high in ranges
    ]


def test_another_seed_is_another_stream():
    one, two = SeededDraw("7"), SeededDraw("8")
    assert [one.integer(0, 999) for _ in range(5)] != [two.integer(0, 999) for _ in range(5)]


def test_integers_reach_both_ends_and_nothing_beyond():
    draw = SeededDraw("ends")
    drawn = Counter(draw.integer(-2, 2) for _ in range(500))
    assert set(drawn) == {-2, -1, 0, 1, 2}
    assert min(drawn.values()) > 50


@pytest.mark.parametrize(("value", "drawn"), [(0, False), (1, True)])
def test_booleans_are_one_integer_and_false_is_the_simple_one(value, drawn):
    draw = Fixed(value)
    assert draw.boolean() is drawn
    assert draw.asked == [(0, 1)]


def test_a_choice_is_an_index():
    draw = Fixed(0, 2)
    assert [draw.choice("abc"), draw.choice("abc")] == ["a", "c"]
    assert draw.asked == [(0, 2), (0, 2)]


def test_weights_are_widths_of_a_range():
    # Weights 2, 0, 3: totals 2, 2, 5. The numbers 0, 1 are the first's, 2, 3, 4 the third's.
    draw = Fixed(0, 1, 2, 3, 4)
    assert [draw.weighted([2, 2, 5]) for _ in range(5)] == [0, 0, 2, 2, 2]
    assert draw.asked == [(0, 4)] * 5
