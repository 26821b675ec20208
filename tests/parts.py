"""The parts of the package, as pyproject.toml states them: their arrows, their picture, and the tests of each.

python -m tests.parts               write the table and the picture of docs/inside.md
python -m tests.parts kernel -q     run the tests of a part; of the package, only what it may import can be found
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import rankmesh
from rankmesh.core.documents import parse_toml

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "rankmesh"
PAGE, PICTURE = REPOSITORY / "docs" / "inside.md", REPOSITORY / "docs" / "images" / "parts.svg"
# The middle of each part in the picture.
PLACES = {"peers": (60, 50), "survive": (300, 50), "sim": (540, 50), "plan": (660, 50), "transfer": (180, 140),
          "debug": (420, 140), "kernel": (360, 230)}  # fmt: skip

# Folders of tests that run other systems, or programs of the repository that need several parts.
OF_NO_PART = ("bench", "examples", "peers")


class Part(NamedTuple):
    """Modules below ``rankmesh``, and the parts that they may import beside their own."""

    modules: tuple[str, ...]
    may: tuple[str, ...]


def parts(stated=None):
    """The parts by name, of lines such as ``survive (kernel debug): survival guard``."""
    if stated is None:
        tool = parse_toml((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        stated = next(one["parts"] for one in tool["importlinter"]["contracts"] if one["type"] == "parts")
    lines = [re.fullmatch(r"(\w+)(?: \((.*)\))?: (.*)", line).groups("") for line in stated]
    return {name: Part(tuple(modules.split()), tuple(may.split())) for name, may, modules in lines}


def part_of(module, known):
    """The part of a module, by the longest name that a part has; None of the package itself."""
    words = module.split(".")[1:]
    prefixes = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    found = [name for prefix in prefixes for name, part in known.items() if prefix in part.modules]
    assert found or not words, f"{module} is in no part; name it in pyproject.toml"
    return found[0] if found else None


def is_wrong(importer, imported, known):
    """Whether a module may not import another one."""
    one, other = part_of(importer, known), part_of(imported, known)
    return one != other and None not in (one, other) and other not in known[one].may


def module_of(path):
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports():
    """Each import of one module by another, in functions and for types too, once for each name."""
    paths, found = {module_of(path): path for path in SOURCE.rglob("*.py")}, []
    for importer, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [(importer, name.name) for name in node.names if name.name in paths]
            elif isinstance(node, ast.ImportFrom) and node.module in paths:
                full = [f"{node.module}.{name.name}" for name in node.names]
                found += [(importer, name if name in paths else node.module) for name in full]
    return found


def arrows(known):
    """How many imports lead from one part to another."""
    found = Counter((part_of(one, known), part_of(other, known)) for one, other in imports())
    return {pair: count for pair, count in found.items() if pair[0] != pair[1] and None not in pair}


def table(known):
    """The parts as a table of the page."""
    rows = [f"| {name} | {', '.join(part.modules)} | {', '.join(part.may)} |" for name, part in known.items()]
    return "\n".join(("| part | packages | may import |", "| --- | --- | --- |", *rows))


def picture(counts):
    """The arrows as SVG, with how many imports each stands for, but for those of the surface."""
    drawn = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 270" font-family="sans-serif" font-size="13">',
             '<rect width="100%" height="100%" fill="#fff"/><defs><marker id="tip" orient="auto" refX="8" refY="4">',
             '<path d="M0 0L8 4L0 8z"/></marker></defs>']  # fmt: skip
    for (one, other), count in sorted(pair for pair in counts.items() if pair[0][0] in PLACES):
        (left, top), low = PLACES[one], PLACES[other][1] - 20
        right = left if other == "kernel" else PLACES[other][0]
        ends = f'x1="{left}" y1="{top + 20}" x2="{right}" y2="{low}"'
        drawn += [f'<line {ends} stroke="#44506a" marker-end="url(#tip)"/>',
                  f'<text x="{(left + 2 * right) / 3 + 5}" y="{low - 12}" font-size="11">{count}</text>']  # fmt: skip
    for name, (x, y) in PLACES.items():
        wide = 700 if name == "kernel" else 96
        drawn += [f'<rect x="{x - wide / 2}" y="{y - 20}" width="{wide}" height="40" rx="6" fill="#dde6f5"/>',
                  f'<text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>']  # fmt: skip
    return "\n".join((*drawn, "</svg>\n"))


def needs(path):
    """The parts that a file of tests needs, with its conftest and the files of tests that these import."""
    files, left = set(), [path, path.with_name("conftest.py")]
    while left:
        one = left.pop()
        if one not in files and one.is_file():
            files.add(one)
            for module, names in re.findall(
                r"^from ((?:tests|bench)[\w.]*) import (.+)", one.read_text("utf-8"), re.MULTILINE
            ):
                named = (module, *(f"{module}.{name}" for name in names.split(", ")))
                left += [REPOSITORY.joinpath(*name.split(".")).with_suffix(".py") for name in named]
    return set().union(*map(_named, files)) - {None}


@cache
def _named(path):
    """The parts that a file names, in whatever text; an example may need all."""
    known, text, where = parts(), path.read_text(encoding="utf-8"), {**rankmesh._LAZY, **rankmesh._LIVE}
    if re.search(r"^from examples\.", text, re.MULTILINE):
        return {*known}
    imported = ",".join(re.findall("from rankmesh import (.+)", text))
    public = [*re.findall(r"\brm\.(\w+)", text), *re.findall(r"\w+", imported)]
    named = [where.get(name, f"rankmesh.{name}").partition(":")[0] for name in public]
    named += re.findall(r"\brankmesh(?:\.\w+)+", text) + ["rankmesh.cli"] * ('"-m", "rankmesh"' in text)
    return {part_of(_module(name), known) for name in named}


def _module(name):
    """The module that a dotted name begins with; what the package itself has is the core's."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    found = path.is_dir() or path.with_suffix(".py").is_file()
    return "rankmesh.core" if path == SOURCE else name if found else _module(name.rpartition(".")[0])


def run(name, words):
    """Run the tests that need this part and at most what it may import, where nothing else of the package is.

    Those that simulate ranks have the simulator beside it, unless that stands on this part.
    """
    known = parts()
    allowed = {name, *known[name].may}
    beside = allowed if name in known["sim"].may else {"sim", *known["sim"].may} | allowed
    files = [path for path in sorted(REPOSITORY.glob("tests/*/**/test_*.py")) if path.parent.name not in OF_NO_PART]
    files = [path for path in files if name in needs(path) <= beside]
    narrow, wide = ([path for path in files if (needs(path) <= allowed) == inside] for inside in (True, False))
    return _run(name, allowed, narrow, words) or _run(f"{name}-sim", beside, wide, words)


def _run(name, allowed, files, words):
    """Run tests, of which each finds only these parts of the package."""
    root = REPOSITORY / "build" / "parts" / name
    shutil.rmtree(root, ignore_errors=True)
    for path in (one for one in SOURCE.rglob("*.*") if one.parent.name != "__pycache__"):
        if part_of(module_of(path if path.suffix == ".py" else path.parent), parts()) in {*allowed, None}:
            link = root / path.relative_to(SOURCE.parent)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    without = [] if "sim" in allowed else ["-p", "no:rankmesh"]
    command = [sys.executable, "-m", "pytest", "-m", "not long", *without, *words, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode if files else 0


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    PICTURE.write_text(picture(arrows(parts())), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"\| part \|[^!]*\n", lambda _: table(parts()) + "\n\n", text, count=1), encoding="utf-8")
