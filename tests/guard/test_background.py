"""``RANKMESH=watch:guard=``: programs that were not written for rankmesh, each in processes of its own."""

import re
from pathlib import Path

import pytest
from tests.watch.test_switch import TORCHRUN, run

HERE = Path(__file__).parent


def printed_by(tmp_path, ranks, program, steps, options="", **environment):
    """What the guard printed about a program, without its name; the status of the launcher."""
    environment = {"RANKMESH": f"watch:guard=10,dir=hangs{options}", **environment}
    command = (*TORCHRUN, str(ranks), HERE / "programs.py", program, str(steps))
    printed, status = run(*command, cwd=tmp_path, **environment)
    assert "not watched" not in printed
    assert "compares nothing any more" not in printed, printed
    return re.findall("^rankmesh: guard: (.*)", printed, re.MULTILINE), status, printed


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


# A program, its ranks and steps, a fault, and a part of what is printed.
HEALTHY = [
    ("plain", 4, 100, ""), ("accumulated", 2, 100, ""), ("gan", 2, 40, ""), ("trained", 2, 100, ""),
    ("accelerated", 2, 100, ""), ("lit", 2, 60, ""), ("hybrid", 4, 100, ""), ("megatron", 4, 100, ""),
    ("megatron_distributed", 4, 60, ""), ("zero", 2, 60, ""), ("sharded", 2, 60, "nothing to compare"),
    ("separate", 3, 60, "before the first step"), ("local_sgd", 2, 100, "before the first step"),
]  # fmt: skip
FAULTY = [
    ("accelerated", 3, 80, "1:53:0", "within ranks 0, 1, 2 at step 60: rank 1 differs at [0, 5] in bit 10"),
    ("hybrid", 4, 80, "1:53:0", "within ranks 1, 3 at step 60: rank 3 differs from rank 1"),
    ("trained", 2, 80, "0:53:3:exp_avg", "within ranks 0, 1 at step 60: rank 1 differs from rank 0"),
    ("megatron", 4, 80, "1:43:1", "at step 50: rank"),
]


def needs(program):
    """Skip a program whose framework is not installed."""
    packages = {"accelerated": "accelerate", "zero": "deepspeed", "trained": "transformers", "lit": "lightning"}
    pytest.importorskip(packages.get(program, "megatron.core" if "megatron" in program else "torch"))


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "ranks", "steps", "part"), HEALTHY)
def test_healthy_programs(tmp_path, program, ranks, steps, part):
    """No difference is found; a line about what is not compared."""
    needs(program)
    lines, status, printed = printed_by(tmp_path, ranks, program, steps)
    assert status == 0, printed
    assert len(lines) == bool(part), printed
    assert all(part in line for line in lines)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "ranks", "steps", "fault", "part"), FAULTY)
def test_faulty_programs(tmp_path, program, ranks, steps, fault, part):
    """A flipped bit is found at the next check."""
    needs(program)
    lines, status, printed = printed_by(tmp_path, ranks, program, steps, FAULT=fault)
    assert status == 0, printed
    assert part in lines[0], printed
