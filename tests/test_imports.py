import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import rankmesh


def loaded_by(code, *packages):
    """The modules of some packages, ours by default, that a fresh interpreter has loaded after running ``code``."""
    code += (
        f"; import sys; print(*(name for name in sys.modules if name.partition('.')[0] in {packages or ['rankmesh']}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_loads_what_a_plan_needs():
    """import rankmesh loads at most 30 of its modules, and none of the packages that a plan does not need."""
    loaded = loaded_by("import rankmesh as rm; rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec('dp')]).of(1)")
    assert len(loaded) <= 30
    assert {".".join(name.split(".")[1:2]) for name in loaded} == {"", "core", "errors"}
    assert "rankmesh.placement.place" in loaded_by("import rankmesh; rankmesh.place")


def test_going_live_loads_no_sharded_tensors():
    """One rank: connecting, surviving and simulating load neither DTensor, the compiler nor IDNA."""
    code = "import rankmesh as rm, rankmesh.sim, rankmesh.survival, rankmesh.debug.watch; rm.init(); rm.connect('dp=*')"
    loaded = set(loaded_by(code, "torch", "encodings"))
    assert "torch.distributed" in loaded
    assert not loaded & {"torch.distributed.tensor", "torch._dynamo", "encodings.idna"}


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
