"""``rankmesh top``: once, as data, in a terminal and without one; a job that has written nothing yet."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.slow.making import LATE, report

from rankmesh.cli.shell import ExitCode
from rankmesh.debug.slow import FILE

COMMAND = (sys.executable, "-m", "rankmesh", "top", "--every", "0.1")


def test_once_and_data(rankmesh, tmp_path):
    """The newest report, in the folder or in one below it; the document is that of the file."""
    report(16, LATE).write(tmp_path / "4711")
    shown = rankmesh("top", tmp_path, "--once")
    assert (shown.code, shown.err) == (ExitCode.OK, "")
    assert "makes dp wait" in shown.out
    given = json.loads(rankmesh("top", tmp_path / "4711", "--json").out)
    assert given == json.loads((tmp_path / "4711" / FILE).read_text(encoding="utf-8"))


@pytest.mark.parametrize("how", ["--once", "--json"])
def test_nothing_to_see(rankmesh, tmp_path, how):
    """The switch of the job is named; a file that is not a report is an error, too."""
    ended = rankmesh("top", tmp_path / "absent", how)
    assert (ended.code, ended.out) == (ExitCode.BAD_SPEC, "")
    assert "start the job with RANKMESH=watch:dir=" in ended.err
    (tmp_path / FILE).write_text('{"format": 2}')
    assert "format 2" in rankmesh("top", tmp_path, how).err


def _read_until(descriptor, text):
    """What comes from a process until it has written a text."""
    found = b""
    while text not in found:
        part = os.read(descriptor, 65536)
        assert part, found
        found += part
    return found


def _as_a_terminal():
    # A shell that starts the tests in the background has them ignore SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_terminal(tmp_path):
    """It waits for the first report, shows each in place, and gives the screen back at Ctrl-C."""
    terminal, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    channels = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen([*COMMAND, tmp_path], **channels, env=environment, preexec_fn=_as_a_terminal) as process:
        os.close(theirs)
        try:
            _read_until(terminal, b"RANKMESH=watch")
            report(16, LATE).write(tmp_path)
            _read_until(terminal, b"makes dp wait")
            report(16).write(tmp_path)
            _read_until(terminal, b"device 7")
            process.send_signal(signal.SIGINT)
            _read_until(terminal, b"\x1b[?1049l")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(terminal)


def test_a_pipe(process, tmp_path):
    """Without a terminal the last report, once, without colours or control characters."""
    report(16, LATE).write(tmp_path)
    ended = process("top", tmp_path)
    assert (ended.code, ended.err, "\x1b" in ended.out) == (0, "", False)
    assert ended.out.count("█ 30 %") == 1
