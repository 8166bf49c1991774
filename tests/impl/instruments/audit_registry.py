"""The cases of the audited lane's tests: a registry, and the two ways they make tensors.

Imported before anything else by the modules with the cases, because Triton must be told to interpret before
its first import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

CASES: dict[str, Callable[[], Any]] = {}


def case(run: Callable[[], Any]) -> Callable[[], Any]:
    CASES[run.__name__] = run
    return run


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def output(numel: int) -> torch.Tensor:
    return torch.empty((numel,), dtype=torch.int64)
