"""The Hypothesis lane: a lease like any other, with the same verdict every time."""

from __future__ import annotations

import pytest

from kvproof.ci.wire import lease_done
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Canary, Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.properties.hypothesis_lane import run_hypothesis_lease
from kvproof.properties.lease import Lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import space_for


def lease(target, number=0, seed=0, ops=300, **options):
    return Lease(
        number, seed, target.name, "hypothesis", space_for(target.capabilities, "paged", **options), ops
    )


def test_a_clean_target_gives_a_clean_verdict():
    target = Null(Ticket())
    verdict = run_hypothesis_lease(target, lease(target, 3))
    assert (verdict.lease, verdict.lane, verdict.found, verdict.relations) == (3, "hypothesis", {}, 0)
    # 300 ops are ten examples of up to thirty steps.
    assert 10 <= verdict.traces <= 12
    assert 100 < verdict.tally.checked + verdict.tally.idle <= 360
    assert verdict.marks


@pytest.mark.parametrize("plant", ["none", "refusal-takes-pages"])
def test_the_same_lease_gives_the_same_verdict(plant):
    """On fresh copies, with other leases between."""
    verdicts = []
    for _ in range(2):
        target = Planted(Ticket(f":{plant}"))
        verdicts.append(
            [lease_done(run_hypothesis_lease(target, lease(target, number, 5))) for number in (0, 1)]
        )
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][0] != verdicts[0][1]


def test_other_numbers_and_seeds_draw_other_traces():
    target = Null(Ticket())
    marks = [
        dict(run_hypothesis_lease(target, lease(target, *where)).marks) for where in ((0, 0), (1, 0), (0, 1))
    ]
    assert marks[0] != marks[1] != marks[2] != marks[0]


def test_it_stops_at_its_first_failure_and_keeps_the_trace():
    target = Canary(Ticket())
    verdict = run_hypothesis_lease(target, lease(target, 7, 9))
    ((fingerprint, found),) = verdict.found.items()
    assert verdict.seen == {fingerprint: 1}
    origin = found.trace.origin
    assert (origin.target, origin.lane, origin.seed, origin.lease, origin.index) == (
        "canary",
        "hypothesis",
        9,
        7,
        0,
    )
    assert len(found.trace.ops) == found.failure.step + 1 == 1
    assert run_trace(target, found.trace).failures == [found.failure]


def test_nothing_is_printed_or_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target = Canary(Ticket())
    run_hypothesis_lease(target, lease(target))
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_misuse_is_counted_and_what_was_not_promised_is_no_failure():
    target = Null(Ticket())
    verdict = run_hypothesis_lease(target, lease(target, misuse=True))
    assert verdict.found == {}
    assert verdict.tally.accepted == {}
    assert verdict.tally.checked


def test_at_least_one_example_is_run():
    target = Null(Ticket())
    assert run_hypothesis_lease(target, lease(target, ops=1)).traces >= 1
