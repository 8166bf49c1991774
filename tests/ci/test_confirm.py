"""A target that loses its device: nothing of it is lost, and the campaign goes on in another process.

A third-party target plays the GPU: a call for three tokens or more fails as torch does after an illegal
access, and from then on nothing can be built in that process. It has an ordinary fault too: after a call for
two tokens it says that a slot more is free.
"""

from __future__ import annotations

import json

from kvproof.corpus.format import read
from kvproof.model import ops
from tests.ci.local import run, third_party

LOSER = """
from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.protocol import Answer
from kvproof.model.calls import ExtendCall

LOST = []


class Subject(NullSubject):
    def apply(self, call):
        if isinstance(call, ExtendCall) and call.tokens >= 3:
            LOST.append(call)
            return Answer(error=RuntimeError("CUDA error: an illegal memory access"), lost=True)
        answer = super().apply(call)
        if isinstance(call, ExtendCall) and call.tokens == 2:
            answer.available += 1
        return answer


class Theirs(Null):
    name = release = "theirs"

    def build(self, config):
        if LOST:
            raise RuntimeError("CUDA error: this process has lost its device")
        return Subject()
"""


def test_a_lost_device_is_a_failure_replayed_and_shrunk_in_other_processes(tmp_path):
    environment = third_party(tmp_path, LOSER)
    arguments = (
        "--target",
        "theirs",
        "--allocator",
        "paged",
        "--lane",
        "seeded,hypothesis",
        "--device",
        "cpu",
    )
    done = run(
        "fuzz", *arguments, "--seed", "0", "--leases", "3", "--out", "out", cwd=tmp_path, **environment
    )
    assert done.returncode == 1, done.stderr
    verdicts = [json.loads(line) for line in (tmp_path / "out/verdicts.jsonl").read_text().splitlines()]
    assert [verdict["lease"] for verdict in verdicts] == [0, 1, 2]
    assert all(verdict["lost"] for verdict in verdicts)
    paths = [p for p in (tmp_path / "out/failures").iterdir() if not p.name.endswith(".found.json")]
    shown = {}
    for path in paths:
        file = read(path)
        assert file.evidence is not None
        assert file.evidence.times == "3 of 3"
        shown[file.evidence.property, file.evidence.divergence] = path, file.trace.ops
    # 3 and 2 tokens: the shrinker of either meets the other, or the device's loss, on its way.
    small, ops_lost = shown["P7", "device-lost"]
    assert ops_lost == (ops.Extend(((ops.NEW_ROW, 3),)),)
    if ("P2", "available-excess") in shown:
        assert shown["P2", "available-excess"][1] == (ops.Extend(((ops.NEW_ROW, 2),)),)

    again = run("replay", str(small), "--times", "2", "--device", "cpu", cwd=tmp_path, **environment)
    assert again.returncode == 1
    assert "FAILED 2 of 2 on theirs" in again.stdout
