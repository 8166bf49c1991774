"""Errors carry the exit code a command ends with."""

from __future__ import annotations

import pytest

from kvproof.model.errors import InfrastructureError, KvproofError, UserError


@pytest.mark.parametrize(("error", "code"), [(UserError, 2), (InfrastructureError, 3), (KvproofError, 3)])
def test_exit_codes(error, code):
    assert issubclass(error, KvproofError)
    assert error("why").exit_code == code
    assert str(error("why")) == "why"
