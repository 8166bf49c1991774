"""The Mamba slot allocator against section 7 of the contract, checked mode included."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from kvproof.impl.errors import AllocatorError, StateError
from kvproof.impl.mamba import MambaSlotAllocator
from tests.impl.pools import ids


def mamba(size: int, *, checked: bool = False) -> MambaSlotAllocator:
    return MambaSlotAllocator(size, "cpu", checked=checked)


def alloc(pool: MambaSlotAllocator, size: int) -> list[int] | None:
    slots = pool.alloc(size)
    return None if slots is None else slots.tolist()


def free(pool: MambaSlotAllocator) -> list[int]:
    return pool.free_slots.tolist()


@pytest.mark.parametrize("checked", [False, True])
def test_slots_are_first_in_first_out_and_the_dummy_is_never_out(checked):
    pool = mamba(4, checked=checked)
    assert alloc(pool, 1) == [1]  # the handed case "mamba-dummy"
    assert alloc(pool, 2) == [2, 3]
    pool.free(ids(3, 1, dtype=torch.int32))
    assert free(pool) == [4, 3, 1]
    assert alloc(pool, 4) is None
    assert alloc(pool, 0) == []
    assert (pool.available_size(), pool.schedulable_available_size()) == (3, 3)
    assert alloc(pool, 3) == [4, 3, 1]
    assert pool.alloc(0).dtype == pool.free_slots.dtype == torch.int64


@pytest.mark.parametrize("checked", [False, True])
def test_a_group_serves_single_slots_and_returns_the_rest_alone(checked):
    pool = mamba(6, checked=checked)
    pool.alloc_group_begin(3)
    assert (free(pool), pool.available_size()) == ([4, 5, 6], 3)
    assert alloc(pool, 1) == [1]
    assert alloc(pool, 2) == [4, 5]  # only single slots come from the group
    assert alloc(pool, 1) == [2]
    pool.free(ids(1))
    pool.alloc_group_end()
    assert free(pool) == [6, 1, 3]
    pool.alloc_group_end()  # nothing to return
    assert free(pool) == [6, 1, 3]


@pytest.mark.parametrize("checked", [False, True])
def test_an_empty_group_falls_back_to_the_free_list(checked):
    pool = mamba(3, checked=checked)
    pool.alloc_group_begin(1)
    assert [alloc(pool, 1), alloc(pool, 1)] == [[1], [2]]
    pool.alloc_group_end()
    assert free(pool) == [3]


@pytest.mark.parametrize("checked", [False, True])
def test_setting_aside_is_all_or_none(checked):
    pool = mamba(3, checked=checked)
    pool.alloc_group_begin(4)
    assert free(pool) == [1, 2, 3]
    pool.alloc_group_begin(0)
    assert alloc(pool, 1) == [1]
    pool.alloc_group_end()
    assert free(pool) == [2, 3]


@pytest.mark.parametrize("checked", [False, True])
def test_a_begin_inside_a_group_first_returns_what_is_left(checked):
    pool = mamba(5, checked=checked)
    pool.alloc_group_begin(3)
    assert alloc(pool, 1) == [1]
    pool.alloc_group_begin(4)  # 4, 5 and then 2, 3 come back
    assert free(pool) == []
    assert [alloc(pool, 1) for _ in range(4)] == [[4], [5], [2], [3]]


@pytest.mark.parametrize("checked", [False, True])
def test_clear_inside_a_group_makes_all_slots_free(checked):
    pool = mamba(4, checked=checked)
    alloc(pool, 1)
    pool.alloc_group_begin(2)
    pool.clear()
    assert free(pool) == [1, 2, 3, 4]
    pool.alloc_group_end()
    assert free(pool) == [1, 2, 3, 4]


def test_what_is_passed_and_returned_shares_no_memory_with_the_list():
    pool = mamba(4)
    slots = pool.alloc(2)
    pool.free(slots)
    slots.fill_(9)
    pool.alloc_group_begin(2)
    single = pool.alloc(1)
    single.fill_(9)
    pool.alloc_group_end()
    assert free(pool) == [1, 2, 4]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (slots, single, pool.free_slots)}
    assert len(storages) == 3


@pytest.mark.parametrize("make", [lambda: mamba(0), lambda: mamba(2).alloc(-1)])
def test_numbers_out_of_range_are_refused(make):
    with pytest.raises(AllocatorError):
        make()


def test_a_negative_group_is_refused_and_an_open_one_stays():
    pool = mamba(3)
    pool.alloc_group_begin(2)
    with pytest.raises(AllocatorError, match="alloc_group_begin: expected num_reqs >= 0, got -1"):
        pool.alloc_group_begin(-1)
    assert free(pool) == [3]
    assert alloc(pool, 1) == [1]


def test_tensors_of_the_wrong_kind_are_refused():
    pool = mamba(3)
    for wrong in (torch.tensor([1.0]), ids(1).reshape(1, 1), ids(1, dtype=torch.int16)):
        with pytest.raises(AllocatorError, match="free: expected free_index"):
            pool.free(wrong)
    pool.free(torch.tensor([]))


def test_the_environment_switches_checks_on(monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "true")
    assert MambaSlotAllocator(2, "cpu").checked
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "0")
    assert not MambaSlotAllocator(2, "cpu").checked


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((3,), "free call 4: expected live slots, got slot 3, of page 3, never handed out"),
        ((1,), "free call 4: expected live slots, got slot 1, of page 1, released by free call 3"),
        ((2, 2), "free call 4: expected every slot once, got slot 2 twice"),
        ((0,), "free call 4: expected live slots, got slot 0, of the padding page"),
        ((9,), "free call 4: expected live slots, got slot 9, outside pages 1 to 4"),
    ],
)
def test_checked_frees(slots, message):
    """Slot 1 is free again, 2 is live, 3 is set aside, 4 is free."""
    pool = mamba(4, checked=True)
    alloc(pool, 2)
    pool.alloc_group_begin(1)
    pool.free(ids(1))
    with pytest.raises(AllocatorError) as caught:
        pool.free(ids(*slots))
    assert str(caught.value).startswith(message)
    assert free(pool) == [4, 1]
    assert alloc(pool, 1) == [3]
    pool.free(ids(3, 2))
    assert free(pool) == [4, 1, 3, 2]


def test_a_damaged_list_is_refused():
    pool = mamba(3, checked=True)
    alloc(pool, 1)
    pool.free_slots = ids(2, 1)
    with pytest.raises(StateError, match="page 1 in it, live: alloc call 1"):
        pool.alloc(1)


@pytest.mark.parametrize("checked", [False, True])
def test_random_lawful_use_is_a_queue_with_a_tray(checked):
    rng, pool = random.Random(7), mamba(9, checked=checked)
    queue, tray, live = deque(range(1, 10)), deque[int](), list[int]()
    for _ in range(400):
        kind = rng.choice(("one", "one", "some", "free", "begin", "end"))
        if kind == "begin":
            count = rng.randrange(5)
            queue += tray
            tray = deque()
            if count <= len(queue):
                tray = deque(queue.popleft() for _ in range(count))
            pool.alloc_group_begin(count)
        elif kind == "end":
            queue += tray
            tray = deque()
            pool.alloc_group_end()
        elif kind == "free":
            gone = [live.pop(rng.randrange(len(live))) for _ in range(rng.randrange(len(live) + 1))]
            queue += gone
            pool.free(ids(*gone))
        else:
            count = 1 if kind == "one" else rng.randrange(5)
            source = tray if tray and count == 1 else queue
            expected = [source.popleft() for _ in range(count)] if count <= len(source) else None
            live += expected or []
            assert alloc(pool, count) == expected
        assert free(pool) == list(queue)
    assert sorted([*queue, *tray, *live]) == list(range(1, 10))
