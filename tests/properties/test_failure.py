"""Fingerprints: pinned, and free of everything that two sightings of one fault may differ in."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from kvproof.properties.failure import Failure

# The left column is what `printf 'P1\nExtend\n…' | sha256sum` prints, cut to 8 digits.
PINNED = [
    ("f10d3a73", "P1", "Extend", "paged", "page-handed-out-twice"),
    ("8ff94d9f", "P7", "Extend", "paged", "read-out-of-bounds alloc_extend_kernel.free_pages"),
    ("59caaa9b", "P11", "Clobber", "token", "keeps-callers-tensor"),
    ("c2b24d19", "P2", "Free", "paged", "available-deficit"),
]


@pytest.mark.parametrize(("digits", "property_id", "op", "allocator", "divergence"), PINNED)
def test_fingerprints_never_change(digits, property_id, op, allocator, divergence):
    """They are stored in lists of known faults, so another way to make them would orphan those."""
    text = f"{property_id}\n{op}\n{allocator}\n{divergence}"
    assert sha256(text.encode()).hexdigest().startswith(digits)
    assert Failure(property_id, op, allocator, divergence, 0, "").fingerprint == digits


FAILURE = Failure("P1", "Extend", "paged", "x", 3, "slots 1, 2")


@pytest.mark.parametrize("change", [{"step": 4}, {"message": "slots 3"}, {"tolerable": True}])
def test_where_and_with_which_numbers_does_not_matter(change):
    assert replace(FAILURE, **change).fingerprint == FAILURE.fingerprint


@pytest.mark.parametrize(
    "change", [{"property_id": "P2"}, {"op": "Decode"}, {"allocator": "token"}, {"divergence": "y"}]
)
def test_every_part_of_the_name_matters(change):
    assert replace(FAILURE, **change).fingerprint != FAILURE.fingerprint
