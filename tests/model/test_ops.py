"""Ops and traces are values: hashable, comparable, immutable, and all in one list."""

from __future__ import annotations

import typing
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from kvproof.model import ops
from kvproof.model.calls import Call
from kvproof.model.config import Config
from kvproof.model.paged import PagedModel
from kvproof.model.trace import Origin, Trace


def test_the_list_of_ops_is_the_union_and_every_model_handles_it():
    assert typing.get_args(ops.Op) == ops.OP_TYPES
    assert set(PagedModel(Config("paged", 4, 4))._handlers) == set(ops.OP_TYPES)


def test_calls_are_dataclasses():
    assert all(is_dataclass(call) for call in typing.get_args(Call))


@pytest.mark.parametrize("op_type", ops.OP_TYPES)
def test_an_op_is_a_value(op_type):
    known = {"entries": ((0, 1),), "rows": (0,), "kind": "double-free"}
    required = {field.name: known.get(field.name, 1) for field in fields(op_type)}
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
