"""Whether SGLang copes with the absence of the package it is importing.

SGLang tries many optional packages and does without them (`try: import x` / `except ImportError: ...`).
There the truth is the best answer: the package is absent. This file reads the source of the files on the
call stack to tell such an import from one that nothing catches. It knows `try` statements only, not
`contextlib.suppress`.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from types import FrameType

_CATCH_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def absence_is_handled(frame: FrameType | None) -> bool:
    """Whether an `ImportError` raised at `frame` meets a handler of SGLang on its way out of the stack."""
    while frame is not None:
        if is_sglang(frame) and any(
            line.start <= frame.f_lineno < line.stop for line in _guarded_lines(frame)
        ):
            return True
        frame = frame.f_back
    return False


def is_sglang(frame: FrameType) -> bool:
    """Whether `frame` runs code of a module of SGLang."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "sglang"


def _guarded_lines(frame: FrameType) -> tuple[range, ...]:
    return _guarded_lines_of_file(frame.f_code.co_filename)


@functools.cache
def _guarded_lines_of_file(filename: str) -> tuple[range, ...]:
    """The lines inside the `try` bodies of the file whose handlers swallow an `ImportError`."""
    tree = ast.parse(Path(filename).read_bytes())
    return tuple(
        range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and _swallows_import_error(node)
    )


def _swallows_import_error(node: ast.Try) -> bool:
    for handler in node.handlers:
        if handler.type is None or any(name in _CATCH_IMPORT_ERRORS for name in _names(handler.type)):
            # The first handler that fits decides. One that raises again only words the error better.
            return not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    return False


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
