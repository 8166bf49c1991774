"""The real command: exit codes, one line for every error, and the same bytes from any number of workers.

What needs no process runs `main` here; the rest runs `kvproof` as a user does, its output in a pipe.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import typer

from kvproof.ci import cli, commands
from kvproof.ci.cli import app, main
from kvproof.corpus.format import TraceFile, encode, read
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.trace import Trace
from kvproof.properties.catalogue import PROPERTIES
from tests.ci.local import alive, children, run, start, third_party
from tests.model.strategies import new

ESCAPE = "\x1b"


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Exit code, output and errors of the command, run in this process in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the signals of this process are pytest's

    def kvproof(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvproof", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, *capsys.readouterr()

    return kvproof


def one_line(error: str) -> bool:
    return error.startswith("kvproof: ") and error.count("\n") == 1 and error.endswith("\n")


# --- help ------------------------------------------------------------------------------------------

GROUP = typer.main.get_command(app)
COMMANDS = [(name,) for name in GROUP.commands if name != "bench"]
COMMANDS += [("bench", name) for name in GROUP.commands["bench"].commands]


def test_the_commands_are_those_of_the_house():
    names = {" ".join(command) for command in COMMANDS}
    assert names == {"fuzz", "replay", "shrink", "targets", "doctor", "properties"} | {
        "bench harness",
        "bench isolation",
    }


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_helps_with_an_example(call, command, flag):
    status, out, err = call(*command, flag)
    assert (status, err) == (0, "")
    assert "Example" in out
    assert f"kvproof {' '.join(command)}" in out.partition("Example")[2]


def test_the_examples_parse():
    """Every example's flags exist."""
    for command in COMMANDS:
        parser = GROUP
        for name in command:
            parser = parser.commands[name]
        known = {flag for option in parser.params for flag in option.opts}
        for flag in re.findall(r"(?<=\s)--[a-z-]+", parser.epilog):
            assert flag in known, f"{command}: {flag}"


@pytest.mark.parametrize("arguments", [(), ("bench",)])
def test_a_bare_command_shows_its_help(call, arguments):
    status, out, err = call(*arguments)
    assert status == 0
    assert "Usage: kvproof" in out
    assert err == ""


def test_help_tells_the_exit_codes(call):
    _, out, _ = call("--help")
    assert "Exit codes: 0 clean, 1 new failure, 2 bad input" in " ".join(out.split())


# --- bad input: exit 2, one line -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fuzz", "Missing option '--target'"),
        ("fuzz -t nonsense", "there is no target 'nonsense'; known: "),
        ("fuzz -t null --lane foo", "--lane foo: 'foo' is not known; choose all or some of seeded"),
        ("fuzz -t null --lane seeded,,audited --device cpu", "'' is not known"),
        ("fuzz -t null --allocator heap --device cpu", "--allocator heap: 'heap' is not known"),
        ("fuzz -t null --device tpu", "--device tpu is not known; choose one of auto, cpu, cuda"),
        ("fuzz -t null --path sideways --device cpu", "--path sideways is not known"),
        ("fuzz -t null --lane audited --path torch --device cpu", "--lane audited audits kernels"),
        ("fuzz -t null --seconds soon", "'--seconds'"),
        ("fuzz -t null --seconds -1", "'--seconds'"),
        ("fuzz -t null --leases 0", "'--leases'"),
        ("fuzz -t null --workers 0", "'--workers'"),
        ("fuzz -t null --seed -1", "'--seed'"),
        ("fuzz -t null --max-trace-ops 0", "'--max-trace-ops'"),
        ("fuzz -t null --nonsense", "--nonsense"),
        ("fuzz -t null extra", "extra"),
        ("nonsense", "No such command 'nonsense'. (see `kvproof --help`)"),
        ("replay", "Missing argument 'TRACE'"),
        ("replay nowhere.json", "nowhere.json: cannot be read: No such file or directory"),
        ("replay .", ".: cannot be read: it is a folder, a pipe or a device; name a trace file"),
        ("replay /dev/zero", "/dev/zero: cannot be read: it is a folder, a pipe or a device"),
        ("shrink /dev/zero", "/dev/zero: cannot be read: it is a folder, a pipe or a device"),
        ("replay damaged.json", "damaged.json: not a valid trace: "),
        ("replay binary.json", "binary.json: not a valid trace: "),
        ("replay version.json", "version.json: format 9 is not known, only 1"),
        ("replay field.json", "field.json: not a valid trace: Object contains unknown field `sise`"),
        ("replay bounds.json", "bounds.json: $.config.page_size is 0"),
        ("replay nobody.json", "name one with --target"),
        ("replay nobody.json -t nonsense", "there is no target 'nonsense'"),
        ("replay nobody.json -t null --lane foo", "--lane foo is not known"),
        ("replay nobody.json -t null --times 0", "'--times'"),
        (
            "shrink nobody.json -t null --out nobody.json",
            "nobody.json is there already; name another file with --out",
        ),
        ("shrink nowhere.json", "nowhere.json: cannot be read"),
        ("shrink nobody.json -t null --out=", "--out is empty; name a place, or leave the flag out"),
        ("fuzz -t null --device cpu --out=", "--out is empty; name a place, or leave the flag out"),
        ("fuzz -t null --device cpu --out nobody.json", "--out nobody.json: a file is in the way"),
        ("fuzz -t null --device cpu --out nobody.json/out", "--out nobody.json/out: a file is in the way"),
        ("bench harness --ops 1", "'--ops'"),
    ],
)
def test_bad_input_is_one_line_and_2(call, tmp_path, line, message):
    trace = Trace(Config("paged", 16, 4), (new(1),))
    good = encode(TraceFile(trace)).decode()
    (tmp_path / "nobody.json").write_text(good)
    (tmp_path / "damaged.json").write_text(good[:-20])
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\xff")
    (tmp_path / "version.json").write_text(good.replace('"format": 1', '"format": 9'))
    (tmp_path / "field.json").write_text(good.replace('"size"', '"sise"'))
    (tmp_path / "bounds.json").write_text(good.replace('"page_size":4', '"page_size":0'))
    before = sorted(tmp_path.iterdir())
    status, out, err = call(*line.split())
    assert (status, out) == (2, "")
    assert message in err
    assert one_line(err)
    assert sorted(tmp_path.iterdir()) == before


# --- the machine's fault: exit 3, one line ---------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_one_line_and_3(call):
    status, _, err = call("fuzz", "-t", "null", "--device", "cpu", "--out", "/proc/kvproof")
    assert status == 3
    assert err == "kvproof: --out /proc/kvproof: cannot be written: No such file or directory\n"


def test_an_error_of_our_own_is_not_taken_for_a_failure_of_the_target(call, monkeypatch):
    def broken(*, as_json):
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(commands, "properties", broken)
    status, _, err = call("properties")
    assert status == 3
    assert "ZeroDivisionError: by us" in err
    assert err.endswith("kvproof: an error of kvproof itself; please report it\n")


def test_a_trace_whose_every_op_comes_to_nothing_is_no_pass(tmp_path):
    (tmp_path / "t.json").write_bytes(encode(TraceFile(Trace(Config("paged", 16, 4), (ops.GroupEnd(),)))))
    done = run("replay", "t.json", "-t", "null", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert one_line(done.stderr)
    assert "t.json: every op of it comes to nothing" in done.stderr


@pytest.mark.parametrize("sink", ["full disk", "closed pipe"])
def test_output_that_goes_nowhere_is_neither_success_nor_failure(tmp_path, sink):
    import subprocess

    from tests.ci.local import COMMAND

    if sink == "full disk":
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*COMMAND, "properties"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*COMMAND, "properties"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writer)
    assert done.returncode == 3
    assert "output cannot be written" in done.stderr
    assert one_line(done.stderr)


@pytest.mark.parametrize(
    "arguments", [("replay", "nowhere.json"), ("nonsense",), ("properties",)], ids=" ".join
)
def test_a_complaint_that_nobody_reads_is_no_failure_of_the_target(tmp_path, arguments):
    """As of `kvproof … 2>&1 | true`."""
    import subprocess

    from tests.ci.local import COMMAND

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=writer, cwd=tmp_path, timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == 3


# --- properties ------------------------------------------------------------------------------------


def test_properties_are_listed(call):
    status, out, _ = call("properties")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [entry.id for entry in PROPERTIES]
    status, out, _ = call("properties", "--json")
    assert status == 0
    assert [(entry["id"], entry["statement"]) for entry in json.loads(out)] == [
        (entry.id, entry.statement) for entry in PROPERTIES
    ]


def test_a_seed_is_drawn_when_none_is_given(call, monkeypatch):
    options = []

    def fuzz(given):
        options.append(given)
        return 0

    monkeypatch.setattr(commands, "fuzz", fuzz)
    for _ in range(2):
        assert call("fuzz", "-t", "null")[0] == 0
    assert options[0].seed != options[1].seed
    assert {given.seconds for given in options} == {60.0}
    call("fuzz", "-t", "null", "--leases", "3", "--seed", "0")
    assert (options[2].seed, options[2].seconds, options[2].leases) == (0, None, 3)


# --- the real thing --------------------------------------------------------------------------------

SEEDED = ("--lane", "seeded", "--device", "cpu")
PLANT = "planted:last-page-refused"
"""Breaks in one way only: each failure more takes a fresh process."""


def test_a_clean_run_ends_with_0_in_plain_text(tmp_path):
    done = run("fuzz", "-t", "null", "--allocator", "token", "--leases", "1", *SEEDED, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    seed = re.search(r"^seed +([0-9]+)$", done.stdout, re.MULTILINE)
    assert seed
    assert re.search(r"^clean: no failure \(exit 0\), 1 leases", done.stdout, re.MULTILINE)
    folder = tmp_path / "kvproof-out" / f"null-seed{seed[1]}"
    assert json.loads((folder / "campaign.json").read_text())["plan"]["seed"] == int(seed[1])
    assert json.loads((folder / "campaign.json").read_text())["result"]["exit_code"] == 0
    assert len((folder / "verdicts.jsonl").read_text().splitlines()) == 1


def test_a_new_failure_ends_with_1_and_the_same_bytes_from_any_number_of_workers(tmp_path):
    command = (
        "fuzz",
        "-t",
        PLANT,
        "--seed",
        "4",
        "--leases",
        "4",
        *SEEDED,
        "--out",
        "out",
    )
    outputs = []
    for workers in ("1", "2"):
        # The second run finds the first one's folder, and takes another.
        done = run(*command, "--workers", workers, cwd=tmp_path, NO_COLOR="1")
        assert (done.returncode, done.stderr) == (1, "")
        assert ESCAPE not in done.stdout
        outputs.append(done.stdout)
    one, two = tmp_path / "out", tmp_path / "out-2"
    assert (one / "verdicts.jsonl").read_bytes() == (two / "verdicts.jsonl").read_bytes()
    failures = sorted(path.name for path in (one / "failures").iterdir())
    assert failures == sorted(path.name for path in (two / "failures").iterdir())
    assert failures
    for name in failures:
        assert (one / "failures" / name).read_bytes() == (two / "failures" / name).read_bytes()
        stored = read(one / "failures" / name)
        assert stored.evidence is not None
        assert name.startswith(stored.evidence.fingerprint)
        assert stored.trace.origin.target == PLANT
        assert stored.trace.origin.seed == 4
    # What is told can be pasted, and shows the failure again.
    told = re.findall(r"^reproduce  kvproof (replay \S+.*)$", outputs[0], re.MULTILINE)
    assert len(told) == len(failures) / 2
    again = run(*told[0].split(), cwd=tmp_path)
    assert again.returncode == 1
    assert "FAILED 1 of 1 on planted:last-page-refused (seeded)" in again.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_a_run_that_is_stopped_ends_with_130_and_leaves_no_process(tmp_path, how):
    command = ("fuzz", "-t", "null", "--seconds", "60", "--workers", "2", *SEEDED, "--out", "out")
    process = start(*command, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        verdicts = tmp_path / "out" / "verdicts.jsonl"
        while not verdicts.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = children(process.pid)
        assert workers
        process.send_signal(how)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "kvproof: stopped\n"
    assert "seed " in out
    assert not [pid for pid in workers if alive(pid)]
    # What was done until then is there, whole lines only.
    assert all(json.loads(line) for line in verdicts.read_text().splitlines())


ENDLESS = """
import pathlib
from kvproof.impl.targets.null import Null

class Theirs(Null):
    name = release = "theirs"

    def build(self, config):
        pathlib.Path("busy").touch()
        while True:
            pass
"""


def test_no_worker_outlives_a_command_line_that_is_killed(tmp_path):
    """Busy workers as well: nobody is left who could end them."""
    (tmp_path / "t.json").write_bytes(encode(TraceFile(Trace(Config("token", 4, 1), (ops.Alloc(1),)))))
    command = ("replay", "t.json", "-t", "theirs", "--device", "cpu")
    process = start(*command, cwd=tmp_path, **third_party(tmp_path, ENDLESS))
    workers: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "busy").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = children(process.pid)
        assert workers
        process.kill()
        process.communicate(timeout=30)
        deadline = time.monotonic() + 20
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in workers if alive(pid)]
    finally:
        process.kill()
        for pid in filter(alive, workers):
            os.kill(pid, signal.SIGKILL)


FRAIL = """
import os, signal
from kvproof.impl.targets.null import Null

class Theirs(Null):
    name = release = "theirs"
    built = 0

    def build(self, config):
        self.built += 1
        if self.built > OLD:
            print("one too many", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().build(config)
"""


@pytest.mark.parametrize("lane", ["seeded", "hypothesis"])
def test_a_worker_that_dies_of_no_trace_is_replaced_and_the_lease_goes_on(tmp_path, lane):
    """A third party's target that goes down with age: not one trace does it again in a fresh process."""
    environment = third_party(tmp_path, FRAIL.replace("OLD", "60" if lane == "seeded" else "6"))
    command = ("-t", "theirs", "--leases", "1", "--seed", "6", "--allocator", "paged", "--device", "cpu")
    length = ("--max-trace-ops", "20", "--lane", lane, "--workers", "1", "--out", "out")
    done = run("fuzz", *command, *length, cwd=tmp_path, **environment)
    assert done.stderr == ""
    (verdict,) = map(json.loads, (tmp_path / "out/verdicts.jsonl").read_text().splitlines())
    said = re.findall(
        r"^a worker was replaced at lease 0, trace [0-9]+: it died of SIGSEGV; its last words: one too many;"
        r" its trace passes when replayed, so it runs again$",
        done.stdout,
        re.MULTILINE,
    )
    # Nobody dies of SIGSEGV for want of time: it is told, with how seldom it comes again.
    assert done.returncode == 1
    assert [entry["failure"]["divergence"] for entry in verdict["found"]] == ["crash SIGSEGV"]
    assert "fails 0 of 3 in a fresh process" in done.stdout
    if lane == "seeded":
        # Fresh processes run what is left of it, so the lease comes to its end.
        assert verdict["checked"] + verdict["idle"] > 3900
        assert len(said) >= 3
        assert re.search(rf"^replaced +{len(said)}  workers", done.stdout, re.MULTILINE)
    else:
        # A lease of Hypothesis begins anew each time, and ends after some attempts.
        assert len(said) == 3


@pytest.mark.parametrize("spec", ["==", "==../../x", "@", "@/nonexistent", ":x"])
def test_what_names_no_sglang_is_one_line_and_2(tmp_path, spec):
    done = run("fuzz", "-t", f"sglang{spec}", "--leases", "1", *SEEDED, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert one_line(done.stderr)


def test_the_readme_names_both_signals_that_stop_a_run():
    readme = Path(__file__).parents[2] / "README.md"
    assert "| 130 | stopped by Ctrl-C or SIGTERM |" in readme.read_text(encoding="utf-8")


def test_the_entry_point_is_main():
    assert cli.main is main
