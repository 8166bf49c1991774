"""What a step offers to checks: owners as they were, pages as they should be, and short lists of numbers."""

from __future__ import annotations

from kvproof.impl.targets.protocol import Answer
from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.properties.step import Step, some
from tests.model.strategies import new


def test_owners_before_a_call_do_not_know_what_it_took():
    config = Config("paged", 20, 4, need_sort=True, page_offset=10)
    model = model_for(config)
    for op in (new(4, 4), ops.Free((0,))):
        model.apply(op)
    op = new(1)
    step = Step(2, op, config, model, model.apply(op), Answer(), None, True)
    # Pages 11 … 15: 11 is staged, 12 row 0's, and 13 is what the new row takes.
    assert step.owners_before() == {11: "staged", 12: "row 0", 13: "free", 14: "free", 15: "free"}
    assert model.owners()[13] == "row 1"


def test_owners_before_a_call_are_told_of_each_side():
    """B took full page 2 and swa page 1, which A had lost."""
    config = Config("swa", 12, 4, swa_size=8)
    model = model_for(config)
    for op in (new(4), ops.FreeSwa(0)):
        model.apply(op)
    op = new(4)
    step = Step(2, op, config, model, model.apply(op), Answer(), None, True)
    assert step.owners_before() == {1: "row 0", 2: "free", 3: "free"}
    assert step.owners_before("swa") == {1: "free", 2: "free"}
    assert model.owners("swa") == {1: "row 1", 2: "free"}


def test_owners_before_a_buffer_know_what_the_device_had():
    config = Config("hisparse", 12, 4, ratio=1)
    model = model_for(config)
    model.apply(new(4))
    op = ops.DeviceBuffer(0, 2)
    step = Step(1, op, config, model, model.apply(op), Answer(), None, True)
    # Page 2 was free, page 1 is the row's own.
    assert step.owners_before("device") == {1: "buffer 0", 2: "free", 3: "free"}


def test_numbers_are_cut_to_the_first_few():
    assert some([3, 1, 2]) == "[3, 1, 2]"
    assert some({3, 1, 2}) == "[1, 2, 3]"
    assert some(list(range(10))) == "[0, 1, 2, 3, 4, 5, 6, 7, … 10 in all]"
    assert some([5, 6, 7], most=2) == "[5, 6, … 3 in all]"
