"""Concrete calls on an allocator of several sides: peers, mappings, rotation bases, and what is forwarded.

The allocator writes down how it was called (`recorder.py`); the calls of all kinds are in test_tensors.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof.impl.targets.protocol import State
from kvproof.impl.targets.tensors import not_forwarded
from kvproof.model import calls
from tests.impl.targets.recorder import DECODE, EXTEND, Recorder, plain, subject_of

REMAP = calls.RemapCall([4, 5], [8, 9], [12, 13])


def test_peers_change_hands_in_two_calls():
    recorder = Recorder(4)
    assert subject_of(recorder).apply(REMAP).error is None
    assert [(name, plain(list(args))) for name, args, _ in recorder.calls] == [
        ("set_full_to_swa_mapping", [("int64", [4, 5]), ("int64", [8, 9])]),
        ("clear_full_to_swa_mapping", [("int64", [12, 13])]),
    ]


class NoClearing(Recorder):
    """As up to 0.5.18: entries are set, and there is no call that clears them."""

    def __getattr__(self, name: str) -> Any:
        if name == "clear_full_to_swa_mapping":
            raise AttributeError(name)
        return super().__getattr__(name)


def test_entries_are_cleared_by_setting_them_to_0_where_there_is_no_call_for_it():
    recorder = NoClearing(4)
    assert subject_of(recorder).apply(REMAP).error is None
    assert [(name, plain(list(args))) for name, args, _ in recorder.calls] == [
        ("set_full_to_swa_mapping", [("int64", [4, 5]), ("int64", [8, 9])]),
        ("set_full_to_swa_mapping", [("int64", [12, 13]), ("int64", [0, 0])]),
    ]


@pytest.mark.parametrize(
    ("call", "index", "name"),
    [
        (calls.BufferCall([8, 9], 4), 0, "allocated_indices"),
        (REMAP, 0, "full_indices"),
        (replace(EXTEND, tail=2), 4, "last_loc"),
    ],
)
def test_a_changed_argument_of_a_newer_call_is_damage_too(call, index, name):
    recorder = Recorder(4)
    recorder.answer = lambda: recorder.calls[-1][1][index].fill_(1) and None
    answer = subject_of(recorder).apply(call)
    assert {(damage.kind, damage.where) for damage in answer.damage} == {("input-changed", name)}


# --- rotation bases -------------------------------------------------------------------------------


def test_bases_come_back_as_the_call_left_them():
    """The caller's list is what is written to, and the expectation's own list is not the caller's."""
    recorder = Recorder(4)
    subject = subject_of(recorder)
    recorder.answer = lambda: recorder.calls[-1][2]["rotation_bases"].__setitem__(1, 3)
    call = replace(EXTEND, bases=[1, None])
    assert subject.apply(call).bases == [1, 3]
    assert call.bases == [1, None]
    recorder.answer = lambda: None
    assert subject.apply(call).bases == [1, None]
    # A call that takes none leaves none, whatever the one before it left.
    assert subject.apply(EXTEND).bases is None


# --- side mappings --------------------------------------------------------------------------------


def mapped(*sides: tuple[str, list[int], int]) -> Any:
    """A surface's `sides`: name, mapping, and the slots that one of its entries stands for."""
    return lambda _allocator: {name: (torch.tensor(mapping), each) for name, mapping, each in sides}


def answering(recorder: Recorder, slots: list[int]) -> None:
    recorder.answer = lambda: torch.tensor(slots)


@pytest.mark.parametrize("call", [calls.AllocCall(3), EXTEND, replace(EXTEND, logical=True), DECODE])
def test_the_peers_of_what_is_handed_out_are_read_in_its_order(call):
    recorder = Recorder(4)
    subject = subject_of(recorder, sides=mapped(("swa", [0, 10, 11, 0, 13, -1], 1)))
    answering(recorder, [4, 1, 3])
    assert subject.apply(call).peers == {"swa": [13, 10, 0]}


def test_an_entry_for_several_slots_belongs_to_the_last_of_them():
    recorder = Recorder(4)
    sides = mapped(("swa", list(range(20)), 1), ("device", [0, 21, 22, 23, -1], 4))
    subject = subject_of(recorder, sides=sides)
    # Slots 7 and 15 complete blocks 1 and 3; of the others the blocks are not complete, or not theirs.
    answering(recorder, [6, 7, 8, 15])
    assert subject.apply(EXTEND).peers == {"swa": [6, 7, 8, 15], "device": [21, 23]}
    answering(recorder, [8, 9])
    assert subject.apply(EXTEND).peers == {"swa": [8, 9], "device": []}


@pytest.mark.parametrize("slot", [-1, 6, 1 << 40])
def test_a_slot_beyond_the_mapping_is_not_looked_up(slot):
    """To look it up could take the device; that the slot is out of range, others find."""
    recorder = Recorder(4)
    subject = subject_of(recorder, sides=mapped(("swa", [0, 10, 11, 0, 13, -1], 1)))
    answering(recorder, [1, slot])
    answer = subject.apply(calls.AllocCall(2))
    assert (answer.slots, answer.peers, answer.error) == ([1, slot], {}, None)


def test_where_nothing_is_handed_out_there_are_no_peers():
    recorder = Recorder(4)
    subject = subject_of(recorder, sides=mapped(("swa", [0, 10, 11, 0, 13, -1], 1)))
    assert subject.apply(calls.AllocCall(2)).peers == {}
    answering(recorder, [1, 2])
    # The buffer's slots are of the other side.
    assert subject.apply(calls.BufferCall([3], 2)).peers == {}


# --- wrappers -------------------------------------------------------------------------------------


class Inner:
    """What is wrapped: two methods, a property, and what is nobody else's business."""

    def free(self) -> None: ...

    def merge(self) -> None: ...

    @property
    def size_swa(self) -> int:
        return 4

    def _own(self) -> None: ...


class Outer(Recorder):
    """A wrapper that forwards `free` alone."""

    def free(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_what_a_wrapper_does_not_forward():
    assert not_forwarded(Outer(4), Inner()) == ["merge", "size_swa"]
    assert not_forwarded(Inner(), Inner()) == []


def test_a_gap_in_a_wrapper_is_told_once():
    subject = subject_of(Outer(4), wraps=lambda _allocator: Inner())
    first, second = subject.observe(), subject.observe()
    (damage,) = first.damage
    assert (damage.kind, damage.where) == ("not-forwarded", "Outer")
    assert damage.detail == "it wraps Inner and lacks merge, size_swa"
    assert (first.free, second) == ([1, 2, 3, 4], State([1, 2, 3, 4], []))


def test_a_wrapper_without_gaps_and_an_allocator_that_wraps_nothing():
    assert subject_of(Recorder(4), wraps=lambda _allocator: Inner()).observe().damage == ()
    assert subject_of(Outer(4), wraps=lambda _allocator: None).observe().damage == ()
