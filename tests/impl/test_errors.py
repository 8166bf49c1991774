"""Refusals: the message, and that it survives the way between processes."""

from __future__ import annotations

import pickle

import pytest

from kvproof.impl.errors import AllocatorError, StateError, UnsupportedCallError


def test_message_has_call_expected_actual_and_remedy():
    error = AllocatorError("alloc", "a size >= 0", "-4", "Ask for something.")
    assert str(error) == "alloc: expected a size >= 0, got -4. Ask for something."


@pytest.mark.parametrize("kind", [AllocatorError, StateError, UnsupportedCallError])
def test_every_kind_is_a_value_error_and_pickles(kind):
    error = pickle.loads(pickle.dumps(kind("free", "a", "b", "C.")))  # noqa: S301 - made one line before
    assert type(error) is kind
    assert isinstance(error, ValueError)
    assert (error.call, error.expected, error.actual, error.remedy) == ("free", "a", "b", "C.")


def test_unsupported_call_is_what_sglangs_callers_catch():
    assert issubclass(UnsupportedCallError, NotImplementedError)
