r"""Findings of layouts that cannot run, in the scripts and configs of a folder; nothing is run.

A finding is an error of the readers that has a ``code``, a size that does not divide what is known of the model, or a
number of nodes or GPUs that Slurm, a manifest or an engine contradicts. A file that states no layout has no findings;
one that cannot be read has a note. Each run of a script, and of a container, is checked.

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
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Invalid, Unreadable, parse_json, read_text, refused_as
from rankmesh.core.grouped import grouped
from rankmesh.core.source import RECIPES
from rankmesh.errors import PlanError, RankmeshError
from rankmesh.readers import slurm
from rankmesh.readers.config import NO_WORLD, Config, is_script, plan_of, read_config, read_launch
from rankmesh.readers.containers import Container, has_containers, is_dockerfile, read_containers
from rankmesh.readers.families import counts
from rankmesh.readers.megatron import FLAGS
from rankmesh.readers.models import named_counts
from rankmesh.readers.reading import NO_LAYOUT, Entry, run_it
from rankmesh.readers.run import Run, runs_of, slurm_variables
from rankmesh.readers.script import read_script

__all__ = ["CODES", "Finding", "Linted", "lint_files", "lint_text"]

CODES = {
    "sizes": "the sizes do not fit the world size or each other",
    "contradiction": "a size is set twice, to different values",
    "nodes": "the launcher and Slurm, or the manifest of its pods, have different node counts",
    "gpus": "a node has fewer GPUs than ranks",
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
# A file in lower case without one of these words, or a short name of an axis, states no layout.
_HINTS = ["parallel", "torchrun", "torch.distributed", "deepspeed", "zero_optimization", "fsdp", "num_processes"]
_HINTS += ["sglang", "vllm", "nnodes", "nproc_per_node", "accelerate launch"]
_AXIS = re.compile(r"[cdept]p(?<![a-z][cdept]p)(?![a-z])")
_IGNORED = re.compile(r"^(.*?)#\s*rankmesh:\s*ignore(?:\[([\w\s,-]*)\])?\s*$", re.MULTILINE)
_RAY = re.compile(r"(?<![\w-])ray(?![\w-])|multi-node-serving")
# The sizes that a fix changes if it can: of experts, and of SGLang's attention.
_CHANGED_FIRST = {"ep", "attn_dp", "attn_cp", "dcp"}
# A world that is assumed; sizes that are proposed, and how many are tried.
_LARGEST_WORLD, _LARGEST_SIZE, _TRIED = 1 << 20, 1 << 14, 16

# What a size divides: the names in configs and scripts, each without dashes. A size of heads of keys may be larger.
_HEADS = ("num_attention_heads",)
_KEYS = ("num_query_groups", "num_key_value_heads")
_EXPERTS = ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("num_layers", "num_hidden_layers")
# What names the model: options, and keys of verl and NeMo-RL.
_MODELS = {"model", "model_path", "model_name_or_path", "base_model", "hf_checkpoint", "policy.model_name"}
_MODELS |= {"actor_rollout_ref.model.path", "model.path"}
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

    def to_dict(self) -> dict[str, object]:
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
        if not named and not text.startswith("#!") and not Path(file).suffix and not is_dockerfile(file):
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
            if (file.suffix in _ENDINGS or is_dockerfile(name)) and not name.startswith(".") and not file.is_symlink():
                yield str(file)


def lint_text(text: str, path: str) -> Linted:
    """Check one text; ``path`` is for messages, and for the files that the text names beside it."""
    lowered = text.lower()
    if not any(hint in lowered for hint in _HINTS) and not _AXIS.search(lowered):
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
    """Check each run of a script or of containers, else the one layout of a file."""
    runs: list[tuple[Run, Container | None]] = []
    try:
        with refused_as(PlanError, path, "give a file that can be read", path=path):
            if has_containers(text, path):
                contained = read_containers(text, path)
                runs = [(run, each) for each in contained for run in runs_of(each.script, path, FLAGS)]
            elif is_script(text, path):
                runs = [(run, None) for run in runs_of(read_script(text, slurm_variables(text)), path, FLAGS)]
    except PlanError as error:
        return Linted(notes=(str(error),))
    if not runs and not is_dockerfile(path) and not is_script(text, path):
        return _of_layout(lambda world: read_config(text, path, world_size=world), path)[0]
    asked = slurm.counts(text) if len(runs) == 1 and "hetjob" not in text else {}
    found = [_of_run(run, container, asked, path) for run, container in runs]
    # What leaders and workers share is found once.
    findings: dict[tuple[int | None, str], Finding] = {}
    for finding in (finding for each in found for finding in each.findings):
        findings.setdefault((finding.line, finding.code), finding)
    return Linted(tuple(findings.values()), tuple(dict.fromkeys(note for each in found for note in each.notes)))


def _of_run(run: Run, container: Container | None, asked: Mapping[str, tuple[int, int]], path: str) -> Linted:
    """Check one run. What a container leaves open its image or its user may set: a note."""

    def read(world: int | None) -> Config:
        with refused_as(PlanError, path, run_it(path), path=path):
            return read_launch(run, path, world_size=world)

    found, config = _of_layout(read, path)
    machine = _machine(run, container, asked)
    findings = [*found.findings, *_of_counts(run, machine, path)]
    findings += _of_engine(run, config, machine) if config and config.format in ("vllm", "sglang") else []
    left_open = [each for each in findings if container and each.code == "unset-variable" and "$(" not in each.message]
    notes = tuple(str(each) for each in left_open)
    return Linted(tuple(each for each in findings if each not in left_open), found.notes + notes)


def _of_layout(read: Callable[[int | None], Config], path: str) -> tuple[Linted, Config | None]:
    """Check a layout; without a world size, again for one that any sizes divide, so that the model is checked."""
    notes: tuple[str, ...] = ()
    try:
        config = read(None)
    except PlanError as error:
        code = error.values.get("code")
        if code == NO_LAYOUT or isinstance(error.__cause__, Invalid):
            return Linted(), None
        if code in CODES:
            return Linted((_of_error(error, path),)), None
        if code != NO_WORLD:
            return Linted(notes=(str(error),)), None
        sizes: Any = error.arguments
        notes = (str(error),) if error.runs else ()
        try:
            world = prod(each for each in sizes.values() if type(each) is int)
            config = read(min(world, _LARGEST_WORLD))
        except PlanError:
            return Linted(notes=notes), None
        return Linted(tuple(_of_model(config, known=False)), notes), config
    return Linted(tuple(_of_model(config, known=True)), notes), config


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
    world = arguments["world_size"] or prod(value for value in arguments.values() if type(value) is int)
    for name in sorted(arguments, key=lambda name: name not in _CHANGED_FIRST):
        value = arguments[name]
        if name != "world_size" and type(value) is int:
            for smaller in _smaller(value, world):
                if _is_plan(recipe, {**arguments, name: smaller}):
                    return f"{name}={smaller}"
    return None


def _smaller(value: int, number: int) -> list[int]:
    """Return up to 16 divisors of a number that are smaller than a value, the largest first; 1 only beside 2."""
    tried = range(min(value - 1, number, _LARGEST_SIZE), 0 if value == 2 else 1, -1)
    return list(islice((each for each in tried if number % each == 0), _TRIED))


def _is_plan(recipe: str, arguments: Mapping[str, object]) -> bool:
    try:
        plan_of(recipe, arguments)
    except RankmeshError:
        return False
    return True


def _line(line: object) -> int | None:
    return line if isinstance(line, int) and line else None


# -- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check:
    """A size that divides a count of the model: its argument, the count, and the names that files have for it."""

    code: str
    argument: str
    count: str
    names: Sequence[str]
    either: bool = False  # or the count divides the size: what it counts is copied

    def fits(self, size: int, count: int) -> bool:
        return count % size == 0 or (self.either and size % count == 0)


def _checks(config: Config, stated: Iterable[str]) -> Iterator[_Check]:
    """Yield the rules of the program that has the layout.

    vLLM and SGLang take uneven stages, vLLM also uneven experts; verl's Ulysses cuts heads.
    """
    for argument in ("tp", "sp") if config.format == "verl" else ("tp",):
        yield _Check("heads", argument, "heads", _HEADS)
        yield _Check("heads", argument, "kv_heads", _KEYS, either=True)
    if not any("redundant_experts" in name for name in stated):
        yield _Check("experts", "ep", "experts", _EXPERTS)
    # What is unknown may make the stages uneven.
    if config.format == "megatron" and not any(_UNEVEN.search(name) or name[:1] in "$`" for name in stated):
        yield _Check("layers", "pp", "layers", _LAYERS)


def _of_model(config: Config, *, known: bool) -> Iterator[Finding]:
    """Yield each size that does not divide what is known of the model; ``known``: the world size is stated."""
    stated = grouped((entry.name, entry) for entry in config.stated)
    given = dict(config.arguments)
    if not any(reading.argument == "world_size" for reading in config.readings):
        given["world_size"] = None  # it follows from the sizes
    model: tuple[Entry, dict[str, int]] | None = None
    for check in _checks(config, stated):
        reading = next((each for each in config.readings if each.argument == check.argument), None)
        if reading is None:
            continue
        found = [entry for name in check.names for entry in stated.get(name, ())]
        counted, what = _counted(found), ""
        if not found:
            model = model or _model(config)
            if (known_count := model[1].get(check.count)) is not None:
                what = f" of {model[0].value}"
                counted = Entry((check.names[-1],), str(known_count), model[0].line)
        shares = _attention(config) if check.code == "heads" else 1
        size = config.arguments.get(check.argument, 1) // shares
        if counted is not None and not check.fits(size, count := int(counted.first)):
            name = f"{size} ({reading.single} over {shares} replicas)" if shares > 1 else reading.single
            line = f" (line {counted.line})" if counted.line else ""
            message = f"{name} does not divide {counted.single}{what}{line}"
            tried = [each * shares for each in _smaller(size, count)]
            sizes = (each for each in tried if not known or _is_plan(config.recipe, {**given, check.argument: each}))
            fix = next((f"{check.argument}={each}" for each in sizes), None)
            layout = _spec(config) if known else None
            yield Finding(config.path, _line(reading.line), check.code, message, fix, layout)
            return


def _attention(config: Config) -> int:
    """Return among how many replicas of attention SGLang shares its tensor parallel ranks."""
    return prod(config.arguments.get(name, 1) for name in ("attn_dp", "attn_cp")) if config.format == "sglang" else 1


def _model(config: Config) -> tuple[Entry, dict[str, int]]:
    """Return what names the model, and its counts: of its folder, its name, else of the folder of the file."""
    keys = [(entry.key.lstrip("-").replace("-", "_"), entry) for entry in config.stated]
    named = [entry for key, entry in keys if key in _MODELS and isinstance(entry.first, str)]
    folder = Path(config.path).parent
    if not named:
        return Entry((), "config.json", 0), _counts_of(folder)
    entry = named[0].single
    return entry, _counts_of(folder / entry.value) or named_counts(entry.value)


def _counts_of(folder: Path) -> dict[str, int]:
    """Return the counts of the model in a folder, none where it has no ``config.json`` of one."""
    try:
        data = parse_json(read_text(folder / "config.json", _LARGEST))
    except Unreadable:
        return {}
    return counts(data) if isinstance(data, dict) and {"model_type", "architectures"} & data.keys() else {}


def _counted(found: Sequence[Entry]) -> Entry | None:
    """Return what states a count of the model; None where it is not a number or parts have different ones."""
    numbers = {str(entry.first) for entry in found}
    return found[0] if len(numbers) == 1 and re.fullmatch(r"[1-9]\d{0,8}", numbers.pop()) else None


def _spec(config: Config) -> str | None:
    """Return the layout of a config as a SPEC, None for a recipe that no SPEC names."""
    sizes = {"world": config.plan.world_size, **config.arguments}
    words = ",".join(f"{name}={value}" for name, value in sizes.items() if name != "world_size")
    return f"{config.recipe}:{words}" if config.recipe in RECIPES else None


# -- nodes and GPUs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Machine:
    """What Slurm or a manifest gives a run: the numbers of nodes that it may have, and the GPUs of a node.

    ``together``: how many nodes run an engine; None where a cluster of Ray does, or a number that is not known.
    """

    rule: str
    nodes: tuple[Entry, ...]
    gpus: Entry | None
    together: int | None


def _machine(run: Run, container: Container | None, asked: Mapping[str, tuple[int, int]]) -> _Machine:
    def count(name: str, variable: str) -> tuple[Entry, ...]:
        return (Entry((name,), *asked[variable]),) if variable in asked else ()

    nodes, gpus = count("nodes", "SLURM_NNODES"), next(iter(count("GPUs", "SLURM_GPUS_ON_NODE")), None)
    rule, together = "asks Slurm for", nodes[0].value if nodes else 1
    commands = str(run.command)
    if container is not None:
        nodes, gpus = tuple(replace(each, path=("pods",)) for each in container.pods), container.gpus
        rule, together = "makes", container.group
        commands = " ".join(map(str, container.script.commands))
    if run.nodes is not None:
        together = run.nodes.value
    elif "--nnodes" in commands or (together == 1 and _RAY.search(commands)):
        return _Machine(rule, nodes, gpus, None)
    return _Machine(rule, nodes, gpus, together)


def _of_counts(run: Run, machine: _Machine, path: str) -> Iterator[Finding]:
    """Yield a finding where a launcher is told other nodes than a run has, and where it starts too many ranks."""
    nodes, ranks, gpus = run.nodes, run.ranks_of_node, machine.gpus
    of_step = {entry.first for entry in run.arguments if entry.key in ("-N", "--nodes")}
    of_pod = nodes is not None and nodes.value == 1 and machine.rule == "makes"  # a run in each
    if nodes is not None and machine.nodes and str(nodes.value) not in of_step and not of_pod:
        each = machine.nodes[-1]
        if all(count.value != nodes.value for count in machine.nodes):
            message = f"{nodes}; line {each.line} {machine.rule} {each.value} {each.key}"
            yield Finding(path, _line(nodes.line), "nodes", message, f"{nodes.key} {each.value}")
    if gpus is not None and ranks is not None and ranks.value > gpus.value:
        message = f"{ranks}; a node has {gpus.value} GPUs (line {gpus.line})"
        yield Finding(path, _line(ranks.line), "gpus", message, f"{ranks.key} {gpus.value}")


def _of_engine(run: Run, config: Config, machine: _Machine) -> Iterator[Finding]:
    """Yield a finding where an engine has more ranks than GPUs, or SGLang ranks that its nodes do not share evenly."""
    sizes = {name: config.arguments[name] for name in ("tp", "pp", "pcp") if name in config.arguments}
    ranks, size = prod(sizes.values()), max(sizes, key=lambda name: sizes[name], default="")
    line = next((each.line for each in config.readings if each.argument == size), run.command.line)
    product = " x ".join(f"{name} {count}" for name, count in sizes.items()) + f" = {ranks} ranks"
    nodes, gpus = run.nodes, machine.gpus
    if config.format == "sglang" and nodes is not None and "tp" in sizes and ranks % nodes.value:
        message = f"{nodes} does not divide {product} (line {line})"
        yield Finding(config.path, _line(nodes.line), "nodes", message)
    elif gpus is not None and machine.together and ranks > gpus.value * machine.together:
        where = f"{machine.together} nodes have {gpus.value}" if machine.together > 1 else f"a node has {gpus.value}"
        smaller, rest = divmod(gpus.value * machine.together * sizes[size], ranks)
        fix = f"{size}={smaller}" if smaller and not rest else None
        yield Finding(config.path, _line(line), "gpus", f"{product}, but {where} GPUs (line {gpus.line})", fix)
