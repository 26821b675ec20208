"""A page is followed in a folder of its own: files are saved, examples and commands are run, in the page's order.

Commands run as on a terminal of 100 columns without colours. Most commands of rankmesh run in this process, and scripts
on the ranks of a test (``tests/forkserver.py``) where a page's reader is given them: each saves the start of a Python.
"""

from __future__ import annotations

import doctest
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, Block
from typer.testing import CliRunner

from rankmesh.cli.app import app

LIMIT = 100
# Long lines of output may be wrapped in examples; the output of commands stands as it is.
_EXAMPLES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_TIME = re.compile(r"\b\d+(\.\d+)? ?(ms|µs|s)\b")
# A difference of one rounding in float64, which differs between processors.
_ROUNDING = re.compile(r"\b[1-9]e-16\b")
_COMMANDS = (
    "show|groups|explain|diff|explore|presets|transfer|layout|checkpoint|compare|lint|--\\w+|(?!bench)\\w+ --help"
)
_OURS = re.compile(rf"(rankmesh (?:{_COMMANDS})\b[^|<>&;]*?)(?: > ([\w.]+))?")
# How many ranks, or one that no launcher started; a script, its arguments, and what its output goes through.
_STARTED = r"(?:torchrun (?:--standalone )?--nproc-per-node (?P<size>\d+)|python(?: -W ignore)?)"
_SCRIPT = re.compile(rf"{_STARTED} (?P<script>[\w.]+\.py[^|<>]*?)(?: 2>/dev/null)?(?P<rest>( \| [\w -]+)*)")
_TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
# What torch writes where no name server answers depends on the machine.
_TERMINAL["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# What a terminal does not have: wishes for colours, and that the tests themselves were started by pytest and make.
_UNSET = (
    *("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "RANKMESH_DEBUG", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"),
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL"),
)


@dataclass
class Reader:
    """Someone who follows a page in ``folder``, the current one; ``names`` are those of its Python examples."""

    folder: Path
    ranks: Callable[..., object] | None = None
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "__main__"})

    def follow(self, block: Block) -> list[str]:
        """What is not as the block says: nothing, for a page that is right."""
        if block.kind == "file":
            (self.folder / str(block.file)).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            return self._python(block)
        elif block.kind == "console":
            return [wrong for command, shown in block.commands for wrong in self._command(block, command, shown)]
        return []

    def _python(self, block: Block) -> list[str]:
        if ">>> " not in block.text:
            exec(compile(block.text, f"line {block.line}", "exec"), self.names)  # noqa: S102  - the page's own
            return []
        test = doctest.DocTestParser().get_doctest(block.text, {}, "page", "page", block.line)
        test.globs = self.names
        wrong: list[str] = []
        doctest.DocTestRunner(optionflags=_EXAMPLES).run(test, out=wrong.append, clear_globs=False)
        return wrong

    def _command(self, block: Block, command: str, shown: str) -> list[str]:
        job = _SCRIPT.fullmatch(command)
        if job and self.ranks:
            output, words = self.folder / "printed", shlex.split(job["script"])
            output.write_text("")  # of an earlier job
            size = int(job["size"] or 1)
            self.ranks(size, run_script, str(self.folder), str(output), words, bool(job["size"]), world=None)
            command = f"cat {output}{job['rest']}"
        status, printed = run(command, self.folder)
        wrong = []
        if status != block.exits:
            wrong.append(f"line {block.line}: `{command}` ended with {status}, not {block.exits}:\n{printed}")
        elif not same(shown, printed):
            wrong.append(f"line {block.line}: `{command}` printed\n{printed}\nand the page shows\n{shown}")
        return wrong


def run_script(me: Any, folder: str, output: str, words: list[str], launched: bool) -> None:
    """Run a script of a page on one rank, which writes to the file of all of them, but for what it writes to stderr."""
    os.environ.update(_TERMINAL)
    if launched:
        me.launched()
    os.chdir(folder)
    sys.path[0], sys.argv = folder, words
    with Path(output).open("a", encoding="utf-8", buffering=1) as printed, redirect_stdout(printed):
        runpy.run_path(words[0], run_name="__main__")


def run(command: str, folder: Path) -> tuple[int, str]:
    """The exit status of a command and all that it printed."""
    ours = _OURS.fullmatch(command)
    if ours:
        return _in_this_process(*ours.groups())
    kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT if command.startswith("make ") else folder,
        env={
            **kept,
            **_TERMINAL,
            "PYTHONPATH": _path(),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return -signal.SIGKILL, f"{printed}\nnot done within {LIMIT} s"
    return process.returncode, printed


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _in_this_process(command: str, file: str | None) -> tuple[int, str]:
    known, path = set(sys.modules), [*sys.path]
    result = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="rankmesh", env=_TERMINAL)
    # A program of the page that it has loaded: other tests have modules of that name.
    here, sys.path[:] = str(Path.cwd()), path
    for name in sys.modules.keys() - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(here):
            del sys.modules[name]
    if file:
        Path(file).write_text(result.stdout, encoding="utf-8")
    # Words for people come first: what is written to a file is read, and said, before the table is printed.
    return result.exit_code, result.stderr + ("" if file else result.stdout)


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what a command prints, but for times, the columns that they widen, what ``...`` omits."""
    return doctest.OutputChecker().check_output(_timeless(shown), _timeless(printed), doctest.ELLIPSIS)


def _timeless(text: str) -> str:
    lines = [_ROUNDING.sub("1e-16", line.rstrip()) for line in text.rstrip().splitlines()]
    if _TIME.search(text):
        lines = [re.sub(r"─+", "─", re.sub(r" +", " ", _TIME.sub("TIME", line))).strip() for line in lines]
    return "\n".join(lines) + "\n"
