"""A config file: recognised, read by its format's table, and made a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankmesh.core.documents import refused_as
from rankmesh.core.plan import Plan
from rankmesh.core.source import RECIPES
from rankmesh.errors import PlanError, RankmeshError
from rankmesh.readers.documents import read_document
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.formats.recognised import FORMATS, KNOWN, recognised
from rankmesh.readers.launches import read_flags, read_launch
from rankmesh.readers.omegaconf import Interpolations, with_parents
from rankmesh.readers.options import DOCUMENTS, NO_LAYOUT, Option, Options, line_error, place, run_it
from rankmesh.readers.plans import fitting, is_plan, needs_world, plan_of, smaller, spelled
from rankmesh.readers.table import Reading, Table
from rankmesh.readers.tokens import Missing

__all__ = ["Config", "Layout", "is_script", "laid_out", "made", "no_world", "opened", "problem_of", "read_config"]


@dataclass(frozen=True)
class Layout:
    """The layout in a text, whether or not its sizes fit.

    ``arguments``: of the ``recipe``, ``world_size`` among them; ``stated``: all options of the file or command.
    """

    format: str
    title: str
    path: str
    readings: tuple[Reading, ...]
    notes: tuple[tuple[int, str], ...]
    arguments: Mapping[str, Any]
    recipe: str
    stated: tuple[Option, ...]
    table: Table | None

    @property
    def known(self) -> bool:
        """Whether the world size is stated, or follows from the sizes."""
        return not needs_world(self.recipe, self.arguments)

    def planned(self) -> Plan:
        """Return the plan of the arguments. Raises ``RankmeshError`` for sizes that do not fit."""
        return plan_of(self.recipe, self.arguments)

    def spelled(self, argument: str, value: int) -> str | None:
        """Return a setting of an argument as the file writes it, None if the format has no key for it."""
        return spelled(argument, value, self.readings, self.table, self.path)

    def spec(self, world_size: int) -> str | None:
        """Return the layout in a world as a SPEC, None for a recipe that no SPEC names."""
        if self.recipe not in RECIPES:
            return None
        words = [f"world={world_size}"]
        for name, value in self.arguments.items():
            if name != "world_size":
                words.append(f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple | list) else value}")
        return f"{self.recipe}:{','.join(words)}"


@dataclass(frozen=True)
class Config:
    """A plan and the lines of the file that determine it; ``notes`` list other lines that were seen and not used.

    ``spec``: the SPEC with the same plan, None where there is none.
    """

    format: str
    title: str
    path: str
    readings: tuple[Reading, ...]
    notes: tuple[tuple[int, str], ...]
    plan: Plan
    spec: str | None

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
    """Return the option that a line sets, and the other lines of its value."""
    lines = " and ".join(map(str, reading.also))
    return f"{reading.argument}, from line{'s' if len(reading.also) > 1 else ''} {lines}" if lines else reading.argument


def read_config(
    text: str, path: str, *, world_size: int | None = None, variables: Mapping[str, str] | None = None
) -> Config:
    """Return the plan of a config's text; ``path`` is for messages. Raises ``PlanError`` with file and line.

    ``world_size`` is for files that do not state it, or as a default; one that differs from the file's is refused.
    ``variables``: the environment that a launch script runs in, or that a YAML names (``${oc.env:TP}``).
    """
    with refused_as(PlanError, path, f"{KNOWN}; give one of them", path=path):
        return made(*opened(text, path, variables or {}), world_size=world_size)


def opened(text: str, path: str, variables: Mapping[str, str]) -> tuple[Options, str, str]:
    """Return the options of a text, a title (``{}``: the format has its own), and the format if it is known."""
    script = is_script(text, path)
    found = [] if script else read_document(text, path)
    if found:
        known = Interpolations(with_parents(found, path), variables)
        options = Options(path, tuple(known.resolved()))
        if unused := [name for name in variables if name not in known.used]:
            raise PlanError(
                f"{path}: variables ({', '.join(unused)}) are set for a file that is not a script and does not name "
                "them; leave --set out",
                path=path,
            )
        return options, "{}", ""
    if (flags := read_flags(text, path)) is not None:
        return flags, "a file of Megatron's arguments", "megatron"
    launch = None
    if script or not path.endswith(DOCUMENTS):
        with refused_as(PlanError, path, run_it(path), path=path):
            launch = read_launch(text, path, FLAGS, variables)
    if launch is None:
        problem = "this is not a training config"
        if script:
            problem = f"this script starts no training in a plain line; {run_it(path)}"
        raise PlanError(f"{path}: {problem}; {KNOWN}; give one of them", path=path, code=NO_LAYOUT)
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    return launch, "{}" + (f" with {given}" if given else ""), ""


def is_script(text: str, path: str) -> bool:
    """Return whether a file is a shell script, by the ending of its name or its first line."""
    first = text.partition("\n")[0]
    return path.endswith((".sh", ".bash", ".slurm", ".sbatch")) or (first.startswith("#!") and "sh" in first)


def problem_of(error: BaseException | None) -> str:
    """Return the problem of an error of sizes without its remedy, which has the names of a SPEC."""
    return str(error).partition("; ")[0]


def made(options: Options, title: str = "{}", name: str = "", *, world_size: int | None = None) -> Config:
    """Return the plan of options; ``title``: of the config, ``{}`` stands for the title of the format."""
    layout = laid_out(options, title, name, world_size=world_size)
    if not layout.known:
        raise no_world(options, layout)
    about = {name: getattr(layout, name) for name in ("format", "title", "path", "readings", "notes")}
    try:
        plan = layout.planned()
    except RankmeshError as error:
        lines = ", ".join(f"line {each.line}: {each}" if each.line else str(each) for each in layout.readings)
        problem = f"{layout.path}: {_with_fix(error, layout)} ({lines})"
        raise PlanError(problem, **{**error.values, **about, "code": "sizes"}) from error
    return Config(**about, plan=plan, spec=layout.spec(plan.world_size))


def laid_out(options: Options, title: str = "{}", name: str = "", *, world_size: int | None = None) -> Layout:
    """Return what options state of a layout. Raises ``PlanError`` for a size or a world that cannot be read."""
    path, name = options.path, name or recognised(options)
    form = FORMATS[name]
    title = title.replace("{}", form.command if options.is_command else form.title)
    settled = form.settle(options)
    arguments = dict(settled.arguments)
    recipe = arguments.pop("recipe", name)
    stated = arguments.pop("world_size", None)
    default = settled.reading("world_size")
    if options.world and options.world.default and default and world_size not in (None, stated):
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
    arguments = {"world_size": world_size if stated is None else stated, **arguments}
    readings, notes, of_all = tuple(settled.readings), tuple(settled.notes), (*options.stated, *settled.of_file)
    return Layout(name, title, path, readings, notes, arguments, recipe, of_all, settled.table)


def _with_fix(error: RankmeshError, layout: Layout) -> str:
    """Return the problem of sizes that do not fit, with a size that does, as the file spells it."""
    arguments, recipe = layout.arguments, layout.recipe
    found = fitting(arguments, lambda sizes: is_plan(recipe, sizes))
    edit = layout.spelled(*found) if found else None
    if not found or edit is None:
        return str(error)
    name, value = found
    others = smaller(value, arguments.get("world_size") or value, one=value > 2)
    also = [str(each) for each in others if is_plan(recipe, {**arguments, name: each})][:3]
    fits = f" ({', '.join(also)} fit{'' if also[1:] else 's'}, too)" if also else ""
    block = error.values.get("product")
    more = f", or use a multiple of {block} ranks" if block else ""
    return f"{problem_of(error)}; set {edit}, which fits{fits}{more}"


def no_world(options: Options, layout: Layout) -> PlanError:
    """Return the error for sizes without the world size, which their layout needs; ``runs``: only a run states it."""
    missing = options.world.value if options.world is not None and isinstance(options.world.value, Missing) else None
    why = f"{missing.why}; " if missing else ""
    runs = missing is not None and missing.runs
    fix = f"{run_it(options.path)}; or give --world-size" if runs else "give --world-size"
    return line_error(
        options.path,
        options.command.line if options.is_command else None,
        f"{layout.title} does not state the world size, which the layout needs; {why}{fix}",
        runs=runs,
    )
