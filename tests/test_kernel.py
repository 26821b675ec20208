"""What a job loads before its first step, and a command before it answers, is a small part of the package."""

import json
import subprocess
import sys

import pytest

from rankmesh.cli.app import PANELS

MOST, SHOWN = 60, 45
PROGRAMS = {
    "init and connect": "import rankmesh as rm\nwith rm.init() as me, rm.connect('tp=1,dp=*') as groups: pass",
    "a plan": "import rankmesh as rm\nrm.recipes.megatron(world_size=64, tp=2, pp=2).of(13)",
}
LOADED = "\nimport json, sys\nprint(json.dumps([name for name in sys.modules if name.split('.')[0] == 'rankmesh']))"
ON_DEMAND = {"cli", "placement", "readers", "transfer", "viz"}


def _loaded(program):
    command = [sys.executable, "-c", program + LOADED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_loads_few_modules(program):
    """No readers of configs, no doctor and no placement, and at most 60 modules."""
    loaded = _loaded(PROGRAMS[program])
    assert len(loaded) <= MOST, loaded
    assert not {name.split(".")[1] for name in loaded if "." in name} & ON_DEMAND
    assert not [name for name in loaded if name.startswith(("rankmesh.debug.doctor", "rankmesh.debug.watch"))]


SHOW = "import sys\nfrom rankmesh.cli import main\nsys.argv = ['rankmesh', 'show', 'tp=2,dp=4']\n"
SHOW += "try: main()\nexcept SystemExit: print()"


def test_a_command_loads_what_it_needs():
    """`rankmesh show SPEC` loads no other subcommand, no doctor, no placement: at most 45 modules."""
    loaded = _loaded(SHOW)
    assert len(loaded) <= SHOWN, loaded
    assert not {name.split(".")[1] for name in loaded if "." in name} & {"debug", "launch", "placement", "transfer"}
    assert "rankmesh.cli.look.show" in loaded
    assert not {f"rankmesh.cli.{panel.lower()}.{name}" for name, panel in PANELS.items() if name != "show"} & set(
        loaded
    )


def test_more_modules_are_noticed():
    """The count has those of a package that is loaded."""
    assert len(_loaded("import rankmesh.readers.config")) > len(_loaded("import rankmesh"))
