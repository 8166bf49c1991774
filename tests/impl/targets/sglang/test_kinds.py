"""Every kind of every supported release: found, built on stand-ins, looked into, and driven for a moment.

Real releases run in processes of their own, their kernels in Triton's interpreter. Expected slots and lists
are those of fresh pools by the specification (§3 to §8). Not covered: what longer sequences find in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kvproof.impl.targets.protocol import Lists, State
from kvproof.impl.targets.sglang import fetch, kinds, pools
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import SUPPORTED
from kvproof.model.config import ALLOCATORS, Config

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


# --- real releases ---------------------------------------------------------------------------------

_SWA = {"swa", "mamba"}
_HISPARSE = {*_SWA, "hisparse", "hisparse-v4"}
_PURE = {*_HISPARSE, "pure-swa"}
_ALL = {*_PURE, "swa-ring", "page-interleave"}
KINDS: dict[str, set[str]] = {
    "0.4.6.post5": set(),
    "0.4.9.post6": {"swa"},
    "0.5.3.post3": _SWA,
    "0.5.8": _SWA,
    "0.5.12": _HISPARSE,
    "0.5.15": _PURE,
    "0.5.18": _PURE,
    "0.5.20": _ALL,
    "0.5.22": _ALL,
    "0.5.23": _ALL,
}
NO_PAGE_0 = ("0.5.3.post3", "0.5.8")
"""Releases whose Mamba pool has no dummy slot: it hands out 0, and size - 1 is the last."""
LEAVES_DEVICE = "0.5.12 0.5.15 0.5.18 0.5.20"
"""Releases whose DeepSeek-V4 variant frees the logical side alone in `free`; the device's is its caller's."""

CONFIGS = {
    "swa 1": Config("swa", 8, 1, swa_size=4),
    "swa 4": Config("swa", 24, 4, swa_size=20),
    "swa-ring 4": Config("swa-ring", 16, 4, ring=6, request_rows=3),
    "pure-swa 1": Config("pure-swa", 8, 1),
    "hisparse 1": Config("hisparse", 4, 1, ratio=2),
    "hisparse 4": Config("hisparse", 12, 4, ratio=2),
    "hisparse-v4 4": Config("hisparse-v4", 16, 4, swa_size=12, device_size=6),
    "hisparse-v4 8": Config("hisparse-v4", 32, 8, swa_size=24, device_size=6),
    "mamba 1": Config("mamba", 5, 1),
    "page-interleave 4": Config("page-interleave", 16, 4, shards=2),
}

DRIVE = """
import dataclasses, inspect, json, sys, time
import torch
from kvproof.impl.targets.sglang import kinds
from kvproof.impl.targets.sglang.load import load, load_kinds
from kvproof.model.config import Config

version, configs, LEAVES_DEVICE = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split()
loaded = load("sglang==" + version)
at_once = "sglang.srt.mem_cache.base_swa_memory_pool" in sys.modules
load_kinds(loaded)

def extend(allocator, prefix, seq, last, **more):
    told = inspect.signature(allocator.alloc_extend).parameters
    lens = {"prefix_lens": [prefix], "prefix_lens_cpu": [prefix], "seq_lens": [seq], "seq_lens_cpu": [seq]}
    arguments = {name: torch.tensor(value) for name, value in lens.items() if name in told}
    last_loc = torch.tensor([last])
    return allocator.alloc_extend(**arguments, last_loc=last_loc, extend_num_tokens=seq - prefix, **more)

def seen(allocator, kind):
    return [kinds.available(allocator, kind), dataclasses.asdict(kinds.state(allocator, kind))]

report = {"offers": sorted(loaded.offers), "kinds": sorted(loaded.kinds), "absent": loaded.absent}
report |= {"at_once": at_once, "missing": {}, "runs": {}, "refused": []}
for kind in loaded.kinds:
    report["missing"][kind] = sorted(kinds.calls_missing(loaded, kind))
def run(config, kernels):
    kind = config.allocator
    allocator = kinds.construct(loaded, config, "cpu", kernels)
    states = [seen(allocator, kind)]
    if kind == "page-interleave":
        slots = extend(allocator, 0, 6, -1, rotation_bases=[None])
    elif config.page_size == 1:
        slots = allocator.alloc(3)
    else:
        slots = extend(allocator, 0, 6, -1)
        slots = torch.cat([slots, extend(allocator, 6, 9, int(slots[-1]))])
    states.append(seen(allocator, kind))
    allocator.free(slots)
    if kind == "hisparse-v4" and version in LEAVES_DEVICE:
        allocator.free_hisparse(slots)
    states.append(seen(allocator, kind))
    return [slots.tolist(), *states]

for name, fields in configs.items():
    config = Config(**fields)
    if config.allocator not in loaded.kinds:
        continue
    if not kinds.takes_page_size(loaded, config.allocator, config.page_size):
        report["refused"].append(name)
        continue
    paths = [True, False] if loaded.has_naive_path else [True]
    report["runs"][name] = [run(config, kernels) for kernels in paths]
print(json.dumps(report))
"""


def driven(version: str) -> dict:
    try:
        fetch.fetch(version)
    except SglangUnavailable as error:
        if "cannot reach the package registry" in str(error):
            pytest.skip(str(error))
        raise
    fields = {
        name: {field: getattr(config, field) for field in Config.__slots__}
        for name, config in CONFIGS.items()
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVE, version, json.dumps(fields), LEAVES_DEVICE],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pages(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def fresh(name: str) -> dict:
    """What the specification says of an allocator before its first call."""
    config = CONFIGS[name]
    count, ps = config.num_pages, config.page_size
    state = {"free": pages(1, count), "staged": [], "sides": {}, "mappings": {}, "sizes": {}}
    full, swa, rows = config.size, config.swa_size, config.request_rows
    unmapped = [0] * (full + ps) + [-1]
    match config.allocator:
        case "swa":
            state |= {"sides": {"swa": swa // ps}, "mappings": {"swa": unmapped}}
            state["sizes"] = {"full": full, "swa": swa}
        case "swa-ring":
            # Three rows, each with a ring of 6 tokens in 2 pages of 4.
            state |= {"mappings": {"swa": unmapped}, "sizes": {"full": full, "swa": rows * 8}}
        case "pure-swa":
            state["sizes"] = {"full": full, "swa": full}
        case "hisparse":
            mapping = [0] * (full * config.ratio + ps) + [-1]
            state |= {"sides": {"device": full // ps}, "mappings": {"device": mapping}}
        case "hisparse-v4":
            device = config.device_size // config.device_page_size
            mapping = [0] * (full // 4 + config.device_page_size) + [-1]
            state |= {"sides": {"swa": swa // ps, "device": device}}
            state["mappings"] = {"swa": unmapped, "device": mapping}
            state["sizes"] = {"full": min(full, config.device_size * 4), "swa": swa}
        case "page-interleave":
            state |= {"free": [2, 4, 6, 8], "sides": {"class 1": [3, 5, 7, 9]}, "sizes": {"aggregate": 32}}
    sides = {side: pages(1, n) if isinstance(n, int) else n for side, n in state["sides"].items()}
    state["sides"] = {side: {"free": free, "staged": []} for side, free in sides.items()}
    return {**state, "damage": [], "lost": None}


AVAILABLE = {
    "swa 1": 4, "swa 4": 20, "swa-ring 4": 16, "pure-swa 1": 8, "hisparse 1": 4, "hisparse 4": 12,
    "hisparse-v4 4": 12, "hisparse-v4 8": 24, "mamba 1": 5, "page-interleave 4": 32,
}  # fmt: skip
"""Slots a fresh allocator says are available: the tightest side, compressed slots counting for four."""


def check_run(version: str, name: str, run: list) -> None:
    slots, (available, before), (_, live), (available_again, after) = run
    ps = CONFIGS[name].page_size
    old_mamba = name == "mamba 1" and version in NO_PAGE_0
    if old_mamba:
        assert (slots, before["free"]) == ([0, 1, 2], [0, 1, 2, 3, 4])
    else:
        first = 2 * ps if name == "page-interleave 4" else ps
        assert slots == pages(first, first + (3 if ps == 1 else 6 if first > ps else 9) - 1)
        assert before == fresh(name)
    assert available == available_again == AVAILABLE[name]
    # While the slots are live, whoever has a peer of them points at it, one to one.
    for side, mapping in live["mappings"].items():
        compressed = side == "device" and name.startswith("hisparse-v4")
        of_row = [slot // 4 for slot in slots if slot % 4 == 3] if compressed else slots
        mapped = [slot for slot, peer in enumerate(mapping[:-1]) if peer]
        assert mapped == ([] if name == "swa-ring 4" else of_row)
        first_peer = ps // 4 if compressed else ps
        assert [mapping[slot] for slot in mapped] == pages(first_peer, first_peer + len(mapped) - 1)
    # All of it is back, whatever the order, and no entry of a mapping is left.
    assert sorted(after["free"] + after["staged"]) == before["free"]
    assert after["sides"].keys() == before["sides"].keys()
    for side, lists in after["sides"].items():
        assert sorted(lists["free"] + lists["staged"]) == before["sides"][side]["free"]
    assert (after["mappings"], after["sizes"]) == (before["mappings"], before["sizes"])


@pytest.mark.network
@pytest.mark.parametrize("version", SUPPORTED)
def test_every_kind_of_a_release_is_built_and_serves_a_row(version):
    """By its kernels and, where it has one, by its naive path."""
    report = driven(version)
    assert set(report["kinds"]) == set(report["offers"]) == KINDS[version]
    assert set(report["absent"]) == set(ALLOCATORS) - {"token", "paged"} - KINDS[version]
    for kind, reason in report["absent"].items():
        assert reason == f"SGLang {version} has no {kind} allocator"
    # What one kind needs is no burden of the token and the paged allocator.
    assert not report["at_once"]
    expected = {name for name, config in CONFIGS.items() if config.allocator in KINDS[version]}
    refused = {
        "0.4.9.post6": {"swa 4"},
        "0.5.3.post3": {"swa 4"},
        "0.5.12": {"hisparse 1", "hisparse-v4 4"},
    }.get(version, set())
    assert set(report["refused"]) == refused
    assert report["runs"].keys() == expected - refused
    for name, runs in report["runs"].items():
        assert len(runs) == (2 if version in ("0.5.22", "0.5.23") else 1)
        for run in runs:
            check_run(version, name, run)
    check_missing(version, report["missing"])


def check_missing(version: str, missing: dict[str, list[str]]) -> None:
    """Of the calls that came or went: in which release each is there."""
    number = tuple(int(part) for part in version.split(".")[:3])
    since = {
        ("swa", "alloc_extend"): (0, 5, 4),
        ("swa", "alloc_extend_swa_tail"): (0, 5, 12),
        ("swa", "set_full_to_swa_mapping"): (0, 5, 12),
        ("swa", "resize"): (0, 5, 16),
        ("swa", "free_segment"): (0, 5, 16),
        ("swa", "clear_full_to_swa_mapping"): (0, 5, 20),
        ("swa", "free_swa_segment"): (0, 5, 20),
        ("swa", "free_full"): (0, 5, 20),
        ("hisparse", "alloc"): (0, 5, 13),
        ("hisparse", "free_segments"): (0, 5, 16),
        ("hisparse-v4", "alloc_logical_only"): (0, 5, 13),
        ("hisparse-v4", "free_swa_segment"): (0, 5, 20),
        ("mamba", "alloc_group_begin"): (0, 5, 13),
    }
    for (kind, call), first in since.items():
        if kind in missing:
            assert (call in missing[kind]) == (number < first), (kind, call)
    for kind in missing.keys() & {"pure-swa"}:
        assert {"alloc_extend", "alloc_decode", "alloc_extend_swa_tail"} <= set(missing[kind])
    for kind in missing.keys() & {"page-interleave"}:
        assert {"alloc", "alloc_decode", "resize"} <= set(missing[kind])
