"""What is private in torch is used in rankmesh.backend alone; the search that says so finds each way to reach it."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import rankmesh
from rankmesh.backend import versions

SOURCES = Path(rankmesh.__file__).parent
ENGINES = Path(__file__).parents[2] / "packages" / "rankmesh-engines" / "src"
HERE = "backend"
PRIVATE_MODULES = ("torch._C", "torch.distributed.distributed_c10d", "torch.testing._internal", "torch.distributed._")
# Private by their spelling, public by their documentation.
STANDARD = {
    "_exit",
    "_getframe",
    "_current_frames",
    "_current_exceptions",
    "_asdict",
    "_replace",
    "_value_",
    "_fields",
    "_fixtureinfo",
}

_OF_TORCH = [torch, dist, native, c10d, c10d._world, torch.Tensor, dist.ProcessGroup, dist.Work, dist.Store, DeviceMesh]
_OF_TORCH += [value for value in vars(native).values() if isinstance(value, type)]
# Private in mbridge and SGLang, which have no public function that builds the model of one rank alone, or that forgets
# the rotary embeddings of the model before.
OF_OTHERS = {"_model_provider", "_initialize_model", "_ROPE_DICT"}
TORCH_NAMES = {name for owner in _OF_TORCH for name in dir(owner) if re.fullmatch(r"_[a-zA-Z]\w*(?<!__)", name)}


def _private(name):
    return name.startswith("_") and not name.endswith("__")


def _names_here(tree):
    """Private names that a file gives to its own functions, classes, fields and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # __slots__, object.__setattr__
    return {name for name in names if _private(name)}


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _of_torch_class(node):
    return any(
        "ProcessGroup" in ast.unparse(base) or ast.unparse(base).startswith(("dist.", "torch.")) for base in node.bases
    )


def private_uses(tree, local=()):
    """Lines that reach into torch; ``local`` are private names that rankmesh gives itself."""
    found = []
    of_torch = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and (getattr(node, "module", None) or node.names[0].name).split(".")[0] == "torch"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names if name.name.startswith(PRIVATE_MODULES)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            whole = [f"{node.module}.{name.name}" for name in node.names]
            found += [(node.lineno, name) for name in whole if name.startswith(PRIVATE_MODULES) or "._" in name]
        elif isinstance(node, ast.Attribute) and node.attr in ("distributed_c10d", "_C", "f_locals"):
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Attribute) and _private(node.attr) and not _is_self(node.value):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            torchs = isinstance(root, ast.Name) and root.id in of_torch
            if node.attr not in STANDARD | OF_OTHERS and (torchs or node.attr not in local):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _private(name) and name in TORCH_NAMES and not _is_self(node.args[0]):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ClassDef) and _of_torch_class(node):
            defined = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            defined += [
                ast.unparse(target) for one in node.body if isinstance(one, ast.Assign) for target in one.targets
            ]
            found += [(node.lineno, name) for name in defined if _private(name) and name in TORCH_NAMES]
    return found


def _outside():
    ours = [path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] != HERE]
    return {str(path): ast.parse(path.read_text(encoding="utf-8")) for path in (*ours, *ENGINES.rglob("*.py"))}


@pytest.mark.long
def test_what_is_private_in_torch_is_used_in_one_package():
    """No other package of the library reaches into torch."""
    trees = _outside()
    local = {name for tree in trees.values() for name in _names_here(tree)}
    assert {path: uses for path, tree in trees.items() if (uses := private_uses(tree, local))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C._distributed_c10d",
        "from torch._C import _distributed_c10d",
        "from torch.distributed import distributed_c10d",
        "from torch.distributed._tensor import api",
        "import torch; torch._C._dump()",
        "import torch.distributed as dist; dist.distributed_c10d.new_group()",
        "import torch.distributed as dist; dist._world",
        "group._set_group_name('x')",
        "def f(anything): return anything.pg._get_backend(None)",
        "given[0]._version",
        "made()._timeout",
        "getattr(pg, '_get_backend')",
        "setattr(pg, '_set_group_desc', None)",
        "frame.f_locals['group_src']",
        "class Mine(dist.ProcessGroup):\n    def _set_group_name(self, name): ...",
        "class Mine(dist.ProcessGroup):\n    _allgather_base = None",
    ],
)
def test_each_way_to_reach_into_torch_is_found(line):
    """Imports, attributes of whatever holds an object of torch, names in strings, overrides, variables of frames."""
    assert private_uses(ast.parse(line))


def test_the_installed_torch_is_a_known_one():
    """The private pieces are known on the minor version of torch that is installed."""
    assert versions.minor(torch.__version__) in versions.KNOWN, (
        f"torch {torch.__version__} is installed; read its changes to torch.distributed, run the tests of live groups,"
        " give it a class in backend/members.py if it needs one, and add it to KNOWN in backend/versions.py"
    )
