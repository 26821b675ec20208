"""``RANKMESH=watch:guard=``: programs that were not written for rankmesh, each in processes of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FRAMEWORKS = os.environ.get("RANKMESH_FRAMEWORKS", "")


def printed_by(tmp_path, ranks, program, steps, options="", **environment):
    """What the guard printed about a program, without its name; the status of the launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH")}
    kept |= {"OMP_NUM_THREADS": "1", "RANKMESH": f"watch:guard=10,dir=hangs{options}", **environment}
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = subprocess.run(
        (*command, HERE / "programs.py", program, str(steps)),
        cwd=tmp_path,
        env=kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=220,
        check=False,
    )
    assert "not watched" not in done.stdout
    assert "compares nothing any more" not in done.stdout, done.stdout
    return re.findall("^rankmesh: guard: (.*)", done.stdout, re.MULTILINE), done.returncode, done.stdout


@pytest.mark.long
def test_a_flipped_bit_of_three(tmp_path):
    """The rank, the tensor, the element and the bit, at the next check; the job ends if it is to."""
    lines, status, printed = printed_by(tmp_path, 3, "plain", 600, ",then=exit", FAULT="1:63:0")
    (line,) = lines
    assert line == (
        "'0.weight' differs within ranks 0, 1, 2 at step 70: rank 1 differs at [0, 5] in bit 10 (1 element differs); "
        "they were equal at step 60"
    ), printed
    assert status != 0
    metrics = (tmp_path / "hangs/rankmesh.prom").read_text(encoding="utf-8")
    assert re.search(r'^rankmesh_difference_step\{run=".*",tensor="0.weight",ranks="1"\} 70$', metrics, re.MULTILINE)
    assert "then=exit ends this process with status 7" in printed
