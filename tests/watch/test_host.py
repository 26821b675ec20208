"""The ranks of a host as each other sees them, whatever is in the way: by its files, without ranks."""

import json
import os
import signal
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests import limits

from rankmesh.debug.watch import host as on_host
from rankmesh.debug.watch.host import HostRanks


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The folder of this host's temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(on_host, "native_stack", lambda _: "")  # no tool is installed
    return tmp_path


def _here(**about):
    return json.dumps({"pid": os.getpid(), "began": on_host._began(os.getpid()), "signal": False, **about})


# What no private folder reads (tests/readers/test_private.py), and what no rank writes.
POISON = {
    "FIFO": os.mkfifo,
    "text": lambda path: path.write_text("{"),
    "list": lambda path: path.write_text("[]"),
    "pid": lambda path: path.write_text(_here(pid="-1")),
    "nesting": lambda path: path.write_text("[" * 60_000),
}


@pytest.mark.parametrize("how", POISON)
def test_one_poisoned_file_hides_its_rank_alone(host, caplog, how):
    """A FIFO and what no rank writes, as the file of rank 1: rank 2 is seen, at once."""
    ranks = HostRanks("session", 0)
    place = next(host.glob("*/*session"))
    POISON[how](place / "1.json")
    (place / "2.json").write_text(_here())
    (place / "x.json").write_text(_here())
    started = time.monotonic()
    assert {rank: look.state for rank, look in ranks.look({1, 2}).items()} == {2: "its process runs"}
    assert time.monotonic() - started < limits.AT_ONCE
    assert "rank 1 cannot be looked at" in caplog.text
    ranks.close()


def test_poisoned_stacks_are_none(host):
    """A FIFO in place of the stacks of rank 2: it is seen without stacks."""
    ranks = HostRanks("session", 0)
    place = next(host.glob("*/*session"))
    (place / "2.json").write_text(_here(signal=True))
    os.mkfifo(place / "2.stacks")
    assert ranks.look({2})[2].state == "its process runs"
    ranks.close()


def test_what_an_earlier_session_left_poisoned_ends_no_watch(host):
    """A session of which a file is a FIFO: a later one begins beside it."""
    earlier = HostRanks("earlier", 0)
    place = earlier._place
    os.mkfifo(place / "1.json")
    os.utime(place, (time.time() - 100,) * 2)
    HostRanks("later", 0).close()
    earlier.close()


def test_a_folder_that_others_have_prepared_is_not_used(host, caplog):
    """Something else at the place of this user's folder: a warning, nothing is written there, and ranks are watched."""
    os.mkfifo(host / f"rankmesh-{os.geteuid()}")
    before = set(host.rglob("*"))
    ranks = HostRanks("session", 0)
    assert "set TMPDIR" in caplog.text
    assert all(path.parts[len(host.parts)].startswith("rankmesh-watch-") for path in set(host.rglob("*")) - before)
    assert not ranks.signalled()
    ranks.close()
    assert set(host.rglob("*")) == before


def test_files_are_for_one_user(host):
    """All of a session's files and folders have no mode for others, whatever the umask is."""
    before = os.umask(0)
    try:
        ranks = HostRanks("session", 0)
    finally:
        os.umask(before)
    assert not [path for path in host.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    ranks.close()


def test_a_file_that_is_gone_meanwhile_is_no_news(host, caplog, monkeypatch):
    """A rank that leaves while another looks, or a folder that two ranks sweep at once: nothing is logged."""
    ranks = HostRanks("session", 0)
    monkeypatch.setattr(on_host.PrivateFolder, "names", lambda _: ["1.json"])
    assert ranks.look([1]) == {}
    assert caplog.records == []
    monkeypatch.undo()
    ranks.close()


def _descriptors():
    """What is open, with its numbers: one that was closed meanwhile may have given its number to another."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add((int(path.name), os.fstat(int(path.name)).st_ino))
    return found


def _numbers(descriptors):
    return sorted(number for number, _ in descriptors)


def test_a_program_that_closes_all_descriptors_gets_nothing_of_ours(host, tmp_path, monkeypatch):
    """It opens files of its own under all numbers that it closed: none is written to or closed; signals are noticed."""
    sent = []
    monkeypatch.setattr(on_host.os, "kill", lambda *how: sent.append(how))
    before = _descriptors()
    ranks = HostRanks("session", 0)
    ranks.outlive_sigterm()
    numbers = _numbers(_descriptors() - before)
    assert len(numbers) >= 3
    for taken in (False, True):  # closed, and then another file's
        for number in numbers:
            os.close(number)
        files = [os.open(tmp_path / f"program.{number}", os.O_CREAT | os.O_RDWR) for number in numbers if taken]
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        if taken:
            assert not any(os.fstat(number).st_size for number in files)
        assert not ranks.signalled()
        assert not ranks.terminated()
        numbers = _numbers(one for one in _descriptors() - before if one[0] not in files)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert (ranks.signalled(), ranks.signalled()) == (True, False), "a signal asks once"
    assert ranks.terminated()
    ranks.close()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [os.fstat(number).st_size for number in files] == [0] * len(files)
    for number in files:
        os.close(number)
