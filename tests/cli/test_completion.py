from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """A terminal with bash in which the command's completion is installed; what it shows after some keys."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    folder = tmp_path_factory.mktemp("bash")
    (folder / "rankmesh").write_text(f'#!/bin/sh\nexec {sys.executable} -m rankmesh "$@"\n', encoding="utf-8")
    (folder / "rankmesh").chmod(0o755)
    script = subprocess.run(
        [sys.executable, "-m", "rankmesh"], env={**os.environ, "_RANKMESH_COMPLETE": "source_bash"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "complete").write_text(script.stdout, encoding="utf-8")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)  # noqa: S606

    def press(keys: str, until: str) -> str:
        os.write(terminal, keys.encode())
        shown, end = "", time.monotonic() + 20
        while until not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
        return shown

    press("source ./complete; bind 'set enable-bracketed-paste off'; echo rea''dy\n", "ready")
    yield press
    os.close(terminal)  # which ends it
    os.waitpid(process, 0)


@pytest.mark.parametrize(
    ("keys", "completed"),
    [
        ("rankmesh groups llama3-405b emb\t", "llama3-405b embd "),
        ("rankmesh show llama3-4\t", "show llama3-405b"),
        ("rankmesh show llama3-405b --groups emb\t", "--groups embd "),
    ],
)
def test_a_real_bash_completes_presets_and_groups(bash, keys, completed):
    """In a terminal, bash completes the names of presets, and the groups of the plan that was typed before."""
    assert completed in bash(f"\x15{keys}", completed)
