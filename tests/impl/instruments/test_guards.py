"""OutputGuard poisons exactly the outputs it promises to, and reports what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvproof.impl.instruments.guards import GUARD_WORDS, LARGEST, GuardDamage, OutputGuard
from kvproof.impl.instruments.poison import POISON


@pytest.fixture
def guard() -> Iterator[OutputGuard]:
    guard = OutputGuard()
    guard.install()
    yield guard
    guard.uninstall()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_unwritten_elements_are_found(guard: OutputGuard, dtype: torch.dtype) -> None:
    with guard.call():
        out = torch.empty((4,), dtype=dtype)
        out[0], out[2] = 7, 9
    report = guard.inspect(out)
    assert report.values == [7, POISON[dtype][1], 9, POISON[dtype][1]]
    assert report.unwritten == (1, 3)
    assert report.damage == ()
    assert report.recorded


def test_poison_is_never_a_slot() -> None:
    for bits, value in POISON.values():
        assert torch.iinfo(bits).min < value < -1


@pytest.mark.parametrize("offset", [-GUARD_WORDS, -1, 3, 3 + GUARD_WORDS - 1])
def test_damaged_guard_words_are_found(guard: OutputGuard, offset: int) -> None:
    with guard.call():
        out = torch.empty(3, dtype=torch.int64)
        out.fill_(5)
        stray = out.as_strided((1,), (1,), out.storage_offset() + offset)
        stray[0] = 42
    report = guard.inspect(out)
    assert report.values == [5, 5, 5]
    assert report.damage == (GuardDamage(buffer=0, offset=offset, value=42),)


def test_all_buffers_of_the_call_are_checked(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty(2, dtype=torch.int64)
        scratch = torch.empty(1, dtype=torch.int32)
        scratch.as_strided((1,), (1,), scratch.storage_offset() + 1)[0] = 6
    assert guard.inspect(out).damage == ()
    assert guard.damaged() == (GuardDamage(buffer=1, offset=1, value=6),)


@pytest.mark.parametrize("size", [(0,), ()])
def test_no_elements_and_no_dimensions(guard: OutputGuard, size: tuple[int, ...]) -> None:
    with guard.call():
        out = torch.empty(size, dtype=torch.int64)
        other = torch.empty((0,), dtype=torch.int64)
    assert out.shape == size
    report = guard.inspect(out)
    assert report.recorded
    assert report.unwritten == tuple(range(out.numel()))
    assert [guard.find(out), guard.find(other)] == list(guard.buffers)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(3, dtype=torch.int64),
        lambda: torch.empty((3,), dtype=torch.int64),
        lambda: torch.empty([3], dtype=torch.int64),
        lambda: torch.empty(torch.Size([3]), dtype=torch.int64, device="cpu"),
        lambda: torch.empty(size=(3,), dtype=torch.int64),
    ],
)
def test_every_way_to_say_the_size(guard: OutputGuard, allocate: object) -> None:
    assert callable(allocate)
    with guard.call():
        out = allocate()
    assert out.shape == (3,)
    assert guard.inspect(out).unwritten == (0, 1, 2)


@pytest.mark.parametrize("dtype", POISON, ids=str)
@pytest.mark.parametrize("words", [0, GUARD_WORDS])
def test_every_byte_is_poison(dtype: torch.dtype, words: int) -> None:
    guard = OutputGuard(words)
    guard.install()
    try:
        with guard.call():
            out = torch.empty((2, 3), dtype=dtype)
    finally:
        guard.uninstall()
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 3), dtype, True)
    everything = torch.tensor([], dtype=torch.uint8).set_(out.untyped_storage())
    assert set(everything.tolist()) == {0xA5}
    # 16 bytes at least, and a multiple of 16, on each side
    assert everything.numel() == 6 * dtype.itemsize + 2 * (words and max(16, words * dtype.itemsize))


@pytest.mark.parametrize("size", [(3,), (2, 2), ()])
def test_without_guard_words_a_tensor_is_an_allocation_of_its_own(size: tuple[int, ...]) -> None:
    guard = OutputGuard(words=0)
    guard.install()
    try:
        with guard.call():
            out = torch.empty(size, dtype=torch.int64)
            none = torch.empty(0, dtype=torch.int64)
            other = torch.empty(0, dtype=torch.int64)
    finally:
        guard.uninstall()
    assert out.storage_offset() == 0
    assert out.untyped_storage().nbytes() == out.numel() * 8
    report = guard.inspect(out.reshape(-1))
    assert (report.recorded, report.unwritten) == (True, tuple(range(out.numel())))
    assert guard.damaged() == ()
    assert guard.find(none) is guard.find(other) is None


@pytest.mark.parametrize(
    "allocate",
    [
        lambda like: torch.empty_like(like),
        lambda like: torch.empty_like(like, dtype=None, requires_grad=False, layout=torch.strided),
        lambda like: torch.empty_strided((2, 3), (3, 1), dtype=torch.int32),
        lambda like: like.new_empty(2, 3),
        lambda like: like.new_empty((2, 3), device="cpu"),
        lambda like: like.new_empty(size=[2, 3]),
        lambda like: like.new_empty_strided((2, 3), (3, 1)),
    ],
)
def test_every_function_that_allocates(guard: OutputGuard, allocate: Callable[..., torch.Tensor]) -> None:
    like = torch.zeros((2, 3), dtype=torch.int32)
    with guard.call():
        out = allocate(like)
        out[0] = 1
    assert (out.shape, out.dtype) == ((2, 3), torch.int32)
    assert guard.buffers[0].unwritten() == [3, 4, 5]
    assert allocate(like).storage_offset() == 0


def test_like_keeps_or_changes_the_dtype(guard: OutputGuard) -> None:
    with guard.call():
        same = torch.empty_like(torch.zeros(2, dtype=torch.float64))
        other = torch.zeros(2, dtype=torch.float64).new_empty(2, dtype=torch.int16)
        default = torch.empty(2)
    assert (same.dtype, other.dtype, default.dtype) == (torch.float64, torch.int16, torch.float32)
    assert len(guard.buffers) == 3


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(3, dtype=torch.complex64),
        lambda: torch.empty(3, dtype=torch.int64, memory_format=torch.contiguous_format),
        lambda: torch.empty(3, requires_grad=True),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.empty(LARGEST + 1, dtype=torch.uint8),
        lambda: torch.empty_like(torch.zeros(2, 3).t()),
        lambda: torch.empty_like(torch.nn.Parameter(torch.zeros(3))),
        lambda: torch.empty_strided((2, 3), (1, 2)),
        lambda: torch.zeros(3).new_empty_strided((2, 3), (1, 2)),
    ],
)
def test_other_tensors_are_left_alone(guard: OutputGuard, allocate: Callable[[], torch.Tensor]) -> None:
    plain = allocate()
    with guard.call():
        out = allocate()
    assert (out.shape, out.stride(), out.requires_grad) == (plain.shape, plain.stride(), plain.requires_grad)
    assert guard.buffers == ()


def test_narrow_numbers_that_may_be_meant_are_not_reported(guard: OutputGuard) -> None:
    """A kernel on a device may have written poison on purpose; nobody has watched."""
    with guard.call():
        small, flags = torch.empty(2, dtype=torch.int8), torch.empty(2, dtype=torch.bool)
        flags[0] = True
    assert guard.inspect(small).unwritten == ()
    assert [buffer.unwritten() for buffer in guard.buffers] == [[], [1]]


def test_guard_words_of_narrow_numbers(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty(3, dtype=torch.bool)
        out.as_strided((1,), (1,), out.storage_offset() + 3)[0] = True
    assert guard.damaged() == (GuardDamage(buffer=0, offset=3, value=1),)


def test_a_tensor_that_torch_resizes_leaves_its_buffer(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty(0, dtype=torch.int64)
        torch.add(torch.tensor([1, 2, 3]), 1, out=out)
        grown = torch.empty(0, dtype=torch.int64)
        torch.arange(100, out=grown)
    assert guard.damaged() == ()
    report = guard.inspect(out)
    assert (report.values, report.recorded, report.damage) == ([2, 3, 4], False, ())
    assert guard.inspect(grown).values == list(range(100))


def test_memory_of_earlier_calls(guard: OutputGuard) -> None:
    """Known for as long as the target keeps the tensor, where kernels are watched."""
    guard.kernels_are_watched = True
    with guard.call():
        kept, dropped = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    view = dropped[1:]
    del dropped
    for _ in range(2):
        with guard.call():
            pass
        assert guard.find(kept) is None
        known = guard.poisoned(kept[1:])
        assert known is not None
        assert known.telling(kept)
        assert guard.poisoned(view) is None


def test_errors_are_those_of_torch(guard: OutputGuard) -> None:
    with guard.call():
        with pytest.raises(TypeError):
            torch.empty(dtype=torch.int64)
        with pytest.raises(RuntimeError):
            torch.empty(-1, dtype=torch.int64)


def test_inert_outside_calls(guard: OutputGuard) -> None:
    before = torch.empty(3, dtype=torch.int64)
    with guard.call():
        pass
    after = torch.empty(3, dtype=torch.int64)
    assert guard.find(before) is None
    assert guard.find(after) is None
    assert before.storage_offset() == after.storage_offset() == 0


def test_slices_and_copies(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty(4, dtype=torch.int32)
        out[:3] = torch.tensor([1, 2, 3])
    first = guard.inspect(out[:2])
    assert (first.values, first.unwritten, first.recorded) == ([1, 2], (), True)
    assert guard.inspect(out[1:]).unwritten == (2,)
    assert guard.inspect(out[:1].expand(4)).values == [1, 1, 1, 1]
    moved_by_one = out.as_strided((4,), (1,), out.storage_offset() + 1)
    assert guard.inspect(moved_by_one).values == [2, 3, POISON[torch.int32][1], POISON[torch.int32][1]]
    copied = guard.inspect(torch.cat([out, out]).to(torch.int64))
    assert (copied.unwritten, copied.recorded) == ((3, 7), False)


def test_a_call_forgets_the_call_before(guard: OutputGuard) -> None:
    with guard.call():
        old = torch.empty(2, dtype=torch.int64)
    with guard.call():
        pass
    assert guard.find(old) is None
    assert guard.buffers == ()


def test_install_and_uninstall() -> None:
    def replaced() -> list[object]:
        return [torch.empty, torch.empty_like, torch.empty_strided, vars(torch.Tensor).get("new_empty")]

    original = replaced()
    guard = OutputGuard()
    with pytest.raises(RuntimeError), guard.call():
        pass
    guard.install()
    try:
        assert all(now is not then for now, then in zip(replaced(), original, strict=True))
        with pytest.raises(RuntimeError):
            guard.install()
        with guard.call(), pytest.raises(RuntimeError), guard.call():
            pass
    finally:
        guard.uninstall()
    assert replaced() == original


@pytest.mark.gpu
def test_on_a_device(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty((4,), dtype=torch.int64, device="cuda")
        out[:3] = 1
    assert out.is_cuda
    assert guard.inspect(out).unwritten == (3,)
