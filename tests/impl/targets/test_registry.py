"""Targets by name: the entry points of whoever is installed, and errors that fit on one line."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvproof.impl.targets import registry
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.impl.targets.registry import known_targets, load_target, split_name
from kvproof.model.errors import InfrastructureError, UserError


def test_ours_are_known():
    assert {"canary", "kvproof", "null", "planted", "reference", "sglang"} <= set(known_targets())
    assert list(known_targets()) == sorted(known_targets())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("null", ("null", "")),
        ("sglang==0.5.23", ("sglang", "==0.5.23")),
        ("sglang@../sglang", ("sglang", "@../sglang")),
        ("sglang@a==b:c@d", ("sglang", "@a==b:c@d")),
        ("sglang@a\nb", ("sglang", "@a\nb")),
        ("planted:free-repeats", ("planted", ":free-repeats")),
        ("planted:", ("planted", ":")),
    ],
)
def test_a_name_is_an_entry_point_and_what_it_takes(name, parts):
    assert split_name(name) == parts


@pytest.mark.parametrize(
    "name", ["", "nonsense", "Null", "null ", "null=1", "sglang/../x", "==1", ":x", "sglangg==1"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(
        UserError, match=r"there is no target .*; known: .*null, planted, reference, sglang"
    ) as caught:
        split_name(name)
    assert repr(name) in str(caught.value)


def test_the_ticket_is_passed_on_with_the_spec():
    class _Asked:
        ticket = None

        def __call__(self, ticket):
            self.ticket = ticket
            return self

    asked = _Asked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            registry, "known_targets", lambda: {"mine": type("E", (), {"load": lambda _self: asked})()}
        )
        assert load_target("mine==1", Ticket("ignored", "kernels", "cuda", True, "end", "a.log")) is asked
    assert asked.ticket == Ticket("==1", "kernels", "cuda", True, "end", "a.log")


def test_targets_are_loaded():
    assert isinstance(load_target("null", Ticket()), Null)
    planted = load_target("planted:free-repeats", Ticket())
    assert isinstance(planted, Planted)
    assert planted.name == "planted:free-repeats"


def entry(monkeypatch, value):
    """One target, `mine`, at this place."""
    monkeypatch.setattr(
        registry, "known_targets", lambda: {"mine": EntryPoint("mine", value, registry.GROUP)}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "kvproof_no_such_module:X",
            "target mine: ModuleNotFoundError: No module named 'kvproof_no_such_module'",
        ),
        ("kvproof.impl.targets.null:Nothing", "target mine: AttributeError: .*Nothing"),
        ("kvproof.impl.targets.registry:GROUP", "target mine: TypeError: 'str' object is not callable"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_its_cause(monkeypatch, value, message):
    entry(monkeypatch, value)
    with pytest.raises(InfrastructureError, match=message):
        load_target("mine", Ticket())


def test_an_error_of_a_factory_fits_on_one_line(monkeypatch):
    def factory(_ticket):
        raise ValueError("first\n\n   second")

    monkeypatch.setattr(
        registry, "known_targets", lambda: {"mine": type("E", (), {"load": lambda _self: factory})()}
    )
    with pytest.raises(InfrastructureError, match=r"^target mine: ValueError: first second$"):
        load_target("mine", Ticket())


def test_our_own_errors_pass_unchanged():
    with pytest.raises(UserError, match=r"^the target null takes no version"):
        load_target("null==3", Ticket())
