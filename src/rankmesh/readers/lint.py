r"""Findings of layouts that cannot run, in the scripts and configs of a folder; nothing is run.

A finding is an error of the readers that has a ``code``, or a size that does not divide what the same file states of
the model. A file that states no layout has no findings; one that cannot be read has a note.

```
# rankmesh: ignore[heads,layers]        after a line: of this line; on a line of its own: of the whole file
# rankmesh: ignore                      every code
```

>>> linted = lint_text("dp: 2\ntensor_model_parallel_size: 3\nnum_attention_heads: 32\n", "run.yaml")
>>> print(linted.findings[0])
run.yaml:2: heads tensor_model_parallel_size = 3 does not divide num_attention_heads = 32 (line 3); fix: tp=2
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Invalid, Unreadable, read_text
from rankmesh.core.source import RECIPES
from rankmesh.errors import PlanError, RankmeshError
from rankmesh.readers import slurm
from rankmesh.readers.config import NO_WORLD, Config, plan_of, read_config
from rankmesh.readers.reading import NO_LAYOUT, Entry, Reading

__all__ = ["CODES", "Finding", "Linted", "lint_files", "lint_text"]

CODES = {
    "sizes": "the sizes do not fit the world size or each other",
    "contradiction": "a size is set twice, to different values",
    "nodes": "the launcher and Slurm have different node counts",
    "unset-variable": "a size is a variable that the file does not set",
    "unknown-size": "a setting looks like a parallel size, and is not one",
    "not-a-size": "a parallel size is not a whole number of at least 1",
    "heads": "the tensor parallel size does not divide the attention heads",
    "experts": "the expert parallel size does not divide the experts",
    "layers": "the pipeline parallel size does not divide the layers",
}

_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".json", ".args", "")
_LARGEST = 256 << 10
_MOST_FILES = 100_000
_FOREIGN = {"node_modules", "__pycache__", "venv"}
# A file without one of these words states no layout.
_HINT = re.compile(
    r"parallel|torchrun|torch\.distributed|deepspeed|zero_optimization|fsdp|num_processes|sglang|vllm"
    r"|(?<![a-zA-Z])(tp|pp|dp|cp|ep)(_size)?(?![a-zA-Z])",
    re.IGNORECASE,
)
_IGNORED = re.compile(r"^(.*?)#\s*rankmesh:\s*ignore(?:\[([\w\s,-]*)\])?\s*$", re.MULTILINE)
_NODES = re.compile(r"(?:--nnodes|--num_nodes|PET_NNODES) (\d+)")
# A world that is assumed; sizes that are proposed, and how many are tried.
_LARGEST_WORLD, _LARGEST_SIZE, _TRIED = 1 << 20, 1 << 14, 16

# What a size divides: the names in configs and scripts, each without dashes. A size of heads of keys may be larger.
_HEADS = ("num_attention_heads",)
_KEYS = ("num_query_groups", "num_key_value_heads")
_EXPERTS = ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("num_layers", "num_hidden_layers")
# Arguments with which stages have different numbers of layers.
_UNEVEN = re.compile(
    r"(first|last)_pipeline|pipeline_model_parallel_layout|account_for|pipeline_split|mtp_num_layers|num_layer_list|noop_layers"
)


@dataclass(frozen=True)
class Finding:
    """A layout that cannot run. ``fix``: the size that would do; ``layout``: the file's as a SPEC, if it is one."""

    file: str
    line: int | None
    code: str
    message: str
    fix: str | None = None
    layout: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.code} {self.message}" + (f"; fix: {self.fix}" if self.fix else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with stable keys."""
        return {name: getattr(self, name) for name in ("file", "line", "code", "message", "fix", "layout")}


@dataclass(frozen=True)
class Linted:
    """What was found in one file or in several; ``notes``: why a file is not checked, or only in part."""

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def lint_files(paths: Iterable[str | os.PathLike[str]]) -> Linted:
    """Check files, and the files of folders, in the order of their names.

    Folders and files whose names begin with a dot are left out, and so are symbolic links. Raises ``PlanError`` for
    a path that does not exist, and for more than 100,000 files.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    for file, named in _files(paths).items():
        try:
            text = read_text(file, _LARGEST)
        except Unreadable as error:
            notes += [f"{file} {error}; not checked"] if named else []
            continue
        if not named and not text.startswith("#!") and not Path(file).suffix:
            continue  # a page or a program's data
        found = lint_text(text, file)
        findings += found.findings
        notes += found.notes
    return Linted(tuple(findings), tuple(notes))


def _files(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bool]:
    """Return the files to check, each with whether it was named: others are chosen by their names' endings."""
    found: dict[str, bool] = {}
    for path in [os.fspath(path) for path in paths]:
        if Path(path).is_dir():
            found |= {file: False for file in _walked(path) if file not in found}
        elif Path(path).exists():
            found[path] = True
        else:
            raise PlanError(f"there is no file or folder {path}; give one that exists", path=path)
        if len(found) > _MOST_FILES:
            raise PlanError(
                f"{path} has more than {_MOST_FILES:,} files to check; name folders inside of it", path=path
            )
    return found


def _walked(folder: str) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _FOREIGN)
        for name in sorted(names):
            file = Path(at, name)
            if file.suffix in _ENDINGS and not name.startswith(".") and not file.is_symlink():
                yield str(file)


def lint_text(text: str, path: str) -> Linted:
    """Check one text; ``path`` is for messages, and for the files that the text names beside it."""
    if not _HINT.search(text):
        return Linted()
    found = _read(text, path)
    of_lines, of_file = _ignored(text)
    return Linted(
        tuple(each for each in found.findings if each.code not in of_file | of_lines.get(each.line or 0, set())),
        found.notes,
    )


def _ignored(text: str) -> tuple[dict[int, set[str]], set[str]]:
    """Return the codes that are ignored, by lines and in the whole file."""
    lines: dict[int, set[str]] = {}
    whole: set[str] = set()
    for found in _IGNORED.finditer(text):
        codes = set(CODES) if found[2] is None else {code.strip() for code in found[2].split(",")}
        if found[1].strip():
            lines[text.count("\n", 0, found.start()) + 1] = codes
        else:
            whole |= codes
    return lines, whole


def _read(text: str, path: str) -> Linted:
    """Read a text; without a world size, again for one that any sizes divide, so that the model is checked."""
    notes: tuple[str, ...] = ()
    try:
        config = read_config(text, path)
    except PlanError as error:
        code = error.values.get("code")
        if code == NO_LAYOUT or isinstance(error.__cause__, Invalid):
            return Linted()
        if code in CODES:
            return Linted((_of_error(error, path),))
        if code != NO_WORLD:
            return Linted(notes=(str(error),))
        sizes: Any = error.arguments
        notes = (str(error),) if error.runs else ()
        try:
            world = prod(each for each in sizes.values() if type(each) is int)
            config = read_config(text, path, world_size=min(world, _LARGEST_WORLD))
        except PlanError:
            return Linted(notes=notes)
        return Linted(tuple(_of_model(config, known=False)), notes)
    return Linted((*_of_model(config, known=True), *_of_nodes(config, text)), notes)


def _of_error(error: PlanError, path: str) -> Finding:
    """Return the finding of an error; of one about sizes, at the line of the size that its fix changes."""
    values: Any = error.values
    message, line, fix = str(error), values.get("line"), values.get("fix")
    if values["code"] == "sizes":
        message = str(error.__cause__)
        fix = _fitting(values["recipe"], values["arguments"])
        changed = fix.partition("=")[0].replace("etp", "ep") if fix else "world_size"
        places = {reading.argument: reading.line for reading in values["readings"]}
        line = places.get(changed, next(iter(places.values()), None))
    for prefix in (f"{path}:{line}: ", f"{path}: "):
        message = message.removeprefix(prefix)
    return Finding(path, _line(line), values["code"], message, fix)


def _fitting(recipe: str, arguments: Mapping[str, Any]) -> str | None:
    """Return one changed size with which there is a plan, as ``ep=4``; sizes of experts are tried first."""
    if recipe == "megatron" and "ep" in arguments and "etp" not in arguments:
        arguments = {"etp": arguments.get("tp", 1), **arguments}  # its default, by which experts often do not fit
        if _is_plan(recipe, {**arguments, "etp": 1}):
            return "etp=1"
    for name in sorted(arguments, key=lambda name: name != "ep"):
        value, world = arguments[name], arguments["world_size"]
        if name != "world_size" and type(value) is int and world:
            for smaller in _smaller(value, world):
                if _is_plan(recipe, {**arguments, name: smaller}):
                    return f"{name}={smaller}"
    return None


def _smaller(value: int, number: int) -> list[int]:
    """Return up to 16 divisors of a number that are smaller than a value, the largest first; 1 only beside 2."""
    tried = range(min(value - 1, number, _LARGEST_SIZE), 0 if value == 2 else 1, -1)
    return list(islice((each for each in tried if number % each == 0), _TRIED))


def _is_plan(recipe: str, arguments: Mapping[str, Any]) -> bool:
    try:
        plan_of(recipe, arguments)
    except RankmeshError:
        return False
    return True


def _line(line: Any) -> int | None:
    return line if isinstance(line, int) and line else None


# -- the model ------------------------------------------------------------------------------------------------------


def _of_model(config: Config, *, known: bool) -> Iterator[Finding]:
    """Yield each size that does not divide what the file states of its model; ``known``: the world size is stated."""
    stated: dict[str, list[Entry]] = {}
    for entry in config.stated:
        stated.setdefault(entry.path[-1].lstrip("-").replace("-", "_"), []).append(entry)
    given = dict(config.arguments)
    if not any(reading.argument == "world_size" for reading in config.readings):
        given["world_size"] = None  # it follows from the sizes
    checks: list[tuple[str, str, Sequence[str], Callable[[int, int], bool]]] = [
        ("heads", "tp", _HEADS, lambda size, count: count % size == 0),
        ("heads", "tp", _KEYS, lambda size, count: count % size == 0 or size % count == 0),
        ("experts", "ep", _EXPERTS, lambda size, count: count % size == 0),
    ]
    if config.format == "megatron" and not any(map(_UNEVEN.search, stated)):
        checks.append(("layers", "pp", _LAYERS, lambda size, count: count % size == 0))
    for code, argument, names, fits in checks:
        size = config.arguments.get(argument, 1)
        reading = next((each for each in config.readings if each.argument == argument), None)
        counted = _counted([entry for name in names for entry in stated.get(name, ())])
        if reading is not None and counted is not None and not fits(size, count := int(counted.first)):
            message = f"{_text(reading)} does not divide {_text(counted)} (line {counted.line})"
            tried = _smaller(size, count)
            sizes = (each for each in tried if not known or _is_plan(config.recipe, {**given, argument: each}))
            fix = next((f"{argument}={each}" for each in sizes), None)
            yield Finding(config.path, _line(reading.line), code, message, fix, _spec(config) if known else None)
            return


def _counted(found: Sequence[Entry]) -> Entry | None:
    """Return what states a count of the model; None where it is not a number or parts have different ones."""
    numbers = {str(entry.first) for entry in found}
    return found[0] if len(numbers) == 1 and re.fullmatch(r"[1-9]\d{0,8}", numbers.pop()) else None


def _text(entry: Entry) -> str:
    return str(Entry(entry.path, entry.first, entry.line))


def _spec(config: Config) -> str | None:
    """Return the layout of a config as a SPEC, None for a recipe that no SPEC names."""
    sizes = {"world": config.plan.world_size, **config.arguments}
    words = ",".join(f"{name}={value}" for name, value in sizes.items() if name != "world_size")
    return f"{config.recipe}:{words}" if config.recipe in RECIPES else None


def _of_nodes(config: Config, text: str) -> Iterator[Finding]:
    """Yield a finding where the launcher has another number of nodes than the ``#SBATCH`` lines."""
    world: Reading | None = next((each for each in config.readings if each.argument == "world_size"), None)
    stated = _NODES.search(world.key) if world is not None else None
    nodes = slurm.counts(text).get("SLURM_NNODES") if stated else None
    if world is not None and stated and nodes is not None and int(stated[1]) != nodes[0]:
        rule = f"line {nodes[1]} asks Slurm for {nodes[0]} nodes"
        fix = stated[0].replace(stated[1], str(nodes[0]))
        yield Finding(config.path, _line(world.line), "nodes", f"{world}; {rule}", fix, _spec(config))
