"""What a job loads before its first step, and a command before it answers, is a small part of the package."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import rankmesh
from rankmesh.cli.app import PANELS


def loaded_by(code, *packages):
    """The modules of some packages, ours by default, that a fresh interpreter has loaded after running ``code``."""
    code += (
        f"\nimport sys; print(); print(*(m for m in sys.modules if m.partition('.')[0] in {packages or ['rankmesh']}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.splitlines()[-1].split())


def packages_of(loaded):
    """The packages of ours that these modules are in."""
    return {name.split(".")[1] for name in loaded if "." in name}


def test_a_plan_loads_what_a_plan_needs():
    """A recipe loads at most 30 modules, and none of the packages that a plan does not need; `place` loads its own."""
    loaded = loaded_by("import rankmesh as rm; rm.recipes.megatron(world_size=64, tp=2, pp=2).of(13)")
    assert len(loaded) <= 30
    assert packages_of(loaded) == {"core", "errors"}
    assert "rankmesh.placement.place" in loaded_by("import rankmesh; rankmesh.place")


def test_a_job_loads_few_modules():
    """Init and connect: no readers of configs, no doctor and no placement, and at most 60 modules."""
    loaded = loaded_by("import rankmesh as rm\nwith rm.init() as me, rm.connect('tp=1,dp=*') as groups: pass")
    assert len(loaded) <= 60, loaded
    assert not packages_of(loaded) & {"cli", "placement", "readers", "transfer", "viz"}
    assert not [name for name in loaded if name.startswith(("rankmesh.debug.doctor", "rankmesh.debug.watch"))]


def test_going_live_loads_no_sharded_tensors():
    """One rank: connecting, surviving and simulating load neither DTensor, the compiler nor IDNA."""
    code = "import rankmesh as rm, rankmesh.sim, rankmesh.survival, rankmesh.debug.watch; rm.init(); rm.connect('dp=*')"
    loaded = loaded_by(code, "torch", "encodings")
    assert "torch.distributed" in loaded
    assert not loaded & {"torch.distributed.tensor", "torch._dynamo", "encodings.idna"}


SHOW = "import sys\nfrom rankmesh.cli import main\nsys.argv = ['rankmesh', 'show', 'tp=2,dp=4']\n"
SHOW += "try: main()\nexcept SystemExit: pass"


def test_a_command_loads_what_it_needs():
    """`rankmesh show SPEC` loads no other subcommand, no doctor, no placement: at most 45 modules."""
    loaded = loaded_by(SHOW)
    assert len(loaded) <= 45, loaded
    assert not packages_of(loaded) & {"debug", "launch", "placement", "transfer"}
    commands = {f"rankmesh.cli.{panel.lower()}.{name}" for name, panel in PANELS.items()}
    assert commands & loaded == {"rankmesh.cli.look.show"}


def test_type_checkers_see_what_is_loaded_later():
    """Each public name that is loaded when it is first used is imported for type checkers, from where it is."""
    tree = ast.parse(Path(rankmesh.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    loaded = {name: getattr(rankmesh, name) for name in rankmesh._LAZY | rankmesh._LIVE}
    seen = {
        alias.asname or alias.name: pkgutil.resolve_name(f"{line.module}:{alias.name}")
        for line in checked.body
        for alias in line.names
    }
    assert seen == loaded
