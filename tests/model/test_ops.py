"""Ops and traces are values: hashable, comparable, immutable, and all in one list."""

from __future__ import annotations

import typing
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from kvproof.model import ops
from kvproof.model.calls import Call
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.trace import Origin, Trace
from tests.model.strategies import SMALL, outcome


def test_the_list_of_ops_is_the_union_and_every_one_is_known_somewhere():
    assert typing.get_args(ops.Op) == ops.OP_TYPES
    known = {kind: model_for(config).knows for kind, config in SMALL.items()}
    assert known.keys() == set(ALLOCATORS)
    assert frozenset().union(*known.values()) == set(ops.OP_TYPES)
    assert all({ops.Free, ops.Clear, ops.Clobber, ops.Misuse} < knows for knows in known.values())


@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("op_type", ops.OP_TYPES)
def test_an_op_that_a_kind_does_not_know_is_no_call(kind, op_type):
    model = model_for(SMALL[kind])
    assert op_type in model.knows or outcome(model, op_type(**arguments(op_type))) == "no call"


def test_calls_are_dataclasses():
    assert all(is_dataclass(call) for call in typing.get_args(Call))


def arguments(op_type):
    known = {"entries": ((0, 1),), "rows": (0,), "cuts": (1,), "kind": "double-free"}
    return {field.name: known.get(field.name, 1) for field in fields(op_type)}


@pytest.mark.parametrize("op_type", ops.OP_TYPES)
def test_an_op_is_a_value(op_type):
    required = arguments(op_type)
    one, two = op_type(**required), op_type(**required)
    assert one == two
    assert hash(one) == hash(two)
    for name in required:
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 5)


def test_a_trace_is_a_value_and_comes_from_nowhere_unless_told():
    trace = Trace(Config("paged", 16, 4), (ops.Clear(),))
    assert trace == Trace(Config("paged", 16, 4), (ops.Clear(),), Origin())
    assert {trace}
    assert Origin() == Origin("", "", None, None, None, "", "")
