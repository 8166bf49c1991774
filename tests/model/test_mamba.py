"""The state-slot model against section 7 of the contract, in examples worked out from its text."""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, lists, new, outcome, outcomes, rows


def pool(slots: int = 6):
    return fresh(slots, 1, "mamba")


def test_mamba_dummy():
    """From the field: the first slot is 1, since 0 is the dummy."""
    model = pool()
    expectation = model.apply(ops.Alloc(1))
    assert isinstance(expectation.call, calls.AllocCall)
    assert (expectation.call.need, expectation.slots, lists(model)) == (1, [1], ([2, 3, 4, 5, 6], []))


def test_slots_are_first_in_first_out():
    model = pool(3)
    assert outcomes(model, ops.Alloc(2), ops.Free((0,)), ops.Alloc(3), ops.Alloc(1)) == [
        [1, 2],
        "done",
        [3, 1, 2],
        "None",
    ]


def test_frees_append_in_the_order_given():
    model = pool(4)
    outcomes(model, ops.Alloc(2), ops.Alloc(1))
    call = model.apply(ops.Free((1, 0), order=ops.BACKWARDS)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.slots, lists(model), model.available) == ([2, 1, 3], ([4, 2, 1, 3], []), 4)


# --- set aside ------------------------------------------------------------------------------------


def test_single_slots_are_served_from_those_set_aside():
    model = pool()
    call = model.apply(ops.AllocGroupBegin(3)).call
    assert isinstance(call, calls.AllocGroupBeginCall)
    assert (call.slots, lists(model), model.available) == (3, ([4, 5, 6], []), 3)
    assert outcomes(model, ops.Alloc(1), ops.Alloc(2), ops.Alloc(1)) == [[1], [4, 5], [2]]
    assert model.owners() == {1: "row 0", 2: "row 2", 3: "set aside", 4: "row 1", 5: "row 1", 6: "free"}


def test_the_end_returns_the_rest_and_only_the_rest():
    model = pool()
    outcomes(model, ops.AllocGroupBegin(3), ops.Alloc(1))
    assert outcomes(model, ops.AllocGroupEnd(), ops.AllocGroupEnd()) == ["done", "done"]
    assert (lists(model), rows(model), model.available) == (([4, 5, 6, 2, 3], []), [([1], 1)], 5)


def test_when_all_are_served_single_slots_come_from_the_list():
    model = pool()
    assert outcomes(model, ops.AllocGroupBegin(1), ops.Alloc(1), ops.Alloc(1)) == ["done", [1], [2]]


def test_all_or_none_are_set_aside():
    model = pool(2)
    assert outcome(model, ops.AllocGroupBegin(3)) == "done"
    assert (lists(model), model.available) == (([1, 2], []), 2)
    assert outcome(model, ops.Alloc(1)) == [1]


def test_a_begin_inside_a_group_first_returns_what_is_left():
    model = pool()
    outcomes(model, ops.AllocGroupBegin(2), ops.AllocGroupBegin(3))
    # 1 and 2 go to the end; 3, 4, 5 are set aside.
    assert (lists(model), model.available) == (([6, 1, 2], []), 3)
    assert outcome(model, ops.Alloc(1)) == [3]
    # One that is refused returns them all the same.
    outcomes(model, ops.AllocGroupBegin(6))
    assert (lists(model), model.available) == (([6, 1, 2, 4, 5], []), 5)


def test_slots_returned_can_be_set_aside_at_once():
    model = pool(3)
    outcomes(model, ops.AllocGroupBegin(2), ops.AllocGroupBegin(3))
    assert (lists(model), outcome(model, ops.Alloc(1))) == (([], []), [3])


def test_a_clear_inside_a_group_has_all_slots_free():
    model = pool(3)
    outcomes(model, ops.AllocGroupBegin(2), ops.Clear())
    assert (lists(model), model.available) == (([1, 2, 3], []), 3)
    assert outcomes(model, ops.AllocGroupEnd(), ops.Alloc(3)) == ["done", [1, 2, 3]]


def test_another_choice_may_come_from_those_set_aside():
    """Slots 1 and 2 are set aside, 3 was predicted for two; the target took 2 and 4."""
    model = pool(4)
    model.apply(ops.AllocGroupBegin(2))
    expectation = model.apply(ops.Alloc(2))
    assert expectation.slots == [3, 4]
    model.adopt(expectation, [2, 4], {})
    assert (rows(model), model.available) == ([([2, 4], 2)], 0)
    assert sorted(page for page, owner in model.owners().items() if owner == "set aside") == [1, 3]


@pytest.mark.parametrize(
    "op", [new(1), ops.Decode((0,)), ops.GroupBegin(), ops.FreeSegment(0), ops.Resize(4)]
)
def test_what_a_state_pool_does_not_have(op):
    model = pool()
    model.apply(ops.Alloc(1))
    assert outcome(model, op) == "no call"
