"""A config file: recognised, read by its format's table, and made a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from rankmesh.core import recipes
from rankmesh.core.documents import refused_as
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.errors import PlanError, RankmeshError, cut
from rankmesh.readers import accelerate, deepspeed, frameworks, megatron, verl
from rankmesh.readers.commands import PROGRAMS, check_known, check_readable
from rankmesh.readers.documents import entries
from rankmesh.readers.fixes import fitting, smaller, spelled
from rankmesh.readers.interpolations import Interpolations
from rankmesh.readers.parents import with_parents
from rankmesh.readers.reading import DOCUMENTS, NO_LAYOUT, Entry, Reading, Settled, Table, line_error, place, run_it
from rankmesh.readers.run import Run, read_arguments, read_run

__all__ = ["NO_WORLD", "Config", "is_plan", "is_script", "plan_of", "problem_of", "read_config", "read_launch"]

_SCRIPT = "a Megatron launch script"
# The code of an error that says that a file states sizes without the world size.
NO_WORLD = "no-world"
_FORMS = (
    "a config is a launch script of Megatron, torchtitan, verl, DeepSpeed, vLLM or SGLang, a file or YAML of "
    "Megatron's arguments, a GPT-NeoX, NeMo-RL, verl, axolotl or nanotron YAML, a torchtitan TOML, a DeepSpeed or "
    "picotron JSON, or an Accelerate YAML"
)


@dataclass(frozen=True)
class Config:
    """A plan and the lines of the file that it comes from; ``notes`` have what else was seen and not used.

    ``arguments``: what the ``recipe`` is given, with the world size; ``stated``: all that the file or the run states.
    """

    format: str
    title: str
    path: str
    plan: Plan
    readings: tuple[Reading, ...]
    notes: tuple[tuple[int, str], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    stated: tuple[Entry, ...] = ()
    table: Table | None = None

    def __str__(self) -> str:
        lines = [(reading.line, f"{reading} ({_source(reading)})") for reading in self.readings]
        rows = sorted([*lines, *self.notes], key=lambda row: row[0])
        return "\n".join(
            [f"{self.path}: read as {self.title}", *(f"{place(self.path, line)}: {text}" for line, text in rows)]
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data with stable keys."""
        return {
            "format": self.format,
            "path": self.path,
            "lines": [
                {
                    "line": each.line or None,
                    **{name: getattr(each, name) for name in ("key", "value", "argument", "also")},
                }
                for each in self.readings
            ],
            "notes": [{"line": line or None, "text": text} for line, text in self.notes],
        }


def _source(reading: Reading) -> str:
    """Return what a line sets, and the other lines of its value."""
    lines = " and ".join(map(str, reading.also))
    return f"{reading.argument}, from line{'s' if len(reading.also) > 1 else ''} {lines}" if lines else reading.argument


@dataclass(frozen=True)
class _Format:
    """A format: what makes its plan, the argument without which that needs the world size (none: never), its reader.

    Those that nothing reads are layouts that files of another format may have.
    """

    plan: Callable[..., Plan]
    data: str = "dp"
    title: str = ""
    reader: Any = None


def _sharded(mesh: Mesh, shards: int | None) -> Mesh:
    """Return a mesh with a view of its weights: shards among adjacent ranks, copies among the others."""
    if shards is None or shards >= mesh.size:
        return mesh.with_view("weights", shared=None, fsdp=mesh.size)
    if mesh.size % shards:
        raise PlanError(f"fsdp_size {shards} does not divide the world size {mesh.size}; change one of them")
    return mesh.with_view("weights", shared=None, fsdp=shards, ddp=mesh.size // shards)


def _shards(world: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Add what axolotl infers to its sizes: shards first, and copies of what shards leave of the world."""
    if "dp_shard" not in sizes or "dp_replicate" in sizes:
        return dict(sizes)
    rest, used = divmod(world, prod(sizes.values()))
    return dict(sizes) if used else {**sizes, "dp_replicate": rest}


def _neox(world: int | None, tp: int = 1, pp: int = 1) -> Plan:
    return recipes.axes(Mesh.parse(f"tp={tp},dp=*,pp={pp}", world_size=world))


def _verl(world: int | None, sp: int = 1, fsdp: int | None = None) -> Plan:
    return recipes.axes(_sharded(Mesh.parse(f"sp={sp},dp=*", world_size=world), fsdp))


def _picotron(world: int | None, tp: int = 1, cp: int = 1, pp: int = 1, dp: int | None = None) -> Plan:
    return recipes.axes(Mesh.parse(f"tp={tp},cp={cp},pp={pp},dp={dp or '*'}", world_size=world))


_FORMATS: Mapping[str, _Format] = {
    "megatron": _Format(recipes.megatron, "dp", "a YAML of Megatron's arguments", megatron),
    "gpt_neox": _Format(_neox, "world_size", "a GPT-NeoX config", frameworks.GPT_NEOX),
    "nemo_rl": _Format(recipes.megatron, "dp", "a NeMo-RL config", frameworks.NEMO_RL),
    "verl": _Format(_verl, "world_size", "a verl config", verl),
    "axolotl": _Format(
        lambda world, **sizes: recipes.accelerate(world, **_shards(world, sizes)),
        "world_size",
        "an axolotl config",
        frameworks.AXOLOTL,
    ),
    "nanotron": _Format(recipes.nanotron, "dp", "a nanotron config", frameworks.NANOTRON),
    "picotron": _Format(_picotron, "dp", "a picotron config", frameworks.PICOTRON),
    "torchtitan": _Format(recipes.torchtitan, "dp_shard", "a torchtitan config", frameworks.TORCHTITAN),
    "deepspeed": _Format(recipes.deepspeed, "dp", "a DeepSpeed config", deepspeed),
    "accelerate": _Format(recipes.accelerate, "dp_shard", "an Accelerate config", accelerate),
    "vllm": _Format(recipes.vllm, ""),
    "sglang": _Format(recipes.sglang, ""),
    "experts": _Format(lambda world, ep: recipes.axes(Mesh.parse(f"ep={ep}", world_size=world))),
    "sequences": _Format(lambda world, sp: recipes.deepspeed(world, sp=sp, dp=world // sp), "world_size"),
    "replicas": _Format(lambda world: recipes.accelerate(world, dp_replicate=world, dp_shard=1)),
}


def read_config(
    text: str, path: str, *, world_size: int | None = None, variables: Mapping[str, str] | None = None
) -> Config:
    """Return the plan of a config's text; ``path`` is for messages. Raises ``PlanError`` with file and line.

    ``world_size`` is for files that do not state it, or as a default; one that differs from the file's is refused.
    ``variables``: the environment that a launch script runs in, or that a YAML names (``${oc.env:TP}``).
    """
    with refused_as(PlanError, path, f"{_FORMS}; give one of them", path=path):
        return _read(text, path, world_size, variables or {})


def _read(text: str, path: str, world_size: int | None, variables: Mapping[str, str]) -> Config:
    found = [] if is_script(text, path) else entries(text, path)
    if not found and (listed := read_arguments(text, path, megatron.FLAGS)) is not None:
        return _made(
            "megatron",
            "a file of Megatron's arguments",
            megatron.from_run(listed, path),
            path,
            world_size,
            listed,
            listed.arguments,
        )
    if not found and not is_script(text, path) and path.endswith(DOCUMENTS):
        raise PlanError(f"{path}: this is not a training config; {_FORMS}; give one of them", path=path, code=NO_LAYOUT)
    if not found:
        with refused_as(PlanError, path, run_it(path), path=path):
            run = read_run(text, path, megatron.FLAGS, variables)
        if run is None:
            problem = "this is not a training config"
            if is_script(text, path):
                problem = f"this script starts no training in a plain line; {run_it(path)}"
            raise PlanError(f"{path}: {problem}; {_FORMS}; give one of them", path=path, code=NO_LAYOUT)
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        return read_launch(run, path, _SCRIPT + (f" with {given}" if given else ""), world_size)
    known = Interpolations(with_parents(found, path), variables)
    found = known.resolved()
    if unused := [name for name in variables if name not in known.used]:
        raise PlanError(
            f"{path}: variables ({', '.join(unused)}) are set for a file that is not a script and does not name them; "
            "leave --set out",
            path=path,
        )
    names = [name for name, form in _FORMATS.items() if form.reader is not None and form.reader.matches(found)]
    # A file that has these holds keys of the other beside its own.
    for name, other in (("gpt_neox", "deepspeed"), ("nemo_rl", "megatron"), ("verl", "megatron")):
        names = [one for one in names if one != other or name not in names]
    if not names:
        check_readable(found, path)
        _check_manifest(found, path)
    if len(names) != 1:
        keys = f"keys of {' and of '.join(names)}" if names else "no key of a training config"
        raise PlanError(
            f"{path}: this file has {keys}; {_FORMS}; give one of them",
            path=path,
            formats=tuple(names),
            code=None if names else NO_LAYOUT,
        )
    form = _FORMATS[names[0]]
    return _made(names[0], form.title, form.reader.from_document(found, path), path, world_size, None, found)


def _check_manifest(found: Sequence[Entry], path: str) -> None:
    """Refuse a manifest of Kubernetes, whose commands lint reads."""
    top = {entry.path: entry for entry in found if len(entry.path) == 1}
    if ("apiVersion",) in top and ("kind",) in top:
        kind = top["kind",].value
        problem = f"this is a manifest of kind {cut(str(kind))}; rankmesh lint {path} checks the commands of manifests"
        raise PlanError(f"{path}: {problem}", path=path, code=NO_LAYOUT)


def read_launch(run: Run, path: str, title: str = _SCRIPT, world_size: int | None = None) -> Config:
    """Return the plan of one run of a launch script; ``title``: what it is where it is of Megatron."""
    check_known(run, path)
    program = next((program for program in PROGRAMS if program.matches(run, path)), None)
    if program is None:
        return _made("megatron", title, megatron.from_run(run, path), path, world_size, run, run.stated)
    title = title.replace(_SCRIPT, program.title)
    return _made(program.format, title, program.settle(run, path), path, world_size, run, run.stated)


def is_script(text: str, path: str) -> bool:
    """Return whether a file is a shell script, by the ending of its name or its first line."""
    first = text.partition("\n")[0]
    return path.endswith((".sh", ".bash", ".slurm", ".sbatch")) or (first.startswith("#!") and "sh" in first)


def plan_of(recipe: str, arguments: Mapping[str, object]) -> Plan:
    """Return the plan of a recipe's arguments, ``world_size`` among them."""
    return _FORMATS[recipe].plan(arguments["world_size"], **{k: v for k, v in arguments.items() if k != "world_size"})


def is_plan(recipe: str, arguments: Mapping[str, object]) -> bool:
    """Return whether a recipe has a plan for these arguments."""
    try:
        plan_of(recipe, arguments)
    except RankmeshError:
        return False
    return True


def problem_of(error: BaseException | None) -> str:
    """Return the problem of an error of sizes without its remedy, which is in other words than the file's."""
    return str(error).partition("; ")[0]


def _made(
    name: str,
    title: str,
    settled: Settled,
    path: str,
    world_size: int | None,
    run: Run | None,
    entries_stated: Sequence[Entry],
) -> Config:
    arguments = dict(settled.arguments)
    recipe = arguments.pop("recipe", name)
    stated = arguments.pop("world_size", None)
    default = settled.reading("world_size")
    if run and run.world_size and run.world_size.default and default and world_size not in (None, stated):
        origin = "a default" if default.line else "what the script found on this machine"
        settled.drop("world_size", f"is {origin}; --world-size {world_size} counts")
        stated = None
    if stated is not None and world_size not in (None, stated):
        # Accelerate's one process follows from another line.
        where = settled.reading("world_size") or settled.readings[0]
        raise line_error(
            path,
            where.line,
            f"{where} makes a world of {stated} ranks, but the world size is {world_size}; leave --world-size out, or "
            "change one of them",
            received=stated,
            world_size=world_size,
        )
    world = world_size if stated is None else stated
    _check_world(title, recipe, arguments, world, path, run)
    readings, notes, table = tuple(settled.readings), tuple(settled.notes), settled.table
    entries_stated = (*entries_stated, *settled.of_file)
    given = {"world_size": world, **arguments}
    try:
        plan = plan_of(recipe, given)
    except RankmeshError as error:
        lines = ", ".join(f"line {reading.line}: {reading}" if reading.line else str(reading) for reading in readings)
        layout = {"recipe": recipe, "arguments": given, "readings": readings, "path": path, "format": name}
        layout |= {"stated": tuple(entries_stated), "table": table}
        problem = _with_fix(error, recipe, given, settled, path)
        raise PlanError(f"{path}: {problem} ({lines})", **{**error.values, **layout, "code": "sizes"}) from error
    made = {**given, "world_size": plan.world_size}
    return Config(name, title, path, plan, readings, notes, made, recipe, tuple(entries_stated), table)


def _with_fix(error: RankmeshError, recipe: str, arguments: Mapping[str, Any], settled: Settled, path: str) -> str:
    """Return the problem of sizes that do not fit, with a size that does, as the file spells it."""
    found = fitting(arguments, lambda sizes: is_plan(recipe, sizes))
    edit = spelled(*found, settled.readings, settled.table, path) if found else None
    if not found or edit is None:
        return str(error)
    name, value = found
    others = smaller(value, arguments.get("world_size") or value, one=value > 2)
    also = [str(each) for each in others if is_plan(recipe, {**arguments, name: each})][:3]
    fits = f" ({', '.join(also)} fit{'' if also[1:] else 's'}, too)" if also else ""
    block = error.values.get("product")
    more = f", or use a multiple of {block} ranks" if block else ""
    return f"{problem_of(error)}; set {edit}, which fits{fits}{more}"


def _check_world(
    title: str, recipe: str, arguments: dict[str, Any], world: int | None, path: str, run: Run | None
) -> None:
    if world is None and _FORMATS[recipe].data not in ("", *arguments):
        missing = run.missing if run is not None else None
        why = f"{missing.why}; " if missing else ""
        fix = f"{run_it(path)}; or give --world-size" if missing and missing.runs else "give --world-size"
        raise line_error(
            path,
            None if run is None else run.command.line,
            f"{title} does not state the world size, which the layout needs; {why}{fix}",
            code=NO_WORLD,
            arguments=dict(arguments),
            runs=missing is not None and missing.runs,
        )
