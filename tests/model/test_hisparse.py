"""The HiSparse model against section 6 of the contract, in examples worked out from its text.

Page k holds slots 4k … 4k+3 on either side; eight logical pages stand over four device pages.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, lists, mapped, new, outcome, outcomes, rows, sides


def pool(device: int = 4, page_size: int = 4, **options):
    return fresh(device, page_size, "hisparse", ratio=2, **options)


def device_list(model) -> list[int]:
    """The device's free list; nothing is staged."""
    (free, staged) = sides(model)["device"]
    assert staged == []
    return free


# --- allocation -----------------------------------------------------------------------------------


def test_a_fresh_pool():
    model = pool()
    assert (lists(model)[0], device_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4])
    # size * ratio + page_size + 1 = 32 + 4 + 1 entries.
    assert model.mappings["device"] == [0] * 36 + [-1]
    assert (model.available, model.sizes) == (16, {})


def test_an_extend_takes_both_and_maps():
    model = pool()
    expectation = model.apply(new(6))
    assert (expectation.slots, expectation.peers) == ([*range(4, 10)], {"device": [*range(4, 10)]})
    assert mapped(model, "device") == {slot: slot for slot in range(4, 10)}
    assert (lists(model)[0], device_list(model)) == ([3, 4, 5, 6, 7, 8], [3, 4])


def test_a_decode_takes_the_logical_side_alone():
    model = pool()
    model.apply(new(4))
    expectation = model.apply(ops.Decode((0,)))
    assert (expectation.slots, expectation.peers) == ([8], {"device": [0]})
    assert (device_list(model), lists(model)[0]) == ([2, 3, 4], [3, 4, 5, 6, 7, 8])


def test_a_row_whose_last_token_has_no_device_slot_goes_on_by_decodes():
    model = pool()
    outcomes(model, new(4), ops.Decode((0,)))
    assert outcomes(model, ops.Extend(((0, 2),)), ops.Decode((0,))) == [[], [9]]
    assert outcome(model, ops.ExtendLogical(((0, 3),))) == [10, 11, 12]


def test_logical_pages_alone():
    model = pool(1)  # two logical pages, one device page
    expectation = model.apply(ops.ExtendLogical(((-1, 6),)))
    assert isinstance(expectation.call, calls.ExtendCall)
    assert (expectation.call.logical, expectation.slots) == (True, [*range(4, 10)])
    assert expectation.peers == {"device": [0] * 6}
    assert (lists(model)[0], device_list(model), model.available) == ([], [1], 0)


@pytest.mark.parametrize(
    ("trace", "op"),
    [
        ((), new(17)),  # 5 device pages
        ((new(8), new(8)), new(1)),  # none is left
        ((ops.ExtendLogical(((-1, 32),)),), new(1)),  # no logical page is
    ],
)
def test_both_sides_or_neither(trace, op):
    model = pool()
    outcomes(model, *trace)
    before = lists(model), sides(model), dict(mapped(model, "device"))
    assert outcome(model, op) == "None"
    assert (lists(model), sides(model), mapped(model, "device")) == before


def test_a_refusal_for_want_of_either_merges_nothing():
    model = pool(2, need_sort=True)  # 4 logical pages
    outcomes(model, new(8), ops.Free((0,)))
    assert (lists(model), sides(model)) == (([3, 4], [1, 2]), {"device": ([], [1, 2])})
    assert outcome(model, new(12)) == "None"
    assert (lists(model), sides(model)) == (([3, 4], [1, 2]), {"device": ([], [1, 2])})
    # 8 // 4 + 1 + 1 = 4 is more than either list has: both merge.
    assert outcome(model, new(8)) == [*range(4, 12)]


def test_both_sides_are_paged_where_a_page_is_one_slot():
    model = pool(4, 1)
    expectation = model.apply(new(3))
    assert isinstance(expectation.call, calls.ExtendCall)
    assert (expectation.slots, expectation.peers) == ([1, 2, 3], {"device": [1, 2, 3]})
    model.apply(ops.Free((0,), order=ops.BACKWARDS))
    # To the front, ascending.
    assert (lists(model)[0], device_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4])
    expectation = model.apply(ops.Alloc(2))
    assert isinstance(expectation.call, calls.AllocCall)
    assert (expectation.slots, expectation.peers) == ([1, 2], {"device": [1, 2]})


def test_alloc_is_of_single_slots():
    assert outcome(pool(), ops.Alloc(1)) == "no call"


# --- release --------------------------------------------------------------------------------------


def test_free_releases_logical_pages_and_the_device_pages_they_have():
    model = pool()
    outcomes(model, new(4), ops.Decode((0,)), ops.Free((0,)))
    # The second page has no device page: page 0 is never released.
    assert (lists(model)[0], device_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4])
    assert mapped(model, "device") == {}


def test_free_hisparse_releases_the_device_pages_alone():
    model = pool()
    model.apply(new(8))
    call = model.apply(ops.FreeDevice(0, 4, 1)).call
    assert isinstance(call, calls.FreeCall)
    # Whole pages: that of position 4.
    assert (call.method, call.slots) == ("free_hisparse", [8, 9, 10, 11])
    assert mapped(model, "device") == {4: 4, 5: 5, 6: 6, 7: 7}
    assert (device_list(model), lists(model)[0], rows(model)) == (
        [2, 3, 4],
        [3, 4, 5, 6, 7, 8],
        [([1, 2], 8)],
    )


@pytest.mark.parametrize(
    ("op", "logical"),
    [(ops.Free((2,)), [3, 4, 5, 6, 7, 8]), (ops.FreeSegment(2), [3, 4, 5, 6, 7, 8])],
)
def test_device_pages_return_as_a_set(op, logical):
    model = pool()
    # Device pages 1, 2 go to the front one after the other: [2, 1, 3, 4]; C has logical pages 3, 4 on them.
    outcomes(model, new(4, 4), ops.FreeDevice(0), ops.FreeDevice(1), new(8))
    assert [model.peer_pages(row, "device") for row in model.rows] == [[0], [0], [2, 1]]
    model.apply(op)
    assert (device_list(model), lists(model)[0]) == ([1, 2, 3, 4], logical)


def test_groups_are_no_ops():
    model = pool()
    outcomes(model, new(4), ops.GroupBegin())
    assert not model.in_group
    assert outcomes(model, ops.Free((0,)), ops.GroupBegin(), ops.GroupEnd(), ops.GroupEnd()) == ["done"] * 4
    assert (lists(model)[0], device_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4])
    assert outcomes(model, ops.Misuse("end-without-begin"), ops.Misuse("nested-begin")) == ["no call"] * 2


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "pages", "slots", "left"),
    [
        (8, 1, range(4, 8), [2, 3, 4]),  # the second page is left over
        (8, 2, range(4, 12), [3, 4]),
        (5, 2, range(4, 12), [3, 4]),  # the second page, which held one token, is completed
        (5, 3, range(4, 16), [4]),  # and a third is allocated
        (5, 4, range(4, 20), []),
        (3, 0, range(4, 8), [2, 3, 4]),  # at least one page
    ],
)
def test_a_buffer_is_made_of_the_rows_own_pages_first(tokens, pages, slots, left):
    model = pool()
    model.apply(new(tokens))
    expectation = model.apply(ops.DeviceBuffer(0, pages))
    call = expectation.call
    assert isinstance(call, calls.BufferCall)
    assert (call.slots, call.need) == ([*range(4, 4 + tokens)], max(pages, 1) * 4)
    assert (expectation.slots, device_list(model)) == ([*slots], left)
    # The row has no device slots any more, and all of its logical ones.
    assert (mapped(model, "device"), rows(model)[0][1]) == ({}, tokens)


def test_a_buffer_that_is_refused_leaves_all_as_it_was():
    model = pool()
    model.apply(new(5))
    assert outcome(model, ops.DeviceBuffer(0, 5)) == "None"
    assert mapped(model, "device") == {slot: slot for slot in range(4, 9)}
    assert device_list(model) == [3, 4]


def test_a_buffer_merges_when_its_missing_pages_exceed_the_list():
    model = pool(need_sort=True)
    outcomes(model, new(4, 4), ops.Free((1,)))
    assert sides(model) == {"device": ([3, 4], [2])}
    # One page of its own and three more: sorted([3, 4] + [2]).
    assert outcome(model, ops.DeviceBuffer(0, 4)) == [*range(4, 20)]
    assert sides(model) == {"device": ([], [])}


def test_a_row_without_device_pages_gets_a_buffer_of_new_ones():
    model = pool()
    outcomes(model, new(4), ops.ExtendLogical(((-1, 4),)))
    assert outcome(model, ops.DeviceBuffer(1, 1)) == [8, 9, 10, 11]
    assert mapped(model, "device") == {4: 4, 5: 5, 6: 6, 7: 7}


def test_a_buffer_outlives_its_row():
    model = pool()
    outcomes(model, new(4), ops.DeviceBuffer(0, 1), ops.Free((0,)))
    assert (lists(model)[0], device_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4])
    assert model.owners("device")[1] == "buffer 0"
    call = model.apply(ops.FreeBuffer(3)).call  # modulo one buffer
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots) == ("free_hisparse_indices", [4, 5, 6, 7])
    assert device_list(model) == [1, 2, 3, 4]
    assert outcome(model, ops.FreeBuffer()) == "no call"


def test_a_partial_page_that_is_not_the_last_is_no_callers():
    """Logical tokens in the row's first page, device slots in its second: there is nothing to complete."""
    model = pool()
    # Two tokens of each; then the row goes on where its device page ends.
    outcomes(model, new(2), ops.Decode((0,)), ops.Decode((0,)), ops.ExtendLogical(((0, 4),)))
    assert outcome(model, ops.DeviceBuffer(0, 1)) == [4, 5, 6, 7]  # one page, the partial one, is the last
    assert outcomes(model, ops.DeviceBuffer(1, 1)) == [[8, 9, 10, 11]]


@pytest.mark.parametrize("op", [ops.Resize(5), ops.FreePages(0), ops.FreeSwa(0), ops.ExtendTail(-1, 4)])
def test_what_hisparse_does_not_have(op):
    model = pool()
    model.apply(new(4))
    assert outcome(model, op) == "no call"
