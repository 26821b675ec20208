"""The README's four lines on forked ranks, and the demo; tests/docs follows its commands and links as they are."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from tests.sockets import free_port

from rankmesh.launch.table import torchrun_variables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SPEC = re.search(r"^SPEC \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
# The job, how many ranks torchrun starts, and what they print.
JOB = re.compile(r"`job\.py`:\n\n```python\n(.*?)```\n\n```console\n\$ torchrun .* (\d+) job\.py\n(.*?)```", re.DOTALL)


def _job(me, script, port):
    os.environ.update(torchrun_variables(me.rank, me.size, local_rank=me.rank, local_world_size=me.size, port=port))
    with redirect_stdout(StringIO()) as printed:
        exec(compile(script, "job.py", "exec"), {"__name__": "__main__"})  # noqa: S102  - the page's own
    return printed.getvalue()


def test_the_four_lines_print_what_is_shown(ranks):
    """8 gloo ranks run the job of the README."""
    script, size, shown = JOB.search(README).groups()
    assert "".join(ranks(int(size), _job, script, free_port(), world=None)) == shown


@pytest.mark.long  # as tests/check/test_check_here.py::test_every_group_is_verified
def test_the_demo_checks_its_layout():
    """16 ranks: `rankmesh check` of the demo's layout verifies every group of every kind."""
    command = [sys.executable, "-m", "rankmesh", "check", SPEC]
    environment = {**os.environ, "COLUMNS": "140"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "every group was proved: 125 groups of 20 kinds on 16 ranks (gloo)"
