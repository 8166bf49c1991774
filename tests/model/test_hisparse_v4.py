"""The DeepSeek-V4 variant of section 6, in examples worked out from its text.

Pages of eight tokens on the full and the swa side; a device page is two slots, one for each block of four
tokens: block b of page k is the compressed slot 2k + b.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, lists, mapped, new, outcome, outcomes, sides


def pool(device: int = 6, **options):
    return fresh(8, 8, "hisparse-v4", swa_size=48, device_size=2 * device, **options)


def test_a_fresh_pool():
    model = pool()
    assert (lists(model)[0], sides(model)["swa"][0], sides(model)["device"][0]) == (
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6],
    )
    # 64 // 4 + 2 + 1 compressed entries; 64 + 8 + 1 of swa.
    assert model.mappings["device"] == [0] * 18 + [-1]
    assert model.mappings["swa"] == [0] * 72 + [-1]
    # Six swa pages of 8; six device pages that stand for 8 tokens each.
    assert (model.available, model.sizes) == (48, {"swa": 48})


def test_a_device_page_stands_for_a_whole_page_of_tokens():
    assert pool(3).available == 24


def test_every_complete_block_has_a_device_slot():
    model = pool()
    expectation = model.apply(new(11))
    assert expectation.slots == [*range(8, 19)]
    # Tokens 3 and 7, slots 11 and 15, end their blocks: entries 11 // 4 = 2 and 15 // 4 = 3.
    assert expectation.peers == {"swa": [*range(8, 19)], "device": [2, 3]}
    assert (mapped(model, "device"), sides(model)["device"][0]) == ({2: 2, 3: 3}, [2, 3, 4, 5, 6])


def test_the_last_block_goes_on_when_it_is_complete():
    model = pool()
    outcomes(model, new(5), new(8))  # A: page 1, one block. B: page 2, two blocks.
    assert mapped(model, "device") == {2: 2, 4: 4, 5: 5}
    # A's last_loc is 12: (12 − 3) // 4 = 2, whose device slot is 2; so the block of tokens 4 … 7 gets 3.
    expectation = model.apply(ops.Extend(((0, 3),)))
    assert (expectation.slots, expectation.peers["device"]) == ([13, 14, 15], [3])
    # 8 → 12 tokens: full page 3, device page 3: its first slot is 6, of entry 27 // 4.
    expectation = model.apply(ops.Extend(((0, 4),)))
    assert (expectation.slots, expectation.peers["device"]) == ([24, 25, 26, 27], [6])
    assert mapped(model, "device") == {2: 2, 3: 3, 4: 4, 5: 5, 6: 6}


def test_a_decode_takes_no_device_slot():
    model = pool()
    model.apply(new(3))
    expectation = model.apply(ops.Decode((0,)))
    # Token 3 completes its block, in slot 11.
    assert (expectation.slots, expectation.peers) == ([11], {"swa": [11], "device": [0]})
    assert sides(model)["device"][0] == [1, 2, 3, 4, 5, 6]
    # Its last block has no device slot, so the row goes on by decodes.
    assert outcomes(model, ops.Extend(((0, 4),)), ops.Decode((0,))) == [[], [12]]


@pytest.mark.parametrize(
    ("op", "swa"),
    [
        (ops.ExtendLogical(((-1, 16),)), [*range(8, 24)]),
        (ops.ExtendTail(-1, 16, 8), [0] * 8 + [*range(8, 16)]),
    ],
)
def test_logical_and_tail_extends_leave_the_device_alone(op, swa):
    model = pool()
    expectation = model.apply(op)
    assert expectation.peers == {"swa": swa, "device": [0] * 4}
    assert sides(model)["device"][0] == [1, 2, 3, 4, 5, 6]


def test_all_three_or_none():
    model = pool(1)
    assert outcome(model, new(16)) == "None"  # two device pages
    assert (lists(model)[0], sides(model)) == (
        [1, 2, 3, 4, 5, 6, 7, 8],
        {"swa": ([1, 2, 3, 4, 5, 6], []), "device": ([1], [])},
    )
    # Eleven tokens are two blocks, so one device page is enough.
    assert outcome(model, new(11)) == [*range(8, 19)]


def test_free_releases_all_three():
    model = pool()
    outcomes(model, new(16, 8), ops.Free((0,)))
    assert (lists(model)[0], sides(model)) == (
        [1, 2, 4, 5, 6, 7, 8],
        {"swa": ([1, 2, 4, 5, 6], []), "device": ([1, 2, 4, 5, 6], [])},
    )
    assert mapped(model, "device") == {6: 6, 7: 7}


def test_free_hisparse_is_of_the_blocks_of_whole_pages():
    model = pool()
    model.apply(new(16))
    call = model.apply(ops.FreeDevice(0, 0, 1)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots) == ("free_hisparse", [*range(8, 16)])
    assert (mapped(model, "device"), sides(model)["device"][0]) == ({4: 4, 5: 5}, [1, 3, 4, 5, 6])
    assert len(mapped(model)) == 16


def test_free_swa_leaves_the_device_alone():
    model = pool()
    outcomes(model, new(8), ops.FreeSwa(0))
    assert (mapped(model), mapped(model, "device")) == ({}, {2: 2, 3: 3})


def test_a_buffer_is_of_compressed_slots():
    model = pool()
    model.apply(new(19))  # four blocks on device pages 1 and 2, and three tokens more
    expectation = model.apply(ops.DeviceBuffer(0, 3))
    call = expectation.call
    assert isinstance(call, calls.BufferCall)
    assert (call.slots, call.need) == ([2, 3, 4, 5], 6)
    assert (expectation.slots, sides(model)["device"][0]) == ([2, 3, 4, 5, 6, 7], [4, 5, 6])
    assert mapped(model, "device") == {}
    call = model.apply(ops.FreeBuffer()).call
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots) == ("free_hisparse_indices", [2, 3, 4, 5, 6, 7])
    assert sides(model)["device"][0] == [1, 2, 3, 4, 5, 6]


def test_a_group_ends_with_all_released():
    model = pool()
    outcomes(model, new(8, 8, 8), ops.GroupBegin(), ops.Free((1,)), ops.FreeDevice(0), ops.FreeSwa(0))
    model.apply(ops.GroupEnd())
    assert (lists(model)[0], sides(model)) == (
        [2, 4, 5, 6, 7, 8],
        {"swa": ([1, 2, 4, 5, 6], []), "device": ([1, 2, 4, 5, 6], [])},
    )


def test_what_a_group_holds_cannot_be_had_before_its_end():
    model = pool(1)
    taken = outcomes(model, new(8), ops.GroupBegin(), ops.FreeDevice(0), new(8), ops.GroupEnd(), new(8))
    # The one device page is held: refused, though two pages of the others are free.
    assert taken == [[*range(8, 16)], "done", "done", "None", "done", [*range(16, 24)]]
    assert mapped(model, "device") == {4: 2, 5: 3}


@pytest.mark.parametrize("op", [ops.Resize(5), ops.FreePages(0), ops.Alloc(1)])
def test_what_it_does_not_have(op):
    model = pool()
    model.apply(new(8))
    assert outcome(model, op) == "no call"
