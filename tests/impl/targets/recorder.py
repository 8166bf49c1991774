"""An allocator that writes down how it was called and answers what it is told, and a subject around it."""

from __future__ import annotations

from typing import Any

import torch

from kvproof.impl.targets.instruments import process_watch
from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.targets.tensors import Surface, TensorSubject
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
    recorder: Recorder,
    config: Config | None = None,
    *,
    cpu_lens: bool = True,
    page_count: bool = False,
    **more: Any,
) -> TensorSubject:
    """more: of the surface."""
    surface = Surface(
        lambda _config, _device: recorder,
        cpu_lens=cpu_lens,
        page_count=page_count,
        lists=lambda allocator: State(allocator.free_pages.tolist(), []),
        **more,
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
