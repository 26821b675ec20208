"""Others' own functions without the rest of their packages: a file, or one function of a file, as it stands there."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from tests.peers.fetch import folder


def stand_in(*names, **values):
    """Put modules in place that answer whatever is asked of them; ``values`` are attributes of the last one."""
    for name in names:
        module = MagicMock(name=name)
        module.__path__, module.__spec__ = [], None
        vars(module).update(values if name == names[-1] else {})
        sys.modules[name] = module


def load(peer, path, name=None, root=None):
    """A file of a release, or of the sources in ``root``, as a module."""
    file = Path(root or folder(peer)) / path
    spec = importlib.util.spec_from_file_location(name or f"theirs_{peer}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def function(peer, path, name, **given):
    """One function of a file, with these globals and whatever else it asks for."""
    source = (folder(peer) / path).read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    module = ModuleType(f"theirs_{name}")
    vars(module).update(given)
    exec(compile(ast.Module(found, []), str(folder(peer) / path), "exec"), vars(module))  # noqa: S102
    return getattr(module, name), vars(module)
