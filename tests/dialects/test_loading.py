import subprocess
import sys

MODULES = ("nanotron", "ezpz", "fairscale", "process_groups", "deepspeed", "device_mesh", "accelerate", "torchtitan")


def _loaded(code):
    """Which modules of rankmesh.dialects, and whether torch, a fresh interpreter has loaded after ``code``."""
    code += "; import sys; print([n for n in sys.modules if n.startswith('rankmesh.dialects.') or n == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(eval(done.stdout))  # noqa: S307  - a list of names that the line above printed


def test_a_dialect_loads_no_other():
    """The package loads no dialect and no torch; one dialect loads that one alone, whichever come before it."""
    steps = [
        "import rankmesh, rankmesh.dialects; assert 'torch' not in sys.modules",
        "assert not [n for n in sys.modules if n.startswith('rankmesh.dialects.')]",
    ]
    steps += [
        f"before = set(sys.modules); import rankmesh.dialects.{name}; "
        f"assert all(n.startswith('rankmesh.dialects.{name}') for n in set(sys.modules) - before if 'dialects.' in n)"
        for name in MODULES
    ]
    loaded = _loaded("; ".join(["import sys", *steps]))
    assert loaded >= {f"rankmesh.dialects.{name}" for name in MODULES}


def test_planning_for_accelerate_needs_no_torch():
    """The plan of a ParallelismConfig is arithmetic: torch comes with the device mesh."""
    assert "torch" not in _loaded("from rankmesh.dialects.accelerate import plan; plan(tp_size=2).digest")
