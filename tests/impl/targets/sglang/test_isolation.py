"""The host process is the same after a noisy import. Not covered: imports of real releases (test_load)."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings

import pytest

from kvproof.impl.targets.sglang.isolation import quiet_import


def test_noise_is_swallowed_and_the_environment_restored(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPROOF_TEST_CHANGED", "before")
    monkeypatch.setenv("KVPROOF_TEST_REMOVED", "before")
    monkeypatch.delenv("KVPROOF_TEST_ADDED", raising=False)
    before = dict(os.environ)
    filters = list(warnings.filters)
    with contextlib.suppress(ValueError), quiet_import():
        os.environ["KVPROOF_TEST_CHANGED"] = "after"
        os.environ["KVPROOF_TEST_ADDED"] = "after"
        del os.environ["KVPROOF_TEST_REMOVED"]
        warnings.filterwarnings("error", message="never")
        warnings.warn("noise", stacklevel=1)
        logging.getLogger("noise").error("noise")
        print("noise")
        print("noise", file=sys.stderr)
        raise ValueError("an import may fail")
    assert dict(os.environ) == before
    assert warnings.filters == filters
    logging.getLogger("voice").error("voice")
    print("voice")
    assert [record.message for record in caplog.records] == ["voice"]
    out, err = capfd.readouterr()
    assert (out, err) == ("voice\n", "")
