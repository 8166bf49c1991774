"""The page-interleave model against section 8 of the contract, in examples worked out from its text.

Two shards with pages of four: class 0 has pages 2, 4, 6, 8, class 1 has 3, 5, 7, 9. Page k holds slots
4k … 4k+3.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, new, outcome, outcomes, rows, sides


def pool(pages: int = 4, shards: int = 2, **options):
    return fresh(pages, 4, "page-interleave", shards=shards, **options)


def classes(model) -> list[list[int]]:
    """The free list of each class; nothing is staged."""
    assert not model.staged
    assert not any(staged for _, staged in sides(model).values())
    return [list(model.free_pages), *(free for free, _ in sides(model).values())]


def extend(model, op):
    """The bases given, those left behind, and the slots."""
    expectation = model.apply(op)
    assert isinstance(expectation.call, calls.ExtendCall)
    return expectation.call.bases, expectation.bases, expectation.slots


# --- allocation -----------------------------------------------------------------------------------


def test_pages_are_dealt_by_their_number():
    assert classes(pool()) == [[2, 4, 6, 8], [3, 5, 7, 9]]
    # Pages below N are padding: the first is N itself.
    assert classes(pool(2, 3)) == [[3, 6], [4, 7], [5, 8]]


def test_available_is_of_the_class_that_has_least():
    model = pool()
    assert (model.available, model.sizes) == (2 * 4 * 4, {"aggregate": 32})
    model.apply(new(12))  # two pages of class 0, one of class 1
    assert (model.available, model.sizes) == (2 * 4 * 2, {"aggregate": 20})


def test_the_pages_of_a_chain_go_round_the_classes():
    model = pool()
    # The classes tie, so the lowest is drawn: pages 2, 3 and 4.
    assert extend(model, new(10)) == ([None], [0], [*range(8, 18)])
    assert classes(model) == [[6, 8], [5, 7, 9]]
    assert rows(model) == [([2, 3, 4], 10)]


def test_a_base_is_drawn_as_the_classes_stand_at_that_rows_turn():
    model = pool()
    # Row 0 takes a page of class 0; then class 1 has most; then they tie.
    assert extend(model, new(1, 1, 1)) == ([None] * 3, [0, 1, 0], [8, 12, 16])
    assert extend(model, new(1)) == ([None], [1], [20])


def test_a_row_that_takes_nothing_has_its_base_drawn_as_well():
    model = pool()
    assert extend(model, new(0, 4)) == ([None, None], [0, 0], [8, 9, 10, 11])
    # And keeps it: class 1 has most now.
    assert extend(model, ops.Extend(((0, 4),))) == ([0], [0], [8 + 8, 17, 18, 19])


def test_a_base_can_be_given():
    model = pool()
    # Class 1, then class 0.
    assert extend(model, ops.Chain(1, 8)) == ([1], [1], [12, 13, 14, 15, 8, 9, 10, 11])
    assert extend(model, ops.Chain(3, 4)) == ([1], [1], [20, 21, 22, 23])  # modulo the shards


def test_a_row_goes_on_in_the_class_that_is_due():
    model = pool()
    outcomes(model, ops.Chain(1, 8), ops.Chain(1, 4))
    # Position-page 2 of the first chain: (1 + 2) % 2 = 1, whose next page is 7; of the other (1 + 1) % 2 = 0.
    assert extend(model, ops.Extend(((0, 4), (1, 4)))) == ([1, 1], [1, 1], [28, 29, 30, 31, 16, 17, 18, 19])


def test_prefixes_are_whole_pages():
    model = pool()
    model.apply(new(6))
    assert extend(model, ops.Extend(((0, 4), (-1, 1)))) == ([None], [0], [16])


def test_all_rows_or_none_and_the_bases_as_they_were():
    model = pool(1)
    assert extend(model, new(4, 8)) == ([None, None], [None, None], None)
    assert (classes(model), model.rows) == ([[2], [3]], [])
    assert extend(model, new(4)) == ([None], [0], [8, 9, 10, 11])
    # Class 1 has a page left, and class 0 has none.
    assert extend(model, ops.Chain(0, 4)) == ([0], [0], None)
    assert extend(model, ops.Chain(1, 4)) == ([1], [1], [12, 13, 14, 15])


def test_a_chain_may_ask_for_all_shards_at_once():
    model = pool()
    assert outcomes(model, new(33), new(32)) == ["None", [*range(8, 40)]]
    assert classes(model) == [[], []]


def test_every_class_merges_when_one_is_short():
    model = pool(2, need_sort=True)
    outcomes(model, new(8), ops.Free((0,)))
    assert (model.free_pages, model.staged, sides(model)) == ([4], [2], {"class 1": ([5], [3])})
    # Both have the page that is due: nothing merges.
    assert outcome(model, ops.Chain(0, 8)) == [*range(16, 24)]
    assert (model.staged, sides(model)) == ([2], {"class 1": ([], [3])})
    # Class 0 has none: class 1 merges with it.
    assert outcome(model, ops.Chain(0, 4)) == [8, 9, 10, 11]
    assert (model.free_pages, model.staged, sides(model)) == ([], [], {"class 1": ([3], [])})


def test_a_refusal_merges_nothing():
    model = pool(1, need_sort=True)
    outcomes(model, new(4), ops.Free((0,)))
    assert outcome(model, new(12)) == "None"
    assert (model.free_pages, model.staged, sides(model)) == ([], [2], {"class 1": ([3], [])})


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [ops.Free((0,)), ops.FreeSegment(0), ops.FreeSegments(0, 0, (3,))])
def test_each_page_returns_to_the_front_of_its_class_ascending(op):
    model = pool()
    # Pages 2 and 4 are freed in this order, so that class 0 is [4, 2, 6, 8]; the row is on 4, 3, 2.
    outcomes(model, ops.Chain(0, 4), ops.Chain(0, 4), ops.Free((0,)), ops.Free((0,)), ops.Chain(0, 12))
    assert rows(model) == [([4, 3, 2], 12)]
    assert outcome(model, op) == "done"
    assert classes(model) == [[2, 4, 6, 8], [3, 5, 7, 9]]


def test_staged_pages_wait_in_their_class():
    model = pool(need_sort=True)
    outcomes(model, new(12), ops.Free((0,)))
    assert (model.staged, sides(model)["class 1"]) == ([2, 4], ([5, 7, 9], [3]))


def test_a_group_ends_as_one_set_a_class():
    model = pool()
    outcomes(model, new(4, 4, 4), ops.GroupBegin(), ops.FreeSegment(2), ops.Free((0, 1)))
    # Pages 4, and then 2 and 3.
    assert (classes(model), sorted(model.deferred())) == ([[6, 8], [5, 7, 9]], [2, 3, 4])
    assert model.owners()[3] == "deferred"
    model.apply(ops.GroupEnd())
    assert classes(model) == [[2, 4, 6, 8], [3, 5, 7, 9]]


def test_another_choice_is_of_the_same_classes():
    """Pages 2, 3 were predicted; the target took 6 and 9."""
    model = pool()
    expectation = model.apply(new(5))
    model.adopt(expectation, [6, 9], {})
    assert (rows(model), classes(model)) == ([([6, 9], 5)], [[2, 4, 8], [3, 5, 7]])


@pytest.mark.parametrize("op", [ops.Alloc(1), ops.Decode((0,)), ops.FreePages(0), ops.Resize(5)])
def test_what_it_does_not_have(op):
    model = pool()
    model.apply(new(4))
    assert outcome(model, op) == "no call"
