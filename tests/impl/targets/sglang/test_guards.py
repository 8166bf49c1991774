"""Which imports count as guarded. Each case is the source of a module that calls `absent()` for the import.

Not covered: the import machinery between the statement and the question (test_standins).
"""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from kvproof.impl.targets.sglang.guards import absence_is_handled


def is_handled(tmp_path: Path, source: str, module_name: str = "sglang.some") -> bool:
    """Whether `absence_is_handled` says so at the one call of `absent()` that running `source` makes."""
    path = tmp_path / "some.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    verdicts: list[bool] = []
    module.absent = lambda: verdicts.append(absence_is_handled(sys._getframe(1)))  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    (verdict,) = verdicts
    return verdict


@pytest.mark.parametrize(
    "handler",
    ["except ImportError:", "except (OSError, ModuleNotFoundError) as e:", "except Exception:", "except:"],
)
def test_a_handler_of_import_errors_is_a_guard(tmp_path: Path, handler: str) -> None:
    assert is_handled(tmp_path, f"try:\n    x = 1\n    absent()\n{handler}\n    x = None\n")


@pytest.mark.parametrize(
    "source",
    [
        "absent()\n",
        "try:\n    absent()\nexcept OSError:\n    pass\n",
        "try:\n    absent()\nfinally:\n    pass\n",
        "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    absent()\n",
        "try:\n    1 / 0\nexcept Exception:\n    absent()\n",
        "try:\n    pass\nexcept ImportError:\n    pass\nabsent()\n",
        "try:\n    absent()\nexcept ImportError as e:\n    raise RuntimeError('install it') from e\n",
    ],
    ids=["bare", "other error", "finally", "else", "in the handler", "after", "handler that raises"],
)
def test_anything_else_is_none(tmp_path: Path, source: str) -> None:
    assert not is_handled(tmp_path, source)


def test_a_caller_may_be_the_guard(tmp_path: Path) -> None:
    source = """
    def load():
        absent()
    try:
        load()
    except ImportError:
        pass
    """
    assert is_handled(tmp_path, source)


def test_an_outer_try_counts_when_the_inner_does_not(tmp_path: Path) -> None:
    source = """
    try:
        try:
            absent()
        except OSError:
            pass
    except ImportError:
        pass
    """
    assert is_handled(tmp_path, source)


def test_only_handlers_of_sglang_count(tmp_path: Path) -> None:
    """Our own callers, and pytest's, catch everything; that is not SGLang coping."""
    verdict = None
    try:
        verdict = is_handled(tmp_path, "absent()\n")
    except ImportError:
        pytest.fail("a guard that must not count")
    assert verdict is False
    assert not is_handled(tmp_path, "try:\n    absent()\nexcept ImportError:\n    pass\n", "sglangish.some")
