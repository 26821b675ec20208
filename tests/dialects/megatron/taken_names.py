"""What Megatron's head and its users take from the three modules: ``python -m tests.dialects.megatron.taken_names``.

Arguments: ``REPOSITORY=FOLDER@COMMIT``, a checkout each, Megatron's first. Prints ``taken_names.json``: by repository,
its commit and the names of each module that its files import, ask for as attributes, or name in a string that is
patched; under ``undefined`` those that Megatron's head has not itself, which older releases had, or none.
"""

import ast
import json
import re
import sys
from pathlib import Path

MODULES = ("parallel_state", "hyper_comm_grid", "process_groups_config")
CORE = "megatron.core"
_IN_TEXT = re.compile(rf"megatron\.core\.(?:({'|'.join(MODULES)})|mpu)\.([A-Za-z_]\w*)")


def names_of(source):
    """Pairs of module and name in one file."""
    tree = ast.parse(source)
    aliases = {f"{CORE}.{module}": module for module in MODULES} | {f"{CORE}.mpu": "parallel_state"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {one.asname: aliases[one.name] for one in node.names if one.asname and one.name in aliases}
        if isinstance(node, ast.ImportFrom) and node.module == CORE:
            for one in node.names:
                if f"{CORE}.{one.name}" in aliases:
                    aliases[one.asname or one.name] = aliases[f"{CORE}.{one.name}"]
        if isinstance(node, ast.ImportFrom) and node.module in aliases:
            yield from ((aliases[node.module], one.name) for one in node.names if one.name != "*")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := aliases.get(ast.unparse(node.value))):
            yield module, node.attr
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, name in _IN_TEXT.findall(node.value):
                yield module or "parallel_state", name
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            # getattr(mpu, "_X"), monkeypatch.setattr(mpu, "get_x", ...), patch.object(mpu, "get_x")
            yield from (
                (module, str(node.args[1].value)) for module in [aliases.get(ast.unparse(node.args[0]))] if module
            )


def defined_in(file):
    """The names that a module defines or imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = {getattr(node, "name", None) for node in ast.walk(tree)}
    return named | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def main(sources):
    """The names of every checkout."""
    found, defined = {}, {}
    for source in sources:
        repository, _, where = source.partition("=")
        folder, _, commit = where.partition("@")
        defined = defined or {module: defined_in(Path(folder) / f"megatron/core/{module}.py") for module in MODULES}
        taken = {module: set() for module in MODULES}
        for file in Path(folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if CORE in text:
                for module, name in names_of(text):
                    if not name.startswith("__"):
                        taken[module].add(name)
        found[repository] = {"commit": commit, **{m: sorted(taken[m] & defined[m]) for m in MODULES},
                             "undefined": sorted(name for m in MODULES for name in taken[m] - defined[m])}  # fmt: skip
    print(json.dumps(found, indent=1))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
