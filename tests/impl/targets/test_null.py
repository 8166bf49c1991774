"""The null target says what it was told, and nothing about allocators."""

from __future__ import annotations

import pytest

from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.protocol import Lists, Mirror, State, Ticket
from kvproof.model import ops
from kvproof.model.calls import NoCall
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES
from tests.model.strategies import SMALL, fresh, new, sides


def test_what_it_is():
    target = Null(Ticket())
    assert (target.name, target.path, target.stood_in, target.other_path()) == ("null", "model", (), None)
    capabilities = target.capabilities
    assert capabilities.allocators == ALLOCATORS
    assert capabilities.exact
    assert capabilities.refuses == set(MISUSES)


def test_it_has_no_versions():
    with pytest.raises(UserError, match="null==1"):
        Null(Ticket("==1"))


def test_it_answers_from_the_model():
    subject = Null(Ticket()).build(Config("paged", 16, 4))
    assert isinstance(subject, Mirror)
    model = fresh(4, 4)
    for op, slots, available, refused in (
        (new(2), [4, 5], 12, False),
        (new(13), None, 12, False),
        (ops.Misuse("double-free"), None, 12, True),
        (ops.Free((0,)), None, 16, False),
    ):
        subject.expect(model.apply(op), model)
        answer = subject.apply(NoCall())
        assert (answer.slots, answer.available, answer.dtype, answer.damage) == (
            slots,
            available,
            "int64",
            (),
        )
        assert isinstance(answer.error, ValueError) is refused
    assert subject.observe() == State([1, 2, 3, 4], [])


SIDES = {
    "swa": {"swa"},
    "hisparse": {"device"},
    "hisparse-v4": {"swa", "device"},
    "page-interleave": {"class 1"},
}
SIZES = {
    "swa": {"full", "swa"},
    "swa-ring": {"full", "swa"},
    "pure-swa": {"full", "swa"},
    # What it says of the full side is left open: some releases count the device in.
    "hisparse-v4": {"swa"},
    "page-interleave": {"aggregate"},
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_it_looks_like_the_model_of_every_kind(allocator):
    """Sides, mappings and sizes too, in the names of `protocol.State`."""
    config = SMALL[allocator]
    subject, model = Null(Ticket()).build(config), model_for(config)
    expectation = model.apply(ops.Alloc(1) if allocator == "mamba" else new(config.page_size))
    subject.expect(expectation, model)
    answer, state = subject.apply(NoCall()), subject.observe()
    assert (answer.slots, answer.peers, answer.bases) == (
        expectation.slots,
        expectation.peers,
        expectation.bases,
    )
    assert answer.slots is not None
    assert len(answer.slots) == config.page_size
    assert {*state.sides} == SIDES.get(allocator, set())
    assert {*answer.peers} == SIDES.get(allocator, set()) - {"class 1"}
    assert state.sides == {name: Lists(*lists) for name, lists in sides(model).items()}
    assert {*state.mappings} == ({"swa"} if allocator == "swa-ring" else {*answer.peers})
    assert state.mappings == model.mappings
    assert {*state.sizes} == SIZES.get(allocator, set())


def test_it_draws_the_bases_that_the_model_draws():
    """A base is drawn for the row whose caller has none: the class with the most free pages, here 0."""
    subject, model = Null(Ticket()).build(SMALL["page-interleave"]), model_for(SMALL["page-interleave"])
    subject.expect(model.apply(new(4)), model)
    assert subject.apply(NoCall()).bases == [0]


def test_before_it_is_told_anything_it_has_nothing():
    assert NullSubject().observe() == State([], [])
