"""Concrete calls on an allocator that speaks torch: what it is given, and how its answers are read.

The allocator here writes down how it was called and answers what it is told; ours are in test_ours.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvproof.impl.targets.instruments import process_watch
from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.targets.tensors import Surface, TensorSubject, free_list_name
from kvproof.model import calls
from kvproof.model.config import Config


class Recorder:
    """An allocator whose calls are written down; `answer` makes the next answer."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answer: Any = lambda: None
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.pages + 1)

    def resize(self, size: Any) -> None:
        self.pages = size.max_total_num_tokens // 4
        self.clear()

    def available_size(self) -> torch.Tensor:
        return torch.tensor(7)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "free_slots":
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self.answer()

        return call


def subject_of(
    recorder: Recorder, config: Config | None = None, *, cpu_lens: bool = True, page_count: bool = False
) -> TensorSubject:
    surface = Surface(
        lambda _config, _device: recorder,
        cpu_lens=cpu_lens,
        page_count=page_count,
        lists=lambda allocator: State(allocator.free_pages.tolist(), []),
    )
    return TensorSubject(surface, config or Config("paged", 16, 4), "cpu", process_watch(Ticket()))


def plain(value: Any) -> Any:
    """Tensors as (dtype, list)."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


EXTEND = calls.ExtendCall([0, 3], [5, 4], [-1, 6], 6, 2)
DECODE = calls.DecodeCall([5, 4], [7, 10])


@pytest.mark.parametrize(
    ("call", "name", "args", "kwargs"),
    [
        (calls.AllocCall(8), "alloc", [8], {}),
        (
            EXTEND,
            "alloc_extend",
            [("int64", [0, 3])] * 2 + [("int64", [5, 4])] * 2 + [("int64", [-1, 6]), 6],
            {},
        ),
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


def test_the_oldest_token_allocators_call_their_list_free_slots():
    class Oldest:
        free_slots = torch.arange(3)

    assert free_list_name(Oldest()) == "free_slots"
    assert free_list_name(Recorder(1)) == "free_pages"
