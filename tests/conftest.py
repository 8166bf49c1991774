"""Settings for every test: what can run on this machine, how Hypothesis draws, how many threads torch takes.

Not covered: fixtures. Each folder of tests makes its own.
"""

from __future__ import annotations

import os

# Before anything imports torch: one thread a process, since xdist already fills the cores with processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# Wall-clock limits of Hypothesis would make tests fail on a busy machine; in CI the examples are the same
# every time.
settings.register_profile(
    "kvproof",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvproof")


@cache
def gpu_is_here() -> bool:
    """Whether torch sees a CUDA GPU; torch is imported only when a test asks."""
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--require-gpu`: a run that ends without having executed a GPU test is a failure, not a success."""
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail where there is no CUDA GPU, or when no test ran",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `--require-gpu` on a machine without one, before any test."""
    if config.getoption("--require-gpu") and not gpu_is_here():
        raise pytest.UsageError(
            "--require-gpu: no CUDA GPU on this machine (torch.cuda.is_available() is False)"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason and the way to run it."""
    offline = os.environ.get("KVPROOF_OFFLINE", "") not in ("", "0")
    for item in items:
        if item.get_closest_marker("gpu") and not gpu_is_here():
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA GPU: run `make test-gpu` on a machine with one")
            )
        if item.get_closest_marker("network") and offline:
            item.add_marker(pytest.mark.skip(reason="needs the package registry: KVPROOF_OFFLINE is set"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under `--require-gpu`, a session in which every test was skipped ends like one that collected none."""
    if not session.config.getoption("--require-gpu") or exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
