"""Imports lead in no circle, but for those that only type checkers follow."""

import ast
import importlib
from pathlib import Path

import rankmesh

ROOT = Path(rankmesh.__file__).parent
# Rooms in which an import inside a function may not close a circle either.
STRICT = ("errors", "core", "placement", "readers", "launch", "debug", "viz", "testing", "cli")


def modules(root):
    """The modules of a package by name, with their syntax trees."""
    named = {}
    for path in root.rglob("*.py"):
        name = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        named[name] = ast.parse(path.read_text(encoding="utf-8"))
    return named


def imported(node, known, *, deferred):
    """The modules that a tree imports when it runs; ``deferred``: also those of its functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not deferred:
            continue
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names if name.name in known)
        elif isinstance(child, ast.ImportFrom):
            parts = [f"{child.module}.{name.name}" for name in child.names]
            yield from (part if part in known else child.module for part in parts)
        yield from imported(child, known, deferred=deferred)


def cycle(graph):
    """Modules in a circle, and those that lead to one; empty where there is none."""
    left = {name: set(targets) & graph.keys() - {name} for name, targets in graph.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_imports_have_no_cycle():
    """Nowhere when a module is imported, and in the planning rooms, the command and the plugin not later either."""
    known = modules(ROOT)
    del known["rankmesh"]
    assert cycle({name: set(imported(tree, known, deferred=False)) for name, tree in known.items()}) == []
    strict = {name: tree for name, tree in known.items() if name.split(".")[1] in STRICT}
    assert cycle({name: set(imported(tree, known, deferred=True)) for name, tree in strict.items()}) == []


def test_a_name_that_is_loaded_later_is_not_a_modules():
    """A package that loads ``watch.slow`` when it is used has no module ``watch/slow.py``, which Python would find."""
    packages = [path for path in ROOT.rglob("__init__.py") if "loader(__name__" in path.read_text(encoding="utf-8")]
    assert len(packages) > 2
    for path in packages:
        package = importlib.import_module(".".join((ROOT.name, *path.parent.relative_to(ROOT).parts)))
        body = ast.parse(path.read_text(encoding="utf-8")).body
        at_once = {name.name for node in body if isinstance(node, ast.ImportFrom) for name in node.names}
        beside = {found.stem for found in path.parent.iterdir()}
        assert beside.isdisjoint({*package.__all__} - at_once), path.parent
