r"""Findings of layouts that cannot run, in the scripts and configs of a folder; nothing is run.

A finding is an error of the readers that has a ``code``, a size that does not divide what is known of the model, or a
number of nodes or GPUs that Slurm, a manifest or an engine contradicts. A file that states no layout has no findings;
one that cannot be read has a note. Each run of a script, and of a container, is checked.

```
# rankmesh: ignore[heads,layers]        after a line: of this line; on a line of its own: of the whole file
# rankmesh: ignore                      every code
```

>>> linted = lint_text("dp: 2\ntensor_model_parallel_size: 3\nnum_attention_heads: 32\n", "run.yaml")
>>> print(linted.findings[0])  # doctest: +NORMALIZE_WHITESPACE
run.yaml:2: heads tensor_model_parallel_size = 3 does not divide num_attention_heads = 32 (line 3);
fix: tensor_model_parallel_size: 2
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Invalid, Unreadable, parse_json, read_text, refused_as
from rankmesh.core.explain import arithmetic
from rankmesh.core.source import RECIPES
from rankmesh.errors import PlanError, cut
from rankmesh.readers.config import NO_WORLD, Config, is_script, made, problem_of, read_config
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.launches import launches_of, slurm_variables
from rankmesh.readers.models import counts, named_counts
from rankmesh.readers.options import DOCUMENTS, NO_LAYOUT, Option, Options, gathered, run_it
from rankmesh.readers.plans import fitting, is_plan, smaller, spelled, written
from rankmesh.readers.script import read_script
from rankmesh.readers.table import Reading, Table
from rankmesh.readers.tokens import shown
from rankmesh.readers.tools import slurm
from rankmesh.readers.tools.containers import Container, has_containers, is_dockerfile, read_containers

__all__ = ["CODES", "Finding", "Linted", "lint_files", "lint_text"]

CODES = {
    "sizes": "the sizes do not fit the world size or each other",
    "contradiction": "a size is set twice, to different values",
    "nodes": "the launcher and Slurm, or the manifest of its pods, have different node counts",
    "gpus": "a node has fewer GPUs than ranks",
    "batch": "the batch sizes of DeepSpeed do not multiply out",
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
_HINTS += ["train_batch_size", "sglang", "vllm", "nnodes", "nproc_per_node", "accelerate launch"]
_AXIS = re.compile(r"[cdept]p(?<![a-z][cdept]p)(?![a-z])|par[a-z]{3,7}_(\w+_)?(size|degree)")
_IGNORED = re.compile(r"^(.*?)#\s*rankmesh:\s*ignore(?:\[([\w\s,-]*)\])?\s*$", re.MULTILINE)
# An option that is a size, in the command of a container; a key that is one, in a manifest.
_OPTION = re.compile(r"(?<!\S)--?(\w[\w-]*parallel[\w-]*size|tp([-_]size)?|tensor[-_]parallel[-_]degree)(?=[\s=])")
_SIZE_KEY = re.compile(
    r"^[\s-]*[\"']?(\w*(?:(?:tensor|pipeline|data|expert)_?parallel|_PARALLEL_SIZE|parallelism(?=[\"']?:\s*$))\w*)",
    re.MULTILINE | re.IGNORECASE,
)
_KIND = re.compile(r"^kind:\s*[\"']?(\w+)", re.MULTILINE)
_RAY = re.compile(r"(?<![\w-])ray(?![\w-])|multi-node-serving")
_LARGEST_WORLD = 1 << 20  # that is assumed

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
    """A layout that cannot run.

    ``fix``     the size that would do, as in a SPEC (``tp=4``), or what to write; None where no single one does
    ``layout``  the file's as a SPEC, if it is one; ``edit``: the fix as the file writes it (``-tp 4``)
    """

    file: str
    line: int | None
    code: str
    message: str
    fix: str | None = None
    layout: str | None = None
    edit: str | None = None

    @property
    def text(self) -> str:
        """The message with the fix, in the words of the file."""
        fix = self.edit or self.fix
        return self.message + (f"; fix: {fix}" if fix else "")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.code} {self.text}"

    def to_dict(self) -> dict[str, object]:
        """Return plain data with stable keys."""
        return {name: getattr(self, name) for name in ("file", "line", "code", "message", "fix", "layout", "edit")}


@dataclass(frozen=True)
class Linted:
    """Findings of one file or of several; ``notes``: why a file is not checked, or only in part.

    ``valid``: for each layout that fits, the lines that show why.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    valid: tuple[str, ...] = field(default=(), compare=False)


def lint_files(paths: Iterable[str | os.PathLike[str]]) -> Linted:
    """Check files, and the files of folders, in the order of their names.

    Folders and files whose names begin with a dot are left out, and so are symbolic links. Raises ``PlanError`` for
    a path that does not exist, and for more than 100,000 files.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    valid: list[str] = []
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
        valid += found.valid
    return Linted(tuple(findings), tuple(notes), tuple(valid))


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
        found.valid,
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
    runs: list[tuple[Options, Container | None]] = []
    notes: list[str] = []
    try:
        with refused_as(PlanError, path, "give a file that can be read", path=path):
            if has_containers(text, path):
                for each in read_containers(text, path):
                    found_launches = launches_of(each.script, path, FLAGS)
                    runs += [(run, each) for run in found_launches]
                    notes += _ignored_options(each, path) if not found_launches else []
            elif is_script(text, path):
                runs = [(run, None) for run in launches_of(read_script(text, slurm_variables(text)), path, FLAGS)]
    except PlanError as error:
        return Linted(notes=(str(error),))
    if not runs and not is_dockerfile(path) and not is_script(text, path):
        found_here, layout = _of_layout(lambda world: read_config(text, path, world_size=world), path)
        notes = [*found_here.notes, *(notes or _ignored_kinds(text, path))]
        findings_here = (*found_here.findings, *_of_model(layout, _given(layout)))
        return Linted(findings_here, tuple(notes), () if findings_here else found_here.valid)
    asked = slurm.counts(text) if len(runs) == 1 and "hetjob" not in text else {}
    found = [_of_run(run, container, asked, path) for run, container in runs]
    # What leaders and workers share is found once.
    findings: dict[tuple[int | None, str], Finding] = {}
    for finding in (finding for each in found for finding in each.findings):
        findings.setdefault((finding.line, finding.code), finding)
    notes += [note for each in found for note in each.notes]
    valid = tuple(dict.fromkeys(line for each in found if not each.findings for line in each.valid))
    return Linted(tuple(findings.values()), tuple(dict.fromkeys(notes)), valid)


def _ignored_options(container: Container, path: str) -> Iterator[str]:
    """Yield a note for each command of a container that states sizes to a program that is not read."""
    for command in container.script.commands:
        if (option := _OPTION.search(str(command))) is not None:
            words = cut(" ".join(str(command).split()))
            yield f"{path}:{command.line}: {option[0]} is of a program that is not read ({words}); not checked"


def _ignored_kinds(text: str, path: str) -> Iterator[str]:
    """Yield a note for each kind of manifest with keys that name sizes, which are not read."""
    for document in re.split(r"^---.*$", text, flags=re.MULTILINE) if path.endswith((".yaml", ".yml")) else ():
        kind, size = _KIND.search(document), _SIZE_KEY.search(document)
        if kind and size and "apiVersion:" in document and kind[1] != "CustomResourceDefinition":
            yield f"{path}: {size[1]} of a manifest of kind {kind[1]} is not read; not checked"


def _of_run(run: Options, container: Container | None, asked: Mapping[str, tuple[int, int]], path: str) -> Linted:
    """Check one run. What a container leaves open its image or its user may set: a note."""

    def read(world: int | None) -> Config:
        with refused_as(PlanError, path, run_it(path), path=path):
            return made(run, world)

    found, layout = _of_layout(read, path)
    machine, given = _machine(run, container, asked), _given(layout)
    findings = [*_of_counts(run, machine, layout, given, path), *found.findings, *_of_model(layout, given)]
    findings += _of_engine(run, layout, machine, given) if layout and layout.format in ("vllm", "sglang") else []
    left_open = [each for each in findings if container and each.code == "unset-variable" and "$(" not in each.message]
    notes = tuple(str(each) for each in left_open)
    return Linted(tuple(each for each in findings if each not in left_open), found.notes + notes, found.valid)


@dataclass(frozen=True)
class _Layout:
    """A layout as a file states it, whether or not its sizes fit: a ``Config`` without its plan.

    ``known``: the world size is stated; ``problem``: why the sizes do not fit, empty where they do or where a setting
    that cannot be read is left out.
    """

    format: str
    recipe: str
    path: str
    arguments: Mapping[str, Any]
    readings: tuple[Reading, ...]
    stated: tuple[Option, ...]
    table: Table | None
    known: bool = True
    problem: str = ""

    @classmethod
    def of(cls, found: Config | PlanError, *, known: bool, problem: str = "") -> _Layout:
        """Return the layout of a config, or of the error of sizes that do not fit."""
        names = ("format", "recipe", "path", "arguments", "readings", "stated", "table")
        return cls(**{name: getattr(found, name) for name in names}, known=known, problem=problem)

    def spelled(self, argument: str, value: int) -> str | None:
        return spelled(argument, value, self.readings, self.table, self.path)

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        return not self.known or is_plan(self.recipe, arguments)


def _of_layout(read: Callable[[int | None], Config], path: str) -> tuple[Linted, _Layout | None]:
    """Read a layout; each setting that cannot be read is a finding, or a note, and is left out.

    Without a world size it is read again for one that any sizes divide, so that the model is checked.
    """
    found, problems = _read_all(read, None)
    known = not (isinstance(found, PlanError) and found.values.get("code") == NO_WORLD)
    notes: list[str] = []
    if isinstance(found, PlanError) and not known:
        notes += [str(found)] if found.runs else []
        sizes: Any = found.arguments
        world = prod(each for each in sizes.values() if type(each) is int)
        found, _ = _read_all(read, min(world, _LARGEST_WORLD))
    findings = [_of_error(error, path) for error in problems if error.values.get("code") in CODES]
    notes += [str(error) for error in problems if error.values.get("code") not in CODES][:1]
    layout = None
    if isinstance(found, Config):
        layout = _Layout.of(found, known=known)
    elif found.values.get("code") == "sizes":
        problem = problem_of(found.__cause__) if known and not problems else ""
        layout = _Layout.of(found, known=known, problem=problem)
    elif found.values.get("code") in CODES:
        findings.append(_of_error(found, path))
    elif known and not problems and found.values.get("code") != NO_LAYOUT and not isinstance(found.__cause__, Invalid):
        notes.append(str(found))
    valid = tuple(f"{path}: {line}" for line in _valid(found, layout)) if isinstance(found, Config) and layout else ()
    return Linted(tuple(findings), tuple(notes), valid if known else ()), layout


def _valid(found: Config, layout: _Layout) -> Iterator[str]:
    """Yield why a layout is valid, and what of the model is not known, and so not checked."""
    yield from arithmetic(found.plan.mesh)
    checks = [check for check in _checks(layout) if layout.arguments.get(check.argument, 1) > 1]
    unknown = dict.fromkeys(check.code for check in checks if _count(layout, check) is None)
    if unknown:
        yield f"the numbers of {', '.join(unknown)} of the model are not known, and not checked"


def _read_all(read: Callable[[int | None], Config], world: int | None) -> tuple[Config | PlanError, list[PlanError]]:
    """Return a config, or the error that ends its reading, and the errors of the settings that were left out."""
    with gathered() as problems:
        try:
            return read(world), problems
        except PlanError as error:
            return error, problems


def _of_error(error: PlanError, path: str) -> Finding:
    """Return the finding of an error of one setting."""
    values: Any = error.values
    message, line = str(error), values.get("line")
    for prefix in (f"{path}:{line}: ", f"{path}: "):
        message = message.removeprefix(prefix)
    return Finding(path, _line(line), values["code"], message, values.get("fix"))


def _given(layout: _Layout | None) -> dict[str, Any]:
    """Return the arguments of a layout, to which fixes are applied one after the other."""
    given = dict(layout.arguments) if layout else {}
    if layout and not any(reading.argument == "world_size" for reading in layout.readings):
        given["world_size"] = None  # it follows from the sizes
    return given


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


def _checks(layout: _Layout) -> Iterator[_Check]:
    """Yield the rules of the program that has the layout.

    vLLM and SGLang take uneven stages, vLLM also uneven experts; verl's Ulysses cuts heads.
    """
    stated = {option.name for option in layout.stated}
    for argument in ("tp", "sp") if layout.format == "verl" else ("tp",):
        yield _Check("heads", argument, "heads", _HEADS)
        yield _Check("heads", argument, "kv_heads", _KEYS, either=True)
    if not any("redundant_experts" in name for name in stated):
        yield _Check("experts", "ep", "experts", _EXPERTS)
    # What is unknown may make the stages uneven.
    if layout.format == "megatron" and not any(_UNEVEN.search(name) or name[:1] in "$`" for name in stated):
        yield _Check("layers", "pp", "layers", _LAYERS)


@dataclass(frozen=True)
class _Rule:
    """A size that has to divide a count of the model: the option of the size, the count, and the model in words.

    ``shares``: replicas of attention, among which the size is divided.
    """

    check: _Check
    option: Option
    size: int
    count: Option
    model: str = ""
    shares: int = 1

    def fits(self, size: int) -> bool:
        return size % self.shares == 0 and self.check.fits(size // self.shares, int(self.count.first))

    def smaller(self) -> list[int]:
        """Return the sizes that may do instead, the largest first."""
        return [each * self.shares for each in smaller(self.size // self.shares, int(self.count.first))]


def _of_model(layout: _Layout | None, given: dict[str, Any]) -> Iterator[Finding]:
    """Yield sizes that do not fit the world, and each size that does not divide what is known of the model.

    ``given`` are the arguments with the fixes before these; each fix is tried with them, and added to them.
    """
    if layout is None:
        return
    rules = list(_rules(layout))

    def works(name: str, value: int) -> bool:
        of_size = (rule for rule in rules if rule.check.argument == name)
        return all(rule.fits(value) for rule in of_size) and layout.fits({**given, name: value})

    if layout.problem:
        found = fitting(given, lambda sizes: all(works(*item) for item in sizes.items() - given.items()))
        yield _of_sizes(layout, found)
        given |= [found] if found else []
    for argument in dict.fromkeys(rule.check.argument for rule in rules):
        broken = [rule for rule in rules if rule.check.argument == argument and not rule.fits(rule.size)]
        for rule in broken[:1]:
            value = next((each for each in rule.smaller() if works(argument, each)), None)
            yield _of_rule(layout, rule, value, _spec(layout))
            given |= {} if value is None else {argument: value}
    yield from _of_rollouts(layout)
    yield from _of_batch(layout)


def _of_sizes(layout: _Layout, found: tuple[str, int] | None) -> Finding:
    """Return the finding of sizes that do not fit, at the line of the size that its fix changes."""
    changed = found[0].replace("etp", "ep") if found else "world_size"
    sizes = sorted(layout.readings, key=lambda each: each.argument == "world_size")
    places = {each.argument: each.line for each in sizes if each.argument in layout.arguments}
    line = places.get(changed, next(iter(places.values()), None))
    fix = f"{found[0]}={found[1]}" if found else None
    return Finding(layout.path, _line(line), "sizes", layout.problem, fix, None, found and layout.spelled(*found))


def _of_rule(layout: _Layout, rule: _Rule, value: int | None, spec: str | None) -> Finding:
    over = f"{rule.size // rule.shares} ({rule.option} over {rule.shares} replicas)"
    place = f" (line {rule.count.line})" if rule.count.line else ""
    message = f"{over if rule.shares > 1 else rule.option} does not divide {rule.count}{rule.model}{place}"
    fix, edit = None, None
    if value is not None:
        fix, edit = f"{rule.check.argument}={value}", written(rule.option.path, value, layout.path)
    return Finding(layout.path, _line(rule.option.line), rule.check.code, message, fix, spec, edit)


def _rules(layout: _Layout) -> Iterator[_Rule]:
    """Yield the rules of the layout's own sizes, as far as the model is known."""
    # SGLang shares its tensor parallel ranks among replicas of attention.
    shared = prod(layout.arguments.get(name, 1) for name in ("attn_dp", "attn_cp")) if layout.format == "sglang" else 1
    for check in _checks(layout):
        reading = next((each for each in layout.readings if each.argument == check.argument), None)
        found = _count(layout, check) if reading is not None else None
        if reading is not None and found is not None:
            size = int(layout.arguments.get(check.argument, 1))
            yield _Rule(check, reading.single, size, *found, shared if check.code == "heads" else 1)


def _count(layout: _Layout, check: _Check) -> tuple[Option, str] | None:
    """Return the option that states a count of the model, and the model in words; None if the count is unknown."""
    found = [option for option in layout.stated if option.name in check.names]
    if found:
        stated = _counted(found)
        return (stated.single, "") if stated is not None else None
    option, counts_known = _model(layout)
    known = counts_known.get(check.count)
    return None if known is None else (Option((check.names[-1],), str(known), option.line), f" of {option.value}")


# The engine of rollouts beside a trainer: the setting of its tensor parallel size.
_ROLLOUTS = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "--rollout-num-gpus-per-engine",
    "--vllm_tensor_parallel_size",
}
_ENGINE_HEADS = (_Check("heads", "tp", "heads", _HEADS), _Check("heads", "tp", "kv_heads", _KEYS, either=True))


_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _of_batch(layout: _Layout) -> Iterator[Finding]:
    """Yield a finding where DeepSpeed's batch is not micro batch x accumulation x data parallel ranks."""
    found = {each.name: each for each in layout.stated if len(each.path) == 1 and type(each.value) is int}
    if layout.format != "deepspeed" or not {_BATCH, _MICRO} <= found.keys():
        return
    batch, micro, steps = found[_BATCH], found[_MICRO], found.get(_STEPS)
    block, shown_block = micro.value, str(micro)
    if steps is not None:
        block, shown_block = micro.value * steps.value, f"{micro} x {steps}"
    shards = layout.arguments.get("tp", 1) * layout.arguments.get("sp", 1)
    ranks = (layout.arguments["world_size"] or 1) // shards if layout.known else 1
    wrong = batch.value != block * ranks if steps is not None and layout.known else batch.value % (block * ranks)
    if block and wrong:
        across = f" x {ranks} data parallel ranks" if layout.known else ""
        message = f"{batch} is not {shown_block}{across}, nor a multiple"
        if steps is not None and layout.known:
            message = f"{batch} is not {shown_block}{across} = {block * ranks}"
        value = block * ranks if layout.known else max(1, batch.value // block) * block
        edit = written(batch.path, value, layout.path if layout.path.endswith(DOCUMENTS) else ".json")
        yield Finding(layout.path, _line(batch.line), "batch", message, edit, None, edit)


def _of_rollouts(layout: _Layout) -> Iterator[Finding]:
    """Yield a finding where the engine of rollouts has a size that does not divide the heads of the model."""
    world = (layout.arguments.get("world_size") if layout.known else None) or 0  # engines share its ranks
    for option in (option.single for option in layout.stated if option.key in _ROLLOUTS):
        if not re.fullmatch(r"[1-9]\d{0,4}", str(option.value)):
            continue
        size, known = int(option.value), [(check, _count(layout, check)) for check in _ENGINE_HEADS]
        rules = [_Rule(check, option, size, *found) for check, found in known if found]
        for rule in [rule for rule in rules if not rule.fits(size)][:1]:
            fitting_all = (each for each in rule.smaller() if all(one.fits(each) for one in rules) and not world % each)
            yield _of_rule(layout, rule, next(fitting_all, None), None)


def _model(layout: _Layout) -> tuple[Option, dict[str, int]]:
    """Return the model's option and counts: of its folder, its name, else of the folder of the file."""
    keys = [(option.key.lstrip("-").replace("-", "_"), option) for option in layout.stated]
    named = [option for key, option in keys if key in _MODELS and isinstance(option.first, str)]
    folder = Path(layout.path).parent
    if not named:
        return Option((), "config.json", 0), _counts_of(folder)
    option = named[0].single
    return option, _counts_of(folder / option.value) or _downloaded(option.value) or named_counts(option.value)


def _downloaded(name: str) -> dict[str, int]:
    """Return the counts of a model in Hugging Face's cache; empty if it is not there."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    known = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    folder = Path(hub, f"models--{name.replace('/', '--')}", "snapshots").expanduser()
    snapshots = sorted(folder.glob("*")) if known else []
    return next((found for each in snapshots if (found := _counts_of(each))), {})


def _counts_of(folder: Path) -> dict[str, int]:
    """Return the counts of the model in a folder, none where it has no ``config.json`` of one."""
    try:
        data = parse_json(read_text(folder / "config.json", _LARGEST))
    except Unreadable:
        return {}
    return counts(data) if isinstance(data, dict) and {"model_type", "architectures"} & data.keys() else {}


def _counted(found: Sequence[Option]) -> Option | None:
    """Return the option of a count of the model; None where it is not a number or parts have different ones."""
    numbers = {str(option.first) for option in found}
    return found[0] if len(numbers) == 1 and re.fullmatch(r"[1-9]\d{0,8}", numbers.pop()) else None


def _spec(layout: _Layout) -> str | None:
    """Return the layout as a SPEC, None for a recipe that no SPEC names and for sizes that do not fit."""
    if not layout.known or layout.problem or layout.recipe not in RECIPES:
        return None
    sizes = {"world": layout.arguments["world_size"], **layout.arguments}
    words = ",".join(f"{name}={value}" for name, value in sizes.items() if name != "world_size")
    return f"{layout.recipe}:{words}"


# -- nodes and GPUs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Machine:
    """The machine of a run by Slurm or a manifest: possible numbers of nodes, and the GPUs of a node.

    ``together``: how many nodes run an engine; None where a cluster of Ray does, or a number that is not known.
    """

    rule: str
    nodes: tuple[Option, ...]
    gpus: Option | None
    together: int | None


# Options of launchers and engines that count nodes, and the ranks on each of them.
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines", "PET_NNODES", "NNODES")
_EACH = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "PET_NPROC_PER_NODE", "NPROC_PER_NODE")


def _stated(run: Options, names: tuple[str, ...]) -> Option | None:
    """Return a count as the launcher or the engine is given it, None if it is not a number."""
    found = next((option for option in run.counts if option.key in names), None)
    known = found is not None and isinstance(found.first, str) and re.fullmatch(r"[1-9]\d{0,5}", found.first)
    return replace(found, value=int(found.first)) if found is not None and known else None


def _machine(run: Options, container: Container | None, asked: Mapping[str, tuple[int, int]]) -> _Machine:
    def count(name: str, variable: str) -> tuple[Option, ...]:
        return (Option((name,), *asked[variable]),) if variable in asked else ()

    nodes, gpus = count("nodes", "SLURM_NNODES"), next(iter(count("GPUs", "SLURM_GPUS_ON_NODE")), None)
    rule, together = "asks Slurm for", nodes[0].value if nodes else 1
    visible, line = run.command.variable("CUDA_VISIBLE_DEVICES")
    if re.fullmatch(r"\d+(,\d+)*", shown(visible)):
        gpus = Option(("CUDA_VISIBLE_DEVICES",), len(shown(visible).split(",")), line)
    commands = str(run.command)
    if container is not None:
        nodes, gpus = tuple(replace(each, path=("pods",)) for each in container.pods), container.gpus
        rule, together = "makes", container.group
        commands = " ".join(map(str, container.script.commands))
    if (of_run := _stated(run, _NODES)) is not None:
        together = of_run.value
    elif "--nnodes" in commands or (together == 1 and _RAY.search(commands)):
        return _Machine(rule, nodes, gpus, None)
    return _Machine(rule, nodes, gpus, together)


def _of_counts(
    run: Options, machine: _Machine, layout: _Layout | None, given: dict[str, Any], path: str
) -> Iterator[Finding]:
    """Yield a finding if a launcher has another number of nodes than its job, or starts more ranks than GPUs."""
    nodes, ranks, gpus = _stated(run, _NODES), _stated(run, _EACH), machine.gpus
    of_step = {option.first for option in run.flags if option.key in ("-N", "--nodes")}
    of_pod = nodes is not None and nodes.value == 1 and machine.rule == "makes"  # a run in each

    def fix(stated: Option, value: int) -> str | None:
        """Return the fix of a count, if the sizes fit the world that it makes."""
        world = given.get("world_size")
        changed = {**given, "world_size": world * value // stated.value} if world else given
        if layout is not None and not layout.problem and not layout.fits(changed):
            return None
        given.update(changed)
        return written(stated.path, value, "")

    if nodes is not None and machine.nodes and str(nodes.value) not in of_step and not of_pod:
        each = machine.nodes[-1]
        if all(count.value != nodes.value for count in machine.nodes):
            message = f"{nodes}; line {each.line} {machine.rule} {each.value} {each.key}"
            yield Finding(path, _line(nodes.line), "nodes", message, fix(nodes, each.value))
    if gpus is not None and ranks is not None and ranks.value > gpus.value:
        message = f"{ranks}; a node has {gpus.value} GPUs (line {gpus.line})"
        yield Finding(path, _line(ranks.line), "gpus", message, fix(ranks, gpus.value))


# Options of vLLM with which other nodes run replicas of their own.
_ELSEWHERE = {"data_parallel_rank", "data_parallel_start_rank", "headless", "data_parallel_external_lb"}
_ELSEWHERE |= {"data_parallel_address", "node_rank"}


def _sizes_here(layout: _Layout, together: int | None) -> tuple[dict[str, int], int | None]:
    """Return the sizes whose product is the ranks of an engine on some nodes, and how many nodes these are.

    vLLM starts its data parallel replicas on the same nodes, unless its options give their number or other nodes.
    """
    sizes = {name: layout.arguments[name] for name in ("tp", "pp", "pcp") if name in layout.arguments}
    names = {option.name: option.first for option in layout.stated}
    local = str(names.get("data_parallel_size_local", ""))
    if layout.format == "vllm" and re.fullmatch(r"[1-9]\d{0,4}", local):
        return {**sizes, "local dp": int(local)}, together and 1
    if layout.format == "vllm" and "dp" in layout.arguments and _ELSEWHERE.isdisjoint(names):
        sizes["dp"] = layout.arguments["dp"]
    return sizes, together


def _of_engine(run: Options, layout: _Layout, machine: _Machine, given: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding where an engine has more ranks than GPUs, or SGLang ranks that its nodes do not share evenly."""
    sizes, together = _sizes_here(layout, machine.together)
    ranks, size = prod(sizes.values()), max(sizes, key=lambda name: sizes[name], default="")
    line = next((each.line for each in layout.readings if each.argument == size), run.command.line)
    product = " x ".join(f"{name} {count}" for name, count in sizes.items()) + f" = {ranks} ranks"
    nodes, gpus = _stated(run, _NODES), machine.gpus
    if layout.format == "sglang" and nodes is not None and "tp" in sizes and ranks % nodes.value:
        message = f"{nodes} does not divide {product} (line {line})"
        yield Finding(layout.path, _line(nodes.line), "nodes", message)
    elif gpus is not None and together and ranks > gpus.value * together:
        where = f"{together} nodes have {gpus.value} GPUs each" if together > 1 else f"a node has {gpus.value} GPUs"
        value, rest = divmod(gpus.value * together * sizes[size], ranks)
        works = (
            value and not rest and size in given and is_plan(layout.recipe, {**given, "world_size": None, size: value})
        )
        fix, edit = (f"{size}={value}", layout.spelled(size, value)) if works else (None, None)
        message = f"{product}, but {where} (line {gpus.line})"
        yield Finding(layout.path, _line(line), "gpus", message, fix, None, edit)
