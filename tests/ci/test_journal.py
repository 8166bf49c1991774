"""The journal: what was announced is found, whatever became of the writer or of the file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from kvproof.ci import journal
from kvproof.ci.journal import Entry, Journal, Pulse, read_journal, set_aside
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError
from kvproof.model.ops import OP_TYPES, Clear, Decode, Extend, Free, Misuse, Resize

TOKEN = Config("token", 8, 1)
CONFIG = Config("paged", 64, 4, need_sort=True)
OPS = (
    Extend(((-1, 5), (0, 2))),
    Decode((0, 1)),
    Free((0,), 1, 2),
    Resize(3, 1),
    Misuse("double-free", 2),
    Clear(),
)


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "worker.journal"
    set_aside(made)
    return made


def written(path, ops=OPS, config=CONFIG):
    writer = Journal(path)
    writer.begin(config, "torch")
    for op in ops:
        writer.about_to(op)
    return writer


def test_everything_announced_is_read_back_at_once_and_without_closing(path):
    writer = Journal(path)
    writer.begin(CONFIG, "kernels")
    assert read_journal(path) == Entry(CONFIG, "kernels", ())
    for number, op in enumerate(OPS, 1):
        writer.about_to(op)
        assert read_journal(path) == Entry(CONFIG, "kernels", OPS[:number])


def test_every_type_of_op_can_be_kept():
    assert len(journal._OP_CODES) == len(OP_TYPES)


def test_a_new_allocator_begins_anew_and_nothing_old_shows_through(path):
    writer = written(path, OPS * 20)
    writer.begin(TOKEN, "torch")
    assert read_journal(path) == Entry(TOKEN, "torch", ())
    writer.about_to(Decode(()))
    assert read_journal(path) == Entry(TOKEN, "torch", (Decode(()),))


def test_an_empty_journal_holds_nothing(path, tmp_path):
    assert read_journal(path) is None
    assert read_journal(tmp_path / "absent") is None
    (tmp_path / "other").write_bytes(b"something else")
    assert read_journal(tmp_path / "other") is None


def test_the_pulse_counts_on_through_allocators_and_processes(path):
    pulse = Pulse(path)
    assert pulse.count() == 0
    written(path)
    assert pulse.count() == 1 + len(OPS)
    written(path)  # another process after the first
    assert pulse.count() == 2 * (1 + len(OPS))
    pulse.close()


def test_a_second_process_is_not_taken_for_the_first(path):
    written(path, OPS[:1] * 9)
    written(path, OPS[:1])
    assert read_journal(path) == Entry(CONFIG, "torch", OPS[:1])


def test_a_file_cut_anywhere_gives_a_beginning_of_what_was_written(path):
    written(path)
    whole = path.read_bytes()
    end = whole.rstrip(b"\0")
    for length in range(len(end)):
        path.write_bytes(whole[:length])
        found = read_journal(path)
        assert found is None or (found.config == CONFIG and found.ops == OPS[: len(found.ops)])
    path.write_bytes(end)
    found = read_journal(path)
    assert found is not None
    assert found.ops == OPS


def test_a_damaged_byte_ends_the_reading_there(path):
    written(path)
    whole = bytearray(path.read_bytes())
    length = len(bytes(whole).rstrip(b"\0"))
    dice = random.Random(7)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[dice.randrange(length)] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        found = read_journal(path)
        assert found is None or (found.config == CONFIG and found.ops == OPS[: len(found.ops)])


def test_a_full_journal_counts_on_and_says_that_it_is_not_whole(path, monkeypatch):
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 400)
    writer = Journal(path)
    writer.begin(CONFIG, "torch")
    pulse = Pulse(path)
    for _ in range(100):
        writer.about_to(OPS[0])
    found = read_journal(path)
    assert found is not None
    assert not found.whole
    assert 0 < len(found.ops) < 100
    assert set(found.ops) == {OPS[0]}
    assert pulse.count() == 101
    writer.begin(CONFIG, "torch")
    writer.about_to(OPS[1])
    assert read_journal(path) == Entry(CONFIG, "torch", (OPS[1],))
    pulse.close()


def test_a_pulse_outlives_its_journal(path):
    """Whatever becomes of the file: who reads it is the command line, and must not go down with it."""
    written(path)
    pulse = Pulse(path)
    os.truncate(path, 12)
    assert isinstance(pulse.count(), int)
    os.truncate(path, 0)
    assert pulse.count() == 0
    path.unlink()
    assert pulse.count() == 0
    pulse.close()


def test_what_was_announced_outlives_a_kill(path):
    """A process that kills itself right behind the announcement."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvproof.ci.journal import Journal\n"
        "from kvproof.model.config import Config\n"
        "from kvproof.model.ops import Decode\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "journal.begin(Config('token', 8, 1), 'torch')\n"
        "journal.about_to(Decode((1, 2)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_journal(path) == Entry(TOKEN, "torch", (Decode((1, 2)),))


def test_no_room_is_one_clear_line(tmp_path):
    """A limit on the size of files stands for a full disk: the same call fails."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from kvproof.ci.journal import set_aside\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    set_aside(Path(sys.argv[1]))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("InfrastructureError")
    assert "no room for a journal" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_no_folder_no_journal(tmp_path):
    with pytest.raises(InfrastructureError, match="no room for a journal"):
        set_aside(tmp_path / "nowhere" / "a")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(InfrastructureError, match="cannot be mapped"):
        Journal(tmp_path / "short")
    assert os.listdir(tmp_path) == ["short"]
