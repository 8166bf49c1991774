"""The kinds of a release: looked into, whatever it calls things, and what stands in for their KV pools.

The classes here are made up. Not covered: real releases (`test_real_releases.py`).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvproof.impl.targets.protocol import Lists, State
from kvproof.impl.targets.sglang import kinds, pools
from kvproof.model.config import Config

# --- made-up classes -------------------------------------------------------------------------------


class _Pool:
    def __init__(self, free, staged=()):
        self.free_pages = torch.tensor(free)
        self.staged_pages = [torch.tensor([page]) for page in staged]


class _Swa:
    """Sliding window; with pages, as from 0.5.8."""

    size_full = 2
    full_to_swa_index_mapping = torch.tensor([0, 5, 0, 0, -1])

    def __init__(self, size=2, page_size=2):
        self.full_attn_allocator, self.swa_attn_allocator = _Pool([1], [2]), _Pool([3, 4])

    def full_available_size(self):
        return 4

    def swa_available_size(self):
        return 3

    def available_size(self):
        return 2


class _OldSwa(_Swa):
    """As up to 0.5.3: single slots, a longer mapping without a -1, and no `available_size`."""

    full_to_swa_index_mapping = torch.tensor([0, 7, 0, 0, 0, 0])

    def __init__(self, size=2):
        super().__init__()

    def available_size(self):
        raise NotImplementedError()


def test_what_waits_anywhere_is_staged():
    pool = _Pool([3, 1], [2, 4])
    assert kinds.state(pool, "paged") == State([3, 1], [2, 4])
    pool.release_pages = torch.tensor([7])
    assert kinds.state(pool, "token") == State([3, 1], [7, 2, 4])


def test_the_sides_and_the_mapping_of_a_sliding_window():
    sizes = {"full": 4, "swa": 3}
    sides, mappings = {"swa": Lists([3, 4], [])}, {"swa": [0, 5, 0, 0, -1]}
    assert kinds.state(_Swa(), "swa") == State([1], [2], sides=sides, mappings=mappings, sizes=sizes)
    # The ring has no list of its own; a pure pool has no mapping that could be wrong either.
    assert kinds.state(_Swa(), "swa-ring") == State([1], [2], mappings=mappings, sizes=sizes)
    assert kinds.state(_Swa(), "pure-swa") == State([1], [2], sizes=sizes)


def test_an_old_mapping_is_cut_to_the_slots_there_are():
    assert kinds.state(_OldSwa(), "swa").mappings == {"swa": [0, 7, 0, -1]}


def test_available_where_a_release_has_no_answer():
    assert kinds.available(_Swa(), "swa") == 2
    assert kinds.available(_OldSwa(), "swa") == 3


def test_the_device_side_and_its_mapping():
    allocator = SimpleNamespace(
        logical_attn_allocator=_Pool([2], [1]),
        hisparse_attn_allocator=_Pool([], [6]),
        full_to_hisparse_device_index_mapping=torch.tensor([0, 4, -1]),
    )
    device, mapping = Lists([], [6]), [0, 4, -1]
    assert kinds.state(allocator, "hisparse") == State(
        [2], [1], sides={"device": device}, mappings={"device": mapping}
    )
    allocator.logical_attn_allocator = _Swa()
    allocator.full_available_size, allocator.swa_available_size = lambda: 8, lambda: 3
    assert kinds.state(allocator, "hisparse-v4") == State(
        [1],
        [2],
        sides={"swa": Lists([3, 4], []), "device": device},
        mappings={"swa": [0, 5, 0, 0, -1], "device": mapping},
        # Its own answer, which counts the device side, not the logical side's.
        sizes={"full": 8, "swa": 3},
    )


def test_class_lists_are_the_sides_of_page_interleave():
    allocator = SimpleNamespace(
        class_free_pages=[torch.tensor([2]), torch.tensor([5, 3])],
        class_release_pages=[torch.tensor([4]), torch.tensor([], dtype=torch.int64)],
        aggregate_free_size=lambda: 16,
    )
    assert kinds.state(allocator, "page-interleave") == State(
        [2], [4], sides={"class 1": Lists([5, 3], [])}, sizes={"aggregate": 16}
    )


class _Some:
    def alloc(self, need):
        raise NotImplementedError("use alloc_extend")

    def free_swa(self, slots):
        if len(slots) > 3:
            raise NotImplementedError
        return self.other(slots)

    def free_segment(self, slots, *, start_pos): ...


def test_a_call_that_only_says_it_is_none_is_missing():
    missing = kinds.calls_missing(SimpleNamespace(paged_class=_Some), "paged")
    assert missing == set(kinds.CALLS) - {"free_swa", "free_segment"}


# --- stand-ins -------------------------------------------------------------------------------------


def test_a_stand_in_is_of_its_class_and_has_no_memory():
    import abc

    class Release(abc.ABC):
        full_to_swa_index_mapping = "never registered"

        def __init__(self):
            raise MemoryError

        @property
        def swa_req_ring_size(self):
            raise AssertionError("needs the memory")

        @abc.abstractmethod
        def abstract(self): ...

        def register_mapping(self, mapping):
            self.full_to_swa_index_mapping = mapping

    pool, other = pools.swa_pool(Release, ring=6), pools.swa_pool(Release, ring=None)
    assert isinstance(pool, Release)
    assert (pool.swa_req_ring_size, other.swa_req_ring_size) == (6, None)
    pool.register_mapping([1])
    assert (pool.full_to_swa_index_mapping, other.full_to_swa_index_mapping) == ([1], None)


def test_the_pool_of_the_compressed_variant():
    config = Config("hisparse-v4", 64, 8, swa_size=32, device_size=12)
    pool = pools.v4_pool(object, object, config, "cpu")
    # Every fourth token has a compressed slot, and a page of them is a quarter of a page.
    assert (pool.c4_logical_size, pool.c4_kv_pool.size, pool.c4_kv_pool.page_size) == (16, 12, 2)
