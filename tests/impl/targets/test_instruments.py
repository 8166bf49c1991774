"""The instruments of a process: which there are, what they make of a call, and what of it is damage.

Costs and tools are played here; the real ones are in test_costs_on_gpu.py, and tested with the instruments.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch

from kvproof.impl.instruments.cost import Account, Compilation, Warmth
from kvproof.impl.instruments.findings import InstrumentError
from kvproof.impl.targets import instruments
from kvproof.impl.targets.instruments import LAUNCHES_MAX, Watch, install_fence, process_watch
from kvproof.impl.targets.protocol import Damage, State, Ticket
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.tensors import Surface, TensorSubject
from kvproof.model import calls
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError


class Costs:
    """A CostWatch whose next account is `account`; asked: what it was called with, and what was open then."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.asked: list[tuple[Warmth, bool, int]] = []
        self.open = False

    @contextlib.contextmanager
    def call(self, warmth, *, syncs, batch):
        self.asked.append((warmth, syncs, batch))
        self.open = True
        yield self.account
        self.open = False


@dataclass
class Report:
    kind: str
    kernel: str
    detail: str


class Log:
    """A sanitizer's log in which these reports are new."""

    def __init__(self, *reports: Report) -> None:
        self.reports = list(reports)

    def read(self):
        new, self.reports = self.reports, []
        return new


@pytest.fixture
def fresh(monkeypatch):
    """A process without a watch. Makes a watch with played costs; the real one's guard makes room."""
    present = process_watch(Ticket())
    present._guard.uninstall()
    monkeypatch.setattr(instruments, "_watch", None)
    made: list[Watch] = []

    def watch(account=None, **options) -> Watch:
        made.append(Watch(**options))
        made[-1]._cost = Costs(Account() if account is None else account)
        return made[-1]

    yield watch
    for one in [*made, instruments._watch]:
        if one is not None:
            one._guard.uninstall()
    present._guard.install()


def damage_of(watch: Watch, method: str = "free_segment") -> list[Damage]:
    with watch.open(), watch.call(method, Warmth(), sync_free=True, batch=1):
        pass
    return list(watch.read(None)[1])


# --- what a cost is called ----------------------------------------------------------------------------


def test_a_call_that_costs_nothing_is_no_damage(fresh):
    account = Account(launches=LAUNCHES_MAX, compiled=[Compilation("k", "x.py:1 in f", again=False)])
    assert damage_of(fresh(account)) == []


def test_a_wait_is_the_methods_and_told_once(fresh):
    (damage,) = damage_of(fresh(Account(syncs=["x.py:1 in f", "x.py:2 in f"])))
    assert (damage.kind, damage.where) == ("synchronised", "free_segment")
    assert "x.py:1 in f" in damage.detail


def test_a_recompilation_is_the_kernels(fresh):
    compiled = [
        Compilation("k", "x.py:1 in f", again=False),
        Compilation("k", "x.py:2 in f", again=True),
        Compilation("k", "x.py:3 in f", again=True),
        Compilation("l", "x.py:4 in f", again=True),
    ]
    found = damage_of(fresh(Account(compiled=compiled)))
    assert [(damage.kind, damage.where) for damage in found] == [("recompiled", "k"), ("recompiled", "l")]
    assert ["x.py:2" in found[0].detail, "x.py:4" in found[1].detail] == [True, True]


def test_launches_are_counted_against_a_bound(fresh):
    (damage,) = damage_of(fresh(Account(launches=LAUNCHES_MAX + 1)), "alloc_decode")
    assert (damage.kind, damage.where) == ("launches", "alloc_decode")
    assert f"{LAUNCHES_MAX + 1} launches" in damage.detail


def test_what_a_fence_or_a_tool_makes_compile_is_not_the_targets(fresh, monkeypatch):
    monkeypatch.setattr(instruments, "OutputGuard", lambda words=None: _NoGuard())
    monkeypatch.setattr(instruments, "_sanitizer_log", lambda _path: Log())
    account = Account(syncs=["here"], compiled=[Compilation("k", "there", again=True)])
    for options in ({"fenced": True}, {"sanitizer_log": "log"}):
        assert [damage.kind for damage in damage_of(fresh(account, **options))] == ["synchronised"]


def test_a_call_of_no_method_costs_nothing(fresh):
    """A clobber is the caller's own: what the method before it cost was told then."""
    watch = fresh(Account(syncs=["here"]))
    assert len(damage_of(watch)) == 1
    with watch.open():
        pass
    assert watch.read(None)[1] == ()


# --- tools ---------------------------------------------------------------------------------------------


class _NoGuard:
    """Guards nothing."""

    buffers = ()

    def install(self): ...
    def uninstall(self): ...
    def call(self):
        return contextlib.nullcontext()


def test_reports_of_a_sanitizer_are_damage_once(fresh, monkeypatch):
    log = Log(Report("illegal-access", "k", "8 bytes at 0x7"), Report("uninitialised-read", "l", "4 bytes"))
    monkeypatch.setattr(instruments, "_sanitizer_log", {"a.log": log}.__getitem__)
    watch = fresh(sanitizer_log="a.log")
    expected = [Damage("illegal-access", "k", "8 bytes at 0x7"), Damage("uninitialised-read", "l", "4 bytes")]
    assert damage_of(watch) == expected
    assert damage_of(watch) == []
    assert watch.reports() == []


def test_a_fenced_process_has_no_guard_words(fresh, monkeypatch):
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(instruments, "OutputGuard", lambda **options: asked.append(options) or _NoGuard())
    fresh()
    fresh(fenced=True)
    assert asked == [{}, {"words": 0}]


def test_whose_work_lost_the_device_is_known_where_memory_is_fenced(fresh, monkeypatch):
    monkeypatch.setattr(instruments, "OutputGuard", lambda words=None: _NoGuard())
    for account, fenced, expected in (
        (Account(lost_in="k"), True, "k"),
        (Account(), True, "torch"),
        (Account(), False, ""),
    ):
        watch = fresh(account, fenced=fenced)
        damage_of(watch)
        assert watch.lost_in == expected


def test_the_fence_is_put_up_with_the_cache_of_the_tool(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(instruments.fence, "install", lambda side, cache: asked.append((side, cache)))
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    install_fence(Ticket(fence="begin"))
    install_fence(Ticket())
    assert asked == [("begin", tmp_path)]


@pytest.mark.parametrize("error", [InstrumentError("no C compiler"), SglangUnavailable("no cache folder")])
def test_a_fence_that_cannot_be_is_the_machines_fault(monkeypatch, error):
    def refuse(_side, _cache):
        raise error

    monkeypatch.setattr(instruments.fence, "install", refuse)
    with pytest.raises(InfrastructureError, match=f"cannot be fenced here: {error}"):
        process_watch(Ticket(fence="end"))


def test_one_process_is_fenced_or_is_not(monkeypatch):
    process_watch(Ticket())
    monkeypatch.setattr(instruments.fence, "install", lambda _side, _cache: None)
    for other in (Ticket(device="cuda", fence="end"), Ticket(device="cuda", sanitizer_log="x.log")):
        with pytest.raises(InfrastructureError, match="a process of their own"):
            process_watch(other)


def test_a_process_has_one_watch():
    assert process_watch(Ticket()) is process_watch(Ticket("x", "torch"))


# --- what is watched of a call ----------------------------------------------------------------------


class Allocator:
    """Notes for each call whether its cost was being watched; `broken` is raised by every call and look."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.watched: list[bool] = []
        self.broken: Exception | None = None

    def available_size(self):
        self.watched.append(self.costs.open)
        return 0

    def __getattr__(self, name):
        if name.startswith("_") or name == "free_slots":
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.watched.append(self.costs.open)
            if self.broken is not None:
                raise self.broken

        return call


EVERY_CALL = [
    calls.AllocCall(4),
    calls.ExtendCall([0, 3, 0], [5, 4, 1], [-1, 6, -1], 7, 3),
    calls.DecodeCall([5, 4], [7, 10]),
    calls.FreeCall([4]),
    calls.FreeSegmentCall([4], 0),
    calls.FreeSegmentsCall([([4], 0)]),
    calls.FreePageIdsCall([1]),
    calls.GroupBeginCall(),
    calls.GroupEndCall(),
    calls.ClearCall(),
    calls.ResizeCall(8),
]


def subject_of(watch: Watch, config: Config | None = None, *sync_free: str) -> TensorSubject:
    allocator = Allocator(watch._cost)

    def lists(_allocator):
        if allocator.broken is not None:
            raise allocator.broken
        return State([], [])

    surface = Surface(
        lambda *_: allocator, cpu_lens=True, page_count=False, lists=lists, sync_free=frozenset(sync_free)
    )
    return TensorSubject(surface, config or Config("paged", 16, 4), "cpu", watch)


def test_the_methods_own_cost_is_watched_and_no_more(fresh):
    watch = fresh()
    subject = subject_of(watch, None, "alloc_extend")
    made = watch._cost.asked
    original = torch.tensor

    def not_while_watched(*args, **kwargs):
        assert not watch._cost.open
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", not_while_watched)
        for call in EVERY_CALL:
            assert subject.apply(call).error is None
    # Of each call the method was watched; available_size, which the harness asks, was not.
    assert subject._allocator.watched == [True, False] * len(EVERY_CALL)
    assert len({id(warmth) for warmth, _, _ in made}) == 1
    assert [syncs for _, syncs, _ in made] == [type(call) is calls.ExtendCall for call in EVERY_CALL]
    assert [batch for _, _, batch in made] == [1, 3, 2] + [1] * 8


def test_checked_mode_may_wait_and_every_allocator_starts_cold(fresh):
    watch = fresh()
    for config in (Config("paged", 16, 4), Config("paged", 16, 4, checked=True)):
        subject_of(watch, config, "alloc").apply(calls.AllocCall(4))
    (one, plain, _), (two, checked, _) = watch._cost.asked
    assert (plain, checked) == (True, False)
    assert one is not two


def test_a_cost_comes_with_the_answer(fresh):
    subject = subject_of(fresh(Account(syncs=["x.py:1 in f"])), None, "free_segment")
    answer = subject.apply(calls.FreeSegmentCall([4], 0))
    assert [(damage.kind, damage.where) for damage in answer.damage] == [("synchronised", "free_segment")]
    assert not answer.lost


GONE = RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_is_told_with_whose_work_it_was(fresh, monkeypatch):
    monkeypatch.setattr(instruments, "OutputGuard", lambda words=None: _NoGuard())
    for fenced, where in ((True, "k"), (False, "")):
        subject = subject_of(fresh(Account(lost_in="k"), fenced=fenced))
        subject._allocator.broken = GONE
        answer = subject.apply(calls.FreeCall([4]))
        assert (answer.lost, answer.lost_in, answer.error) == (True, where, GONE)


def test_a_fault_shows_in_the_call_that_caused_it(fresh, monkeypatch):
    """Also in one that returns nothing: the device is waited for before the answer is read."""
    watch = fresh()
    waits = iter([None, GONE, GONE])

    def settle():
        error = next(waits)
        if error is not None:
            raise error

    monkeypatch.setattr(watch, "settle", settle)
    subject = subject_of(watch)
    assert not subject.apply(calls.FreeCall([4])).lost
    answer = subject.apply(calls.FreeCall([4]))
    assert (answer.lost, answer.error) == (True, GONE)
    # It is the device's error that counts, whatever else the call raised.
    subject._allocator.broken = ValueError("no")
    answer = subject.apply(calls.FreeCall([4]))
    assert (answer.lost, answer.error) == (True, GONE)


def test_what_a_sanitizer_wrote_comes_with_a_lost_device_too(fresh, monkeypatch):
    log = Log(Report("illegal-access", "k", "8 bytes"))
    monkeypatch.setattr(instruments, "_sanitizer_log", lambda _path: log)
    subject = subject_of(fresh(sanitizer_log="a.log"))
    subject._allocator.broken = GONE
    monkeypatch.setattr(subject._watch, "settle", lambda: (_ for _ in ()).throw(GONE))
    answer = subject.apply(calls.FreeCall([4]))
    assert answer.lost
    assert answer.damage == (Damage("illegal-access", "k", "8 bytes"),)


def test_looking_never_raises_for_a_lost_device(fresh):
    subject = subject_of(fresh())
    subject._allocator.broken = GONE
    assert subject.observe() == State([], [], lost=GONE)
    subject._allocator.broken = ValueError("the harness's own")
    with pytest.raises(ValueError, match="own"):
        subject.observe()
