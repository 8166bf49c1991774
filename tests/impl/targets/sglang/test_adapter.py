"""SGLang's allocators as targets, read off the loaded classes; the classes here are made up.

Not covered: loading (`test_load.py`), and real releases (`test_real_releases.py`).
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.targets.sglang import adapter, kinds
from kvproof.impl.targets.sglang.adapter import Sglang
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.model import calls
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError, UserError

# --- made-up releases ------------------------------------------------------------------------------


class _Old:
    """As the oldest releases: few arguments, few calls, `free_slots`."""

    def __init__(self, size, dtype, device, kvcache):
        import torch

        self.made = {"size": size, "device": device, "debug": os.environ.get("SGLANG_DEBUG_MEMORY_POOL")}
        self.free_slots = torch.arange(1, size + 1)

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, need):
        return None

    def free_group_begin(self): ...

    def alloc_extend(self, prefix_lens, seq_lens, last_loc, extend_num_tokens):
        self.told = (prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), extend_num_tokens)


class _New:
    """As the newest: everything, staged pages, and a switch for the path."""

    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        import torch

        self.made = {"size": size, "page_size": page_size, "device": device, "need_sort": need_sort}
        self.debug = os.environ.get("SGLANG_DEBUG_MEMORY_POOL")
        self.free_pages = torch.tensor([3, 1])
        self.release_pages = torch.tensor([5])
        self.staged_pages = [torch.tensor([2, 4])]
        self.use_triton_kernels = None
        self.told = []

    def available_size(self):
        return 0

    def alloc_extend(
        self,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        num_new_pages=None,
    ):
        self.told.append((prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), num_new_pages))

    def alloc(self, need): ...
    def free_group_begin(self): ...
    def free_segment(self, slots, *, start_pos): ...
    def free_segments(self, segments): ...
    def free_page_ids(self, pages): ...
    def resize(self, config): ...


def release(monkeypatch, cls, *, naive):
    """A loaded release whose two allocators are this class."""
    loaded = SimpleNamespace(
        version="9.9",
        token_class=cls,
        paged_class=cls,
        has_naive_path=naive,
        standins=("sgl_kernel",),
        offers={},
        kinds={},
        absent={},
    )
    monkeypatch.setattr(adapter, "load", lambda _spec: loaded)
    return loaded


@pytest.fixture
def old(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(adapter, "process_watch", lambda ticket: _Watch(ticket.audited))
    release(monkeypatch, _Old, naive=False)


@pytest.fixture
def new(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(adapter, "process_watch", lambda ticket: _Watch(ticket.audited))
    release(monkeypatch, _New, naive=True)


class _Watch:
    """Sees nothing. audited: what was asked for."""

    def __init__(self, audited):
        self.audited = audited

    def open(self):
        import contextlib

        return contextlib.nullcontext()

    def call(self, method, warmth, *, sync_free, batch):
        import contextlib

        return contextlib.nullcontext()

    def settle(self): ...

    def read(self, output):
        return (None if output is None else output.tolist()), ()


def test_names(new):
    assert Sglang(Ticket("==9.9")).name == "sglang==9.9"
    assert Sglang(Ticket("@../x")).name == "sglang@../x"
    # Whatever is importable is called by its version; known faults go by the release in any case.
    assert Sglang(Ticket()).name == "sglang==9.9"
    assert {Sglang(Ticket(spec)).release for spec in ("", "==9.9", "@../x")} == {"sglang 9.9"}
    assert Sglang(Ticket()).stood_in == ("sgl_kernel",)


@pytest.mark.parametrize(
    ("path", "device", "taken"),
    [
        ("auto", "cpu", "torch"),
        ("torch", "cpu", "torch"),
        ("kernels", "cpu", "kernels"),
        ("auto", "cuda", "kernels"),
    ],
)
def test_the_path_of_a_release_with_both(new, path, device, taken):
    assert Sglang(Ticket("", path, device)).path == taken


def test_kernels_on_a_cpu_are_audited_and_have_the_torch_path_beside_them(new):
    target = Sglang(Ticket("==9.9", "kernels"))
    assert target._watch.audited
    sibling = target.other_path()
    assert (sibling.name, sibling.path, sibling.other_path()) == ("sglang==9.9", "torch", None)
    assert not Sglang(Ticket("==9.9", "torch"))._watch.audited


def test_a_release_without_a_torch_path(old, monkeypatch):
    target = Sglang(Ticket())
    assert (target.path, target.other_path()) == ("kernels", None)
    with pytest.raises(UserError, match=r"sglang==9\.9 has no torch path"):
        Sglang(Ticket("", "torch"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="set TRITON_INTERPRET=1"):
        Sglang(Ticket())


def test_a_release_that_cannot_be_loaded_is_the_machines_fault(monkeypatch):
    def refuse(_spec):
        raise SglangUnavailable("no wheel")

    monkeypatch.setattr(adapter, "load", refuse)
    with pytest.raises(InfrastructureError, match=r"^no wheel$"):
        Sglang(Ticket("==9.9"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("==", "'' is not a release number of SGLang; write one like "),
        ("==../../x", "'../../x' is not a release number of SGLang; write one like "),
        ("@", "sglang@ names no folder; write sglang@PATH"),
        ("@/nonexistent", "/nonexistent is no SGLang checkout: "),
        ("@~nobody-of-that-name/x", "~nobody-of-that-name/x cannot be read: "),
        ("@" + "x" * 5000, "cannot be read: File name too long; name the path of a source checkout"),
        (":x", "'sglang:x' names no SGLang; write sglang, sglang==VERSION or sglang@PATH"),
    ],
)
def test_a_name_that_means_no_sglang_is_bad_input(spec, message):
    with pytest.raises(UserError) as caught:
        Sglang(Ticket(spec))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_capabilities_are_read_off_the_classes(old):
    capabilities = Sglang(Ticket()).capabilities
    assert capabilities.allocators == ("token", "paged")
    for kind in ("token", "paged"):
        assert capabilities.lacking(kind) == {"FreeSegment", "FreeSegments", "FreePages", "Resize"}
    assert (capabilities.exact, capabilities.checked, capabilities.refuses) == (False, True, frozenset())
    assert not capabilities.any_page_size


def test_the_torch_path_takes_any_page_size_and_kernels_powers_of_two(new):
    torch_path, kernels = Sglang(Ticket("", "torch")), Sglang(Ticket("", "kernels"))
    assert torch_path.capabilities.any_page_size
    assert torch_path.capabilities.lacking("paged") == frozenset()
    assert not kernels.capabilities.any_page_size
    torch_path.build(Config("paged", 12, 3))
    with pytest.raises(UserError, match="powers of two as page size, not 3"):
        kernels.build(Config("paged", 12, 3))
    kernels.build(Config("paged", 12, 4))


class _Windowed(_New):
    """A sliding-window allocator of single slots, which has some of the calls."""

    full_to_swa_index_mapping = None

    def __init__(self, size, size_swa):
        import torch

        super().__init__(size, 1, None, "cpu", None, False)
        self.full_attn_allocator = self.swa_attn_allocator = _Old(size_swa, None, "cpu", None)
        self.full_to_swa_index_mapping = torch.zeros(size + 2, dtype=torch.int64)
        self.size_full = size

    def free_segment(self, slots, *, start_pos): ...
    def free_swa(self, slots): ...
    def set_full_to_swa_mapping(self, full, swa): ...
    def full_available_size(self):
        return 6

    def swa_available_size(self):
        return 4

    def available_size(self):
        raise NotImplementedError()


@pytest.fixture
def windowed(new, monkeypatch):
    """A release that offers two kinds more, one of which cannot be imported; it tells what it imported."""
    loaded = release(monkeypatch, _New, naive=True)
    loaded.offers = {"swa": {}, "mamba": {}}
    loaded.imported = []

    def load_kind(_loaded, kind):
        loaded.imported.append(kind)
        if kind == "mamba":
            loaded.absent[kind] = "mamba cannot be loaded: run: pip install x"
            raise SglangUnavailable(loaded.absent[kind])
        return loaded.kinds.setdefault(kind, {"allocator": _Windowed, "pool": object})

    monkeypatch.setattr(adapter, "load_kind", load_kind)
    monkeypatch.setattr(kinds, "load_kind", load_kind)
    return loaded


def test_only_the_kinds_that_are_asked_for_are_imported(windowed):
    target = Sglang(Ticket(allocators=("paged",)))
    assert target.capabilities.allocators == ("token", "paged", "swa", "mamba")
    assert windowed.imported == []
    Sglang(Ticket(allocators=("paged", "swa", "hisparse")))
    assert windowed.imported == ["swa"]


def test_a_kind_that_cannot_be_imported_is_missing_and_the_others_are_not(windowed):
    capabilities = Sglang(Ticket()).capabilities
    assert capabilities.allocators == ("token", "paged", "swa")
    # Of the calls that sliding window has in the contract, and no others.
    assert capabilities.lacking("swa") == {
        *("FreeSwaSegment", "FreeFull", "FreeFullSegment", "ExtendTail"),
    }


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (Config("hisparse", 8, 1, ratio=2), UserError, r"^sglang has no hisparse allocator$"),
        (Config("mamba", 8, 1), InfrastructureError, r"mamba cannot be loaded: run: pip install x$"),
        (Config("swa", 8, 4, swa_size=8), UserError, "its swa allocator takes no pages of 4 slots"),
    ],
)
def test_a_config_beyond_the_release_is_refused(windowed, config, error, message):
    with pytest.raises(error, match=message.replace("^sglang", r"^sglang==9\.9")):
        Sglang(Ticket()).build(config)


def test_an_old_sliding_window_is_asked_for_its_sides(windowed):
    subject = Sglang(Ticket()).build(Config("swa", 6, 1, swa_size=4))
    # The smaller side, for the release itself has no answer.
    assert subject.apply(calls.FreeSegmentCall([1], 0)).available == 4
    assert subject.observe().mappings == {"swa": [0, 0, 0, 0, 0, 0, 0, -1]}
    assert subject._sync_free == {"free_segment"}


@pytest.mark.parametrize("before", [None, "1"])
def test_a_constructor_gets_what_it_takes_and_the_environment_is_put_back(new, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("SGLANG_DEBUG_MEMORY_POOL", raising=False)
    else:
        monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", before)
    for checked in (False, True):
        for path in ("torch", "kernels"):
            target = Sglang(Ticket("", path))
            made = target.build(Config("paged", 18, 4, need_sort=True, checked=checked))._allocator
            assert made.made == {"size": 18, "page_size": 4, "device": "cpu", "need_sort": True}
            assert made.debug == ("true" if checked else "false")
            assert made.use_triton_kernels is (path == "kernels")
            assert os.environ.get("SGLANG_DEBUG_MEMORY_POOL") == before


def test_an_old_constructor_gets_less(old):
    made = Sglang(Ticket()).build(Config("token", 5, 1))._allocator
    assert made.made == {"size": 5, "device": "cpu", "debug": "false"}


def test_lists_are_seen_wherever_a_release_keeps_them(old, monkeypatch):
    assert Sglang(Ticket()).build(Config("token", 3, 1)).observe() == State([1, 2, 3], [])
    release(monkeypatch, _New, naive=True)
    assert Sglang(Ticket()).build(Config("paged", 20, 4)).observe() == State([3, 1], [5, 2, 4])


def test_a_call_is_spelt_as_the_release_has_it(old, monkeypatch):
    extend = calls.ExtendCall([3], [9], [6], 6, 2)
    subject = Sglang(Ticket()).build(Config("paged", 16, 4))
    assert subject.apply(extend).error is None
    assert subject._allocator.told == ([3], [9], [6], 6)
    release(monkeypatch, _New, naive=True)
    subject = Sglang(Ticket()).build(Config("paged", 16, 4))
    for _ in range(2):
        assert subject.apply(extend).error is None
    # The number of new pages is told by turns.
    assert sorted(subject._allocator.told, key=str) == [([3], [9], 2), ([3], [9], None)]


@pytest.mark.parametrize(
    ("cls", "path", "sync_free"),
    [
        (_Old, "kernels", {"free_segment"}),
        (_New, "kernels", {"free_segment", "alloc_extend", "alloc_decode"}),
        (_New, "torch", {"free_segment"}),
    ],
)
def test_what_a_release_documents_not_to_wait(new, monkeypatch, cls, path, sync_free):
    """The segment's free, and, where lengths come on the host as well, the launches of the kernels."""
    release(monkeypatch, cls, naive=cls is _New)
    target = Sglang(Ticket("", path))
    assert target.build(Config("token", 5, 1))._sync_free == sync_free
    assert target.build(Config("token", 5, 1, checked=True))._sync_free == frozenset()


def test_memory_is_fenced_before_anything_is_imported(monkeypatch):
    steps = []
    monkeypatch.setattr(adapter, "install_fence", lambda ticket: steps.append(ticket.fence))
    monkeypatch.setattr(adapter, "load", lambda _spec: steps.append("load") or _gone())
    with pytest.raises(InfrastructureError):
        Sglang(Ticket("==9.9", fence="end"))
    assert steps == ["end", "load"]


def _gone():
    raise SglangUnavailable("no wheel")
