"""OutputGuard poisons exactly the outputs it promises to, and reports what became of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvproof.impl.instruments.guards import GUARD_WORDS, POISON, GuardDamage, OutputGuard


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
    assert report.values == [7, POISON[dtype], 9, POISON[dtype]]
    assert report.unwritten == (1, 3)
    assert report.damage == ()
    assert report.recorded


def test_poison_is_never_a_slot() -> None:
    for dtype, value in POISON.items():
        assert torch.iinfo(dtype).min < value < -1


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


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((3,), {}),
        ((3,), {"dtype": torch.float32}),
        ((3,), {"dtype": torch.bool}),
        ((2, 2), {"dtype": torch.int64}),
        ((3,), {"dtype": torch.int64, "memory_format": torch.contiguous_format}),
    ],
)
def test_other_tensors_are_left_alone(
    guard: OutputGuard, size: tuple[int, ...], options: dict[str, object]
) -> None:
    with guard.call():
        out = torch.empty(size, **options)  # type: ignore[call-overload]
    assert out.shape == size
    assert guard.buffers == ()


def test_errors_are_those_of_torch(guard: OutputGuard) -> None:
    with guard.call():
        with pytest.raises(TypeError):
            torch.empty(dtype=torch.int64)  # type: ignore[call-overload]
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
    assert guard.inspect(moved_by_one).values == [2, 3, POISON[torch.int32], POISON[torch.int32]]
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
    original = torch.empty
    guard = OutputGuard()
    with pytest.raises(RuntimeError), guard.call():
        pass
    guard.install()
    try:
        with pytest.raises(RuntimeError):
            guard.install()
        with guard.call(), pytest.raises(RuntimeError), guard.call():
            pass
    finally:
        guard.uninstall()
    assert torch.empty is original


@pytest.mark.gpu
def test_on_a_device(guard: OutputGuard) -> None:
    with guard.call():
        out = torch.empty((4,), dtype=torch.int64, device="cuda")
        out[:3] = 1
    assert out.is_cuda
    assert guard.inspect(out).unwritten == (3,)
