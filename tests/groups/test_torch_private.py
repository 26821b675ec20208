import ast
import subprocess
import sys
from pathlib import Path

import torch

import rankmesh
from rankmesh.backend import torch_private

SOURCES = Path(rankmesh.__file__).parent
# Everything that depends on torch's insides, and on its version, is here.
ALLOWED = {Path("backend/torch_private.py"), Path("backend/torch_threads.py")}
PRIVATE_MODULES = ("torch._C", "torch.distributed.distributed_c10d", "torch.testing._internal")


def test_the_installed_torch_is_a_known_one():
    """The private calls are known on the minor version of torch that is installed."""
    minor = ".".join(torch.__version__.split(".")[:2])
    assert minor in torch_private.KNOWN_VERSIONS, (
        f"torch {torch.__version__} is installed; the private calls of backend/torch_private.py are known on "
        f"{', '.join(torch_private.KNOWN_VERSIONS)}; read its changes to torch.distributed, run the tests of "
        f"live groups, and add {minor!r} to KNOWN_VERSIONS"
    )


def private_uses(source):
    """Lines that reach into torch: imports of its insides, and underscored names of what is torch's."""
    found, torch_names = [], set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    torch_names.add(name.asname or "torch")
                    if name.name.startswith(PRIVATE_MODULES) or "._" in name.name:
                        found.append((node.lineno, name.name))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            torch_names |= {name.asname or name.name for name in node.names}
            whole = [f"{node.module}.{name.name}" for name in node.names]
            found += [(node.lineno, name) for name in whole if name.startswith(PRIVATE_MODULES) or "._" in name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            # A process group is torch's whatever variable holds it.
            if isinstance(root, ast.Name) and (root.id in torch_names or root.id in ("pg", "c10d")):
                found.append((node.lineno, ast.unparse(node)))
    return found


def test_private_calls_are_in_one_place():
    """No other file of the library reaches into torch."""
    found = {}
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES) not in ALLOWED:
            uses = private_uses(path.read_text(encoding="utf-8"))
            if uses:
                found[str(path.relative_to(SOURCES))] = uses
    assert found == {}


def test_the_search_finds_them_where_they_are():
    """The same search does find the private calls of the files that may have them."""
    for path in ALLOWED:
        assert private_uses((SOURCES / path).read_text(encoding="utf-8")), path


def test_a_torch_that_is_not_known_is_told_once():
    """On another release the import says which were tried, once, and goes on."""
    program = (
        "import torch; torch.__version__ = '2.99.0'\n"
        "import rankmesh.runtime, rankmesh.runtime.connect, rankmesh.sim\n"
        "print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.count("torch 2.99.0 is installed") == 1
    assert " and ".join(torch_private.KNOWN_VERSIONS) in done.stderr
