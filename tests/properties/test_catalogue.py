"""The catalogue: every property of the contract once, and everything asked belongs to one."""

from __future__ import annotations

import pytest

from kvproof.properties.catalogue import ANSWER_CHECKS, BUILT_SO, PROPERTIES, STATE_CHECKS, TOLERABLE, by_id
from kvproof.properties.checks.answer import check_cost, check_defined, check_forwarding, check_memory
from kvproof.properties.checks.state import check_stale
from kvproof.properties.relations import RELATIONS


def test_the_properties_of_the_contract_in_order():
    assert [entry.id for entry in PROPERTIES] == [f"P{number}" for number in range(1, 18)]
    assert len({entry.name for entry in PROPERTIES}) == 17
    assert all(entry.statement.endswith(".") for entry in PROPERTIES)


def test_how_each_is_asked_is_what_is_said_of_it():
    by_step = {property_id for property_id, _ in ANSWER_CHECKS + STATE_CHECKS} | {"P11"}  # by renaming
    by_relation = {relation.property_id for relation in RELATIONS}
    said = {entry.id: entry.asked for entry in PROPERTIES}
    for property_id, asked in said.items():
        expected = {
            (True, False): "step",
            (False, True): "relation",
            (True, True): "both",
            (False, False): "later",
        }[property_id in by_step, property_id in by_relation]
        assert (property_id, asked) == (property_id, expected)


def test_no_check_is_asked_twice_and_what_is_tolerable_comes_last():
    checks = [check for _, check in ANSWER_CHECKS + STATE_CHECKS]
    assert len(set(checks)) == len(checks)
    assert checks[-5:] == [check_memory, check_cost, check_defined, check_stale, check_forwarding]
    assert set(checks[-5:]) == TOLERABLE
    assert {check_forwarding} == BUILT_SO


def test_looking_up():
    assert by_id("P5").name == "last_loc continuity"
    with pytest.raises(KeyError):
        by_id("P18")
