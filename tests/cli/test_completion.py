from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.cli.complete import rejoined, spec_names

# A word that ends with a break and one that follows it look like one word to bash, too.
TYPED = st.text(alphabet="ab2,=:-", min_size=1, max_size=8).filter(
    lambda token: not {token[0], token[-1]} & set("=:") and "==" not in token
)
LAST = TYPED.flatmap(lambda token: st.sampled_from(["", "=", ":"]).map(token.__add__))


def pieces(token):
    """A word as bash cuts it: at each = and :, which are words of their own."""
    found = [""]
    for letter in token:
        if letter in "=:":
            found += [letter, ""]
        else:
            found[-1] += letter
    return [piece for piece in found if piece]


@given(st.lists(TYPED, max_size=3), LAST)
def test_words_are_put_together_again(before, last):
    """What bash cut is what was typed, the current word is the last, and bash keeps it up to its last = or :."""
    typed = [*before, last]
    cut = [piece for token in ["rankmesh", *typed] for piece in pieces(token)]
    message, place, keeps = rejoined(cut, len(cut) - 1)
    assert (message, place) == (["rankmesh", *typed], len(typed))
    assert keeps == typed[-1][: max(typed[-1].rfind("="), typed[-1].rfind(":")) + 1]
    assert rejoined(cut, len(cut)) == (["rankmesh", *typed], len(typed) + 1, "")  # the cursor stands after a space


def test_what_follows_in_a_spec():
    """After a recipe come its arguments, after a comma the axes that are not there yet, also in a view."""
    names = {capability.rpartition("=")[0] for capability, _ in spec_names("ezpz:tp=2,")}
    assert names == {"ezpz:tp=2,world", "ezpz:tp=2,cp", "ezpz:tp=2,pp", "ezpz:tp=2,dp"}
    assert {capability for capability, _ in spec_names("tp=2,d")} == {"tp=2,dp=2", "tp=2,dp=4", "tp=2,dp=8"}
    assert ("tp=2,dp=4/expert:ep=8", "axis") in spec_names("tp=2,dp=4/expert:e")
    assert spec_names("tp=") == []


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
        ("rankmesh groups tp=2,dp=2 t\t", "dp=2 tp "),
        ("rankmesh show tp=2,d\t", "tp=2,dp="),
        ("rankmesh show ezpz:world=8,c\t", "world=8,cp="),
        ("rankmesh show tp=2,dp=2,pp=2 --groups tp,e\t", "--groups tp,embd "),
    ],
)
def test_a_real_bash_completes_after_equals_signs_and_commas(bash, keys, completed):
    """In a terminal, bash completes axes, arguments and groups after =, : and commas, and keeps what was typed."""
    assert completed in bash(f"\x15{keys}", completed)
