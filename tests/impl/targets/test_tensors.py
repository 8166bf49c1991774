"""Concrete calls on an allocator that speaks torch: what it is given, and how its answers are read.

The allocator writes down how it was called (`recorder.py`); ours are in test_ours.py. What is read of further
sides is in test_tensors_sides.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof.impl.targets.protocol import State
from kvproof.impl.targets.tensors import free_list_name
from kvproof.model import calls
from kvproof.model.config import Config
from tests.impl.targets.recorder import DECODE, EXTEND, Recorder, plain, subject_of

LENS = [("int64", [0, 3])] * 2 + [("int64", [5, 4])] * 2 + [("int64", [-1, 6]), 6]
SLOTS = [("int64", [8, 9])]


@pytest.mark.parametrize(
    ("call", "name", "args", "kwargs"),
    [
        (calls.AllocCall(8), "alloc", [8], {}),
        (EXTEND, "alloc_extend", LENS, {}),
        (replace(EXTEND, logical=True), "alloc_logical_only", LENS, {}),
        (replace(EXTEND, tail=2), "alloc_extend_swa_tail", LENS, {"swa_tail_len": 2}),
        (replace(EXTEND, tail=0), "alloc_extend_swa_tail", LENS, {"swa_tail_len": 0}),
        (replace(EXTEND, bases=[1, None]), "alloc_extend", LENS, {"rotation_bases": [1, None]}),
        (DECODE, "alloc_decode", [("int64", [5, 4]), ("int64", [5, 4]), ("int64", [7, 10])], {}),
        (calls.FreeCall([4, 5]), "free", [("int64", [4, 5])], {}),
        (calls.FreeCall([]), "free", [("int64", [])], {}),
        (calls.FreeSegmentCall([8, 9], 4), "free_segment", [("int64", [8, 9])], {"start_pos": 4}),
        (
            calls.FreeSegmentsCall([([4], 0), ([8, 9], 4)]),
            "free_segments",
            [[[("int64", [4]), 0], [("int64", [8, 9]), 4]]],
            {},
        ),
        *[
            (calls.FreeCall([8, 9], method), method, SLOTS, {})
            for method in ("free_swa", "free_full", "free_hisparse", "free_hisparse_indices")
        ],
        *[
            (calls.FreeSegmentCall([8, 9], 4, method), method, SLOTS, {"start_pos": 4})
            for method in ("free_swa_segment", "free_full_segment")
        ],
        (calls.BufferCall([8, 9], 4), "alloc_device_buffer", [*SLOTS, 4], {}),
        (calls.AllocGroupBeginCall(3), "alloc_group_begin", [3], {}),
        (calls.AllocGroupEndCall(), "alloc_group_end", [], {}),
        (calls.FreePageIdsCall([2, 1]), "free_page_ids", [("int64", [2, 1])], {}),
        (calls.GroupBeginCall(), "free_group_begin", [], {}),
        (calls.GroupEndCall(), "free_group_end", [], {}),
    ],
)
def test_each_call_is_made_with_its_tensors(call, name, args, kwargs):
    recorder = Recorder(4)
    answer = subject_of(recorder).apply(call)
    assert [(made, plain(list(given)), keywords) for made, given, keywords in recorder.calls] == [
        (name, args, kwargs)
    ]
    assert (answer.slots, answer.error, answer.available, answer.damage) == (None, None, 7, ())
    assert type(answer.available) is int


def test_lengths_on_the_host_are_tensors_of_their_own():
    recorder = Recorder(4)
    subject_of(recorder).apply(EXTEND)
    ((_, (prefix, prefix_cpu, *_), _),) = recorder.calls
    assert prefix.data_ptr() != prefix_cpu.data_ptr()


def test_old_releases_get_no_lengths_on_the_host():
    recorder = Recorder(4)
    subject = subject_of(recorder, cpu_lens=False)
    subject.apply(EXTEND)
    subject.apply(DECODE)
    assert [(name, plain(list(args))) for name, args, _ in recorder.calls] == [
        ("alloc_extend", [("int64", [0, 3]), ("int64", [5, 4]), ("int64", [-1, 6]), 6]),
        ("alloc_decode", [("int64", [5, 4]), ("int64", [7, 10])]),
    ]


def test_the_number_of_new_pages_is_told_by_turns_where_it_may_be():
    recorder = Recorder(4)
    subject = subject_of(recorder, page_count=True)
    for _ in range(4):
        subject.apply(EXTEND)
    told = [keywords for _, _, keywords in recorder.calls]
    assert told.count({"num_new_pages": 2}) == told.count({}) == 2


def test_other_extends_are_told_no_number_of_pages():
    recorder = Recorder(4)
    subject = subject_of(recorder, page_count=True)
    for call in (replace(EXTEND, logical=True), replace(EXTEND, tail=2)) * 2:
        subject.apply(call)
    assert all("num_new_pages" not in keywords for _, _, keywords in recorder.calls)


def test_freed_slots_are_of_the_row_tables_dtype_and_page_ids_never():
    recorder = Recorder(4)
    subject = subject_of(recorder, Config("paged", 16, 4, row_dtype="int32"))
    for call in (
        calls.FreeCall([4]),
        calls.FreeSegmentCall([4], 0),
        calls.FreeSegmentsCall([([4], 0)]),
        calls.FreePageIdsCall([1]),
    ):
        subject.apply(call)
    given = [args[0][0][0] if name == "free_segments" else args[0] for name, args, _ in recorder.calls]
    assert [tensor.dtype for tensor in given] == [torch.int32] * 3 + [torch.int64]


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_is_read_with_its_dtype():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    recorder.answer = lambda: torch.tensor([4, 5], dtype=torch.int32)
    answer = subject.apply(calls.AllocCall(2))
    assert (answer.slots, answer.dtype) == ([4, 5], "int32")
    recorder.answer = lambda: torch.tensor([4, 5])
    answer = subject.apply(DECODE)
    assert (answer.slots, answer.dtype) == ([4, 5], "int64")


def test_what_is_raised_is_the_answer():
    recorder = Recorder(4)

    def refuse() -> None:
        raise RuntimeError("no")

    recorder.answer = refuse
    answer = subject_of(recorder).apply(calls.AllocCall(2))
    assert isinstance(answer.error, RuntimeError)
    assert (answer.slots, answer.available) == (None, 7)


def test_an_answer_that_is_no_tensor_is_an_error():
    recorder = Recorder(4)
    recorder.answer = lambda: [4, 5]
    answer = subject_of(recorder).apply(calls.AllocCall(2))
    assert isinstance(answer.error, TypeError)
    assert "list" in str(answer.error)


def test_an_unwritten_element_is_damage():
    recorder = Recorder(4)

    def half() -> torch.Tensor:
        output = torch.empty((3,), dtype=torch.int64)
        output[0] = 4
        return output

    recorder.answer = half
    answer = subject_of(recorder).apply(calls.AllocCall(3))
    assert [(damage.kind, damage.where) for damage in answer.damage] == [("unwritten", "the output")]
    assert "[1, 2]" in answer.damage[0].detail


def test_a_write_beside_a_tensor_is_damage():
    recorder = Recorder(4)

    def beside() -> torch.Tensor:
        output = torch.empty((3,), dtype=torch.int64)
        output.fill_(4)
        torch.as_strided(output, (4,), (1,), output.storage_offset()).fill_(4)
        return output

    recorder.answer = beside
    answer = subject_of(recorder).apply(calls.AllocCall(3))
    assert answer.slots == [4, 4, 4]
    assert [damage.kind for damage in answer.damage] == ["guard-words"]


@pytest.mark.parametrize(("index", "name"), [(0, "prefix_lens"), (2, "seq_lens"), (4, "last_loc")])
def test_a_changed_argument_is_damage(index, name):
    recorder = Recorder(4)
    recorder.answer = lambda: recorder.calls[-1][1][index].fill_(9) and None
    answer = subject_of(recorder).apply(EXTEND)
    assert [(damage.kind, damage.where) for damage in answer.damage] == [("input-changed", name)]


def test_an_answer_that_changes_later_is_damage():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    first, second = torch.tensor([4, 5]), torch.tensor([8])
    for output in (first, second):
        recorder.answer = lambda output=output: output
        subject.apply(calls.AllocCall(2))
    assert subject.observe().damage == ()
    first[1] = 9
    (damage,) = subject.observe().damage
    assert (damage.kind, damage.where) == ("output-changed", "an earlier output")
    assert "[4, 5]" in damage.detail
    assert "[4, 9]" in damage.detail


def test_what_is_available_is_asked_as_the_surface_says():
    subject = subject_of(Recorder(4), available=lambda allocator: 3 * allocator.pages)
    assert subject.apply(calls.AllocCall(4)).available == 12


# --- the caller's own tensors ---------------------------------------------------------------------


def given_to(recorder: Recorder) -> list[list[int]]:
    """The values, now, of the first tensor of each free so far."""
    return [args[0].tolist() for name, args, _ in recorder.calls if name in ("free", "free_page_ids")]


def test_clobber_overwrites_the_last_free_and_the_last_output():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    output = torch.tensor([16, 17])
    recorder.answer = lambda: output
    subject.apply(calls.AllocCall(2))
    recorder.answer = lambda: None
    subject.apply(calls.FreeCall([4, 5]))
    subject.apply(calls.FreePageIdsCall([2]))
    subject.apply(calls.ClobberCall(12))
    assert given_to(recorder) == [[4, 5], [3]]  # page ids get the page of slot 12
    assert output.tolist() == [12, 12]
    # The caller did that itself: no damage.
    assert subject.observe().damage == ()


def test_clobber_overwrites_every_free_of_a_group():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    subject.apply(calls.FreeCall([4]))
    subject.apply(calls.GroupBeginCall())
    for call in (calls.FreeCall([8, 9]), calls.FreePageIdsCall([1]), calls.FreeCall([4])):
        subject.apply(call)
    subject.apply(calls.ClobberCall(16))
    assert given_to(recorder) == [[4], [16, 16], [4], [16]]
    subject.apply(calls.GroupEndCall())
    subject.apply(calls.FreeCall([5]))
    subject.apply(calls.ClobberCall(20))
    # The group is over: only the free behind it is still of interest.
    assert given_to(recorder) == [[4], [16, 16], [4], [16], [20]]


def test_clobber_overwrites_segments():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    subject.apply(calls.FreeSegmentsCall([([4], 0), ([8, 9], 4)]))
    subject.apply(calls.ClobberCall(16))
    ((_, (segments,), _),) = recorder.calls
    assert [slots.tolist() for slots, _ in segments] == [[16], [16, 16]]


# --- windows --------------------------------------------------------------------------------------


def test_a_window_is_a_shifted_free_list_also_after_clear_and_resize():
    recorder = Recorder(4)
    subject = subject_of(recorder, Config("paged", 16, 4, page_offset=100))
    assert subject.observe() == State([101, 102, 103, 104], [])
    subject.apply(calls.ClearCall())
    assert subject.observe() == State([101, 102, 103, 104], [])
    subject.apply(calls.ResizeCall(8))
    assert subject.observe() == State([101, 102], [])


def test_resize_names_the_size_as_sglang_reads_it():
    recorder = Recorder(4)
    subject = subject_of(recorder)
    subject.apply(calls.ResizeCall(24))
    assert subject.observe() == State([1, 2, 3, 4, 5, 6], [])


def test_resize_names_both_sides_too():
    recorder = Recorder(4)
    sizes: list[Any] = []
    recorder.resize = sizes.append  # type: ignore[method-assign]
    subject_of(recorder).apply(calls.ResizeCall(24, 16))
    (size,) = sizes
    assert (size.full_max_total_num_tokens, size.swa_max_total_num_tokens) == (24, 16)
    assert size.max_total_num_tokens == 24


def test_the_oldest_token_allocators_call_their_list_free_slots():
    class Oldest:
        free_slots = torch.arange(3)

    assert free_list_name(Oldest()) == "free_slots"
    assert free_list_name(Recorder(1)) == "free_pages"
