"""Keeping the side effects of importing SGLang away from the process that hosts it.

What the imports of the supported releases were seen to do: they point the cache folders of Triton,
Inductor, CUDA and FlashInfer elsewhere through environment variables (0.5.18 and later), warn about missing
and renamed packages, log, and print. All of that is undone or swallowed here. They were seen to leave
alone: torch's thread counts, default dtype and device, the random state, signal handlers, the
multiprocessing start method, excepthooks, resource limits, log handlers, and threads. NOT undone: operators
registered with torch, and third-party modules imported for real (releases before 0.5.8 import
`torch._dynamo`, which takes two seconds); both are inert.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Run an import without its noise; environment and logging are afterwards what they were."""
    environment = dict(os.environ)
    log_threshold = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    swallowed = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(swallowed),
            contextlib.redirect_stderr(swallowed),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(log_threshold)
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
