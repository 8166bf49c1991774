"""The null target says what it was told, and nothing about allocators."""

from __future__ import annotations

import pytest

from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.protocol import Mirror, State, Ticket
from kvproof.model import ops
from kvproof.model.calls import NoCall
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES
from tests.model.strategies import fresh, new


def test_what_it_is():
    target = Null(Ticket())
    assert (target.name, target.path, target.stood_in, target.other_path()) == ("null", "model", (), None)
    capabilities = target.capabilities
    assert capabilities.allocators == ALLOCATORS
    assert capabilities.exact
    assert capabilities.refuses == set(MISUSES)


def test_it_has_no_versions():
    with pytest.raises(UserError, match="null==1"):
        Null(Ticket("==1"))


def test_it_answers_from_the_model():
    subject = Null(Ticket()).build(Config("paged", 16, 4))
    assert isinstance(subject, Mirror)
    model = fresh(4, 4)
    for op, slots, available, refused in (
        (new(2), [4, 5], 12, False),
        (new(13), None, 12, False),
        (ops.Misuse("double-free"), None, 12, True),
        (ops.Free((0,)), None, 16, False),
    ):
        subject.expect(model.apply(op), model)
        answer = subject.apply(NoCall())
        assert (answer.slots, answer.available, answer.dtype, answer.damage) == (
            slots,
            available,
            "int64",
            (),
        )
        assert isinstance(answer.error, ValueError) is refused
    assert subject.observe() == State([1, 2, 3, 4], [])


def test_before_it_is_told_anything_it_has_nothing():
    assert NullSubject().observe() == State([], [])
