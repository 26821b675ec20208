"""The one run that a launch script starts: its launcher, its world size, and the arguments of the program.

A file of arguments alone is a run whose launcher is not known.

```
torchrun --nproc_per_node 8 --nnodes 4        32 ranks; also python -m torch.distributed.run and .launch
srun -n 32 python ...                         32 ranks; -N 4 --ntasks-per-node 8 is the same
accelerate launch --num_processes 32          32 ranks
deepspeed --num_gpus 8 --num_nodes 4          32 ranks
#SBATCH --nodes=4                             gives SLURM_NNODES and related variables their values
```

>>> run = read_run("torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4", "run.sh")
>>> run.world_size.value, [str(entry) for entry in run.arguments]
(8, ['--nproc_per_node = 8', '--tensor-model-parallel-size = 4'])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING

from rankmesh.errors import PlanError, cut
from rankmesh.readers import slurm, verl
from rankmesh.readers.reading import Entry, Missing, line_error, refused, run_it
from rankmesh.readers.script import TAKEN, TEXT, Command, Script, Variable, read_script
from rankmesh.readers.tokens import Part, Word, gap_of, line_of, lines_of, shown, text_of, value_of

if TYPE_CHECKING:
    from rankmesh.readers.recording.record import Launch

__all__ = [
    "SYSTEMS",
    "Run",
    "check_unknown",
    "read_arguments",
    "read_run",
    "recorded_run",
    "runs_of",
    "slurm_variables",
]

_PROGRAM = re.compile(r"(.*/)?(pretrain|train|finetune|run)_?\w*\.py")
_PRINTS = {"[", "test", "echo", "printf", "cat", "export", "cd", "mkdir", "cp", "rm", "pip", "git", "tee", ":"}
# Comments and empty lines, then an option at the start of a line.
_ARGUMENTS = re.compile(r"(?:[^\S\n]*(?:#.*)?\n)*[^\S\n]*--\w")

# A launcher: how it is recognised, and the ways to state its world size, each a product of counts (names, default).
_Counts = tuple[tuple[tuple[str, ...], int | None], ...]
_LAUNCHERS: Mapping[str, tuple[str, tuple[_Counts, ...]]] = {
    "torchrun": (
        r"(^|[\s/])torchrun\s|-m\s+torch\.distributed\.(run|launch)\s",
        (((("--nproc_per_node", "--nproc-per-node", "PET_NPROC_PER_NODE"), 1), (("--nnodes", "PET_NNODES"), 1)),),
    ),
    "accelerate": (r"(^|[\s/])accelerate\s+launch\s", (((("--num_processes", "--num-processes"), None),),)),
    "deepspeed": (r"(^|[\s/])deepspeed\s", (((("--num_gpus",), None), (("--num_nodes",), None)),)),
    "srun": (
        r"(^|[\s/])srun\s",
        (((("-n", "--ntasks"), None),), ((("-N", "--nodes"), None), (("--ntasks-per-node",), None))),
    ),
    "msrun": (r"(^|[\s/])msrun\s", (((("--worker_num",), None),),)),
    "mpirun": (r"(^|[\s/])mpi(run|exec)\s", (((("-n", "-np", "--np"), None),),)),
}
# Where a launcher's own options end: the program that it starts, as a file or a command, or what follows these.
_STARTED = re.compile(r".*\.(py|sh)|(.*/)?(python[\d.]*|bash|sh|torchrun|deepspeed|accelerate)")
_MODULE = ("-m", "--module")
_OF_LAUNCHER = re.compile(r"torch\.distributed\.(run|launch)")
# The options of launchers and engines that count nodes, and the ranks on each of them.
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines", "PET_NNODES", "NNODES")
_EACH = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "PET_NPROC_PER_NODE", "NPROC_PER_NODE")
# What torchrun takes from its environment where it is not given the option.
_OF_ENVIRONMENT = ("PET_NPROC_PER_NODE", "PET_NNODES")
_STARTS_RANKS = ("torchrun", "accelerate", "deepspeed", "msrun")
# Systems that need none of these launchers, and the commands that start them.
SYSTEMS: Mapping[str, str] = {
    "vllm": r"[\s/]vllm\s+serve\s|\s-m\s+(vllm\.entrypoints|dynamo\.vllm|huggingfaceserver)[.\s]"
    r"|(docker|podman)\s+run\s.*/vllm-openai\S*\s",
    "sglang": r"[\s/]sglang\s+serve\s|\s-m\s+(sglang\.launch_server|dynamo\.sglang)[.\s]",
    "TensorRT-LLM": r"[\s/]trtllm-(serve|llmapi-launch)\s|\s-m\s+dynamo\.trtllm[.\s]",
    "OpenRLHF": r"\s-m\s+openrlhf\.cli[.\s]",
    "AReaL": r"\s-m\s+areal[.\s]",
    "ColossalAI": r"[\s/]colossalai\s+run\s",
    "NeMo Automodel": r"[\s/]automodel\s",
    "llamafactory": r"[\s/]llamafactory-cli\s+train\s",
}
# One search for the many commands that start nothing.
_STARTERS = re.compile("|".join([*(_LAUNCHERS[name][0] for name in _STARTS_RANKS), *SYSTEMS.values()]))
# slime's training ranks, which Ray starts.
_ACTORS: _Counts = ((("--actor-num-nodes",), None), (("--actor-num-gpus-per-node",), None))
# Commands that start as many ranks as these variables of the environment have.
_SWIFT = ("megatron", "swift")
_BY_ENVIRONMENT = {
    **dict.fromkeys((*_SWIFT, "llamafactory-cli"), ("NPROC_PER_NODE", "NNODES")),
    "run_train.sh": ("NGPU", "NNODE"),
}
# A size of torchtitan, in any command.
_TITAN = "--parallelism."


@dataclass(frozen=True)
class Run:
    """The run: where it starts, what it was given, and how many ranks it has (None: not stated).

    ``texts`` are all texts of its script, by their places; ``counts`` are the options of its launcher, which count.
    """

    command: Command
    arguments: tuple[Entry, ...]
    world_size: Entry | None
    strays: tuple[Word, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    defaults: Mapping[int, str] = field(default_factory=dict)
    texts: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    counts: tuple[Entry, ...] = ()

    @property
    def nodes(self) -> Entry | None:
        """The number of nodes as the launcher or the engine is given it, None where it is not a number."""
        return self._count(_NODES)

    @property
    def ranks_of_node(self) -> Entry | None:
        """The number of ranks on each node as the launcher is given it, None where it is not a number."""
        return self._count(_EACH)

    def _count(self, names: tuple[str, ...]) -> Entry | None:
        found = next((entry for entry in self.counts if entry.key in names), None)
        known = found is not None and isinstance(found.first, str) and re.fullmatch(r"[1-9]\d{0,5}", found.first)
        return replace(found, value=int(found.first)) if found is not None and known else None

    @property
    def system(self) -> str:
        """The system of ``SYSTEMS`` that the command starts, empty for none."""
        return _system(self.command)

    @property
    def program(self) -> str:
        """The file or the module that is started, empty where none is named."""
        words = [shown(word) for word in self.command.words]
        for number, word in enumerate(words):
            named = word.endswith(".py") or (number and words[number - 1] in _MODULE)
            if named and not _OF_LAUNCHER.fullmatch(word):
                return word
        return ""

    @property
    def by_swift(self) -> bool:
        """Whether a command of ms-swift starts the run."""
        return bool(self.command.words) and text_of(self.command.words[0]) in _SWIFT

    @property
    def stated(self) -> list[Entry]:
        """What the command states: the model that an engine is to serve, options, settings, unknown words."""
        words = [shown(word) for word in self.command.words]
        after = words.index("serve") + 1 if self.system and "serve" in words else len(words)
        served = [word for word in self.command.words[after : after + 1] if not shown(word).startswith("-")]
        model = [Entry(("model",), value_of(word), line_of(word)) for word in served]
        unknown = [Entry((shown(word),), value_of(word), line_of(word)) for word in self.strays if lines_of(word)]
        return [*model, *self.arguments, *self.settings, *unknown]

    @property
    def settings(self) -> list[Entry]:
        """The words ``key=value``, as Hydra takes them."""
        found = []
        for word in self.command.words:
            setting = verl.SETTING.fullmatch(shown(word))
            if setting is not None:
                lines, gap = lines_of(word) or (0,), gap_of(word)
                value = Missing(setting[2], gap.why, gap.runs) if gap else setting[2]
                found.append(Entry(tuple(setting[1].split(".")), value, lines[0], lines[1:]))
        return found

    @property
    def missing(self) -> Missing | None:
        """Why the world size is unknown, as far as the launcher states."""
        value = self.world_size.value if self.world_size is not None else None
        return value if isinstance(value, Missing) else None


def recorded_run(launch: Launch, path: str, marks: frozenset[str] = frozenset()) -> Run | None:
    """Return the run that a recorded launch starts, None for another command."""
    known = {name: Variable(((Part(value, ()),),), False, ()) for name, value in launch.environment.items()}
    command = Command(tuple((Part(word, ()),) for word in launch.words), 0, known)
    if not _is_run(command, marks):
        return None
    arguments, _ = _arguments(command)
    arguments, notes = _last_of_each(arguments), _given_again(arguments, marks)
    world = _world_size(command, arguments, _launch(command), path)
    # A count may be what this machine answers (nproc), which --world-size overrules.
    if world is not None:
        world = replace(world, line=0, default=not isinstance(world.value, Missing))
    return Run(command, arguments, world, notes=notes)


def _last_of_each(arguments: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Keep the last of an option that is given twice, as programs do."""
    return tuple({entry.key.replace("_", "-"): entry for entry in arguments}.values())


def _given_again(arguments: tuple[Entry, ...], marks: frozenset[str]) -> tuple[tuple[int, str], ...]:
    """Return a note for each size that a later one overrules."""
    last = {entry.key.replace("_", "-"): entry for entry in arguments if entry.key in marks}
    pairs = [(entry, last[entry.key.replace("_", "-")]) for entry in arguments if entry.key in marks]
    return tuple((0, f"{entry} is given again; {after} counts") for entry, after in pairs if entry.value != after.value)


def read_run(
    text: str, path: str, marks: frozenset[str] = frozenset(), given: Mapping[str, str] | None = None
) -> Run | None:
    """Return the one run of a script, None if it starts none; ``marks`` are arguments that only a run has.

    ``given`` are variables of the environment: they beat defaults, and are used where the script leaves one open.
    """
    script = read_script(text, slurm_variables(text), given)
    runs = runs_of(script, path, marks)
    if len(runs) > 1:
        commands = [run.command for run in runs]
        listed = "; ".join(f"line {command.line}: {cut(str(command))}" for command in commands[:8])
        raise line_error(
            path,
            commands[1].line,
            f"the script has {len(runs)} runs ({listed}), so which one is meant is ambiguous; choose one: "
            f"rankmesh show --run {path} --launch N",
            runs=tuple(command.line for command in commands),
        )
    return replace(runs[0], notes=(*runs[0].notes, *_given(script, path))) if runs else None


def runs_of(script: Script, path: str, marks: frozenset[str] = frozenset()) -> list[Run]:
    """Return all runs of a script. Raises ``PlanError`` for one that is in a function or in a text."""
    commands = [command for command in script.commands if _is_run(command, marks)]
    for command in commands:
        if command.within:
            raise line_error(path, command.line, f"the run is in {command.within}, which is not read; {run_it(path)}")
    return [_run(command, script, path) for command in commands]


def _run(command: Command, script: Script, path: str) -> Run:
    arguments, strays = _arguments(command)
    launch = _launch(command)
    world = _world_size(command, arguments, launch, path)
    counts = (*(launch.options if launch.name else arguments), *_environment_counts(command))
    notes = tuple(script.notes)
    return Run(command, arguments, world, strays, notes, script.defaults, script.texts, counts)


def read_arguments(text: str, path: str, marks: frozenset[str]) -> Run | None:
    r"""Return the run of a file that holds nothing but its arguments, None for another file.

    >>> str(read_arguments("--tp 4  # adjacent\n--pp 2\n", "args.txt", frozenset()).arguments[1])
    '--pp = 2'
    """
    if not _ARGUMENTS.match(text):
        return None
    # In an array, line ends and comments may be between the words.
    script = read_script(f"ARGUMENTS=({text}\n)")
    arguments, strays = _arguments(Command(script.variables["ARGUMENTS"].words, 1))
    return Run(Command((), 1), arguments, None, strays, defaults=script.defaults, texts=script.texts)


def check_unknown(run: Run, states_sizes: Callable[[str], bool], path: str) -> None:
    """Refuse a word that only bash knows, where the script writes a size that is in no known word of the command."""
    unknown = [part for word in run.command.words for part in word if part.text is None and part.runs]
    known = {part.at for word in run.command.words for part in word if part.text is not None}
    for gap in unknown[:1]:
        for place, (line, text) in run.texts.items():
            if place not in known and states_sizes(text):
                entry = Entry((gap.shown,), cut(" ".join(text.split())), line)
                raise refused(path, entry, gap.why, run_it(path))
    # A path or a setting with the output of a command in it is one word, and so is an output in quotes.
    whole = (word[0] for word in run.strays if len(word) == 1 and word[0].elsewhere)
    for part in (part for part in whole if part.split or not part.shown.startswith(("$(", "`"))):
        problem = f"the arguments {cut(part.shown)} may state sizes; {part.why}; {run_it(path)}"
        raise line_error(path, line_of((part,)), problem, received=part.shown)


def _given(script: Script, path: str) -> Iterator[tuple[int, str]]:
    """Refuse what --set gives and the script does not ask for; yield a note where the script sets it itself."""
    asked = script.asked | {*TAKEN}
    for name, given in script.given.items():
        if name not in asked:
            near = get_close_matches(name, script.asked, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it asks for {', '.join(sorted(script.asked)) or 'none'}"
            raise PlanError(
                f"{path}: the script does not ask for a variable {name}, which --set gives; {hint}",
                path=path,
                name=name,
            )
        after = script.variables.get(name, given)
        if after.lines and list(map(text_of, after.words)) != list(map(text_of, given.words)):
            yield after.lines[0], f"sets {name} itself; --set {name} is what it had before this line"


def _system(command: Command) -> str:
    line = f" {command} "
    return next((name for name, pattern in SYSTEMS.items() if re.search(pattern, line)), "")


def _is_run(command: Command, marks: frozenset[str]) -> bool:
    names = [text_of(word) or "" for word in command.words]
    if command.within.startswith(TEXT):
        names = str(command).split()
    if not names or names[0].rpartition("/")[2] in _PRINTS:
        return False
    return (
        _STARTERS.search(f" {command} ") is not None
        or any(_PROGRAM.fullmatch(name) for name in names)
        or (names[0] == "megatron" and names[1:2] in (["pt"], ["sft"], ["rlhf"]))
        or any(name.partition("=")[0] in marks or name.startswith(_TITAN) for name in names)
        or verl.starts_verl(names)
    )


def _arguments(command: Command) -> tuple[tuple[Entry, ...], tuple[Word, ...]]:
    """Return the options with their values, and the unknown words that are not values of an option."""
    entries, strays = [], []
    option: Word | None = None
    values: list[Word] = []
    for word in command.words:
        text = text_of(word)
        if text is None and (_names_unknown(word) if shown(word).startswith("-") else option is None or values):
            strays.append(word)
        elif shown(word).startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", shown(word)):
            if option is not None:
                entries.append(_entry(option, values))
            option, values = word, []
        elif option is not None:
            values.append(word)
    if option is not None:
        entries.append(_entry(option, values))
    return tuple(entries), tuple(strays)


def _names_unknown(option: Word) -> bool:
    """Return whether the name of an option is unknown, such as ``--$NAME``."""
    gap = gap_of(option)
    return gap is not None and gap.shown in shown(option).partition("=")[0]


def _entry(option: Word, values: list[Word]) -> Entry:
    name, equals, rest = shown(option).partition("=")
    lines = lines_of(option)
    found = [value_of(word) for word in values]
    if equals:
        gap = gap_of(option)
        found = [Missing(rest, gap.why, gap.runs) if gap else rest]
    also = tuple(dict.fromkeys(n for word in (option, *values[:1]) for n in lines_of(word) if n != lines[0]))
    value: object = True if not found else found[0] if len(found) == 1 else found
    default = any(part.default for word in (option, *values[:1]) for part in word)
    return Entry((name,), value, lines[0] if lines else 0, also, default)


@dataclass(frozen=True)
class _Launch:
    """The launcher of a command, its options and its unknown words; no name: the program is started directly."""

    name: str = ""
    options: tuple[Entry, ...] = ()
    strays: tuple[Word, ...] = ()


def _launch(command: Command) -> _Launch:
    line = f"{command} "
    name = next((name for name, (pattern, _) in _LAUNCHERS.items() if re.search(pattern, line)), "")
    return _Launch(name, *_of_launcher(command, name)) if name else _Launch()


def _world_size(command: Command, arguments: tuple[Entry, ...], launch: _Launch, path: str) -> Entry | None:
    launcher, options = launch.name, launch.options
    for gap in (gap for word in launch.strays if (gap := gap_of(word)) and gap.runs):
        why = f"the options {cut(gap.shown)} of {launcher} are unknown: {gap.why}"
        return Entry((launcher,), Missing(gap.shown, why, runs=True), command.line)
    for counts in _LAUNCHERS[launcher][1] if launcher else ():
        found = _product(counts, options, path)
        if found is not None:
            return found
    if launcher == "srun" and not _all_nodes(options, command):
        return None
    actors = _product(_ACTORS, arguments, path)
    if actors is not None:
        return actors
    if given := _environment_counts(command):
        key = " x ".join(f"{entry.key} {entry.value}" for entry in given)
        return Entry((key,), prod(int(entry.value) for entry in given), command.line)
    for name in ("SLURM_NTASKS", "WORLD_SIZE") if launcher == "srun" else ("WORLD_SIZE",):
        variable = command.variables.get(name)
        word = variable.words[0] if variable is not None and variable.words else ()
        text = text_of(word)
        if variable is not None and text and text.isdecimal():
            first = (*variable.lines, command.line)[0]
            also = tuple(line for line in lines_of(word) if line != first)
            return Entry((name,), int(text), first, also, any(part.default for part in word))
    return None


def _of_launcher(command: Command, launcher: str) -> tuple[tuple[Entry, ...], tuple[Word, ...]]:
    """Return the options of a launcher and its unknown words, up to the program that it starts."""
    pattern, words = _LAUNCHERS[launcher][0], [shown(word) for word in command.words]
    start = next(
        (end for end in range(1, len(words) + 1) if re.search(pattern, f"{' '.join(words[:end])} ")), len(words)
    )
    stop = start
    while stop < len(words) and not _STARTED.fullmatch(words[stop]):
        if words[stop] in _MODULE and not _OF_LAUNCHER.fullmatch("".join(words[stop + 1 : stop + 2])):
            break
        stop += 1
    found, strays = _arguments(replace(command, words=command.words[start:stop]))
    options = tuple(map(_glued, found))
    if not command.line:  # recorded
        options = _last_of_each(options)
    if launcher != "torchrun":
        return options, strays
    given = {entry.key.lstrip("-").replace("-", "_") for entry in options}
    for name in _OF_ENVIRONMENT:
        variable = command.variables.get(name)
        if variable is not None and variable.words and name.removeprefix("PET_").lower() not in given:
            options += (_entry(((Part(name, variable.lines)),), [variable.words[0]]),)
    return options, strays


def _glued(entry: Entry) -> Entry:
    """``-N2`` as ``-N 2``."""
    short = re.fullmatch(r"(-[nN])(\d+)", entry.key)
    return entry if short is None else replace(entry, path=(short[1],), value=short[2])


def _all_nodes(options: tuple[Entry, ...], command: Command) -> bool:
    """Return whether a job step runs on all nodes of the job, as far as its options say."""
    nodes = command.variables.get("SLURM_NNODES")
    text = text_of(nodes.words[0]) if nodes is not None and nodes.words else None
    return all(entry.value == text for entry in options if entry.key in ("-N", "--nodes"))


def _environment_counts(command: Command) -> tuple[Entry, ...]:
    """Return the ranks of a node and the nodes, 1 by default, of a command that takes them from its environment."""
    names = [shown(word).rpartition("/")[2] for word in command.words[:2]]  # the second after bash
    variables = next((_BY_ENVIRONMENT[name] for name in names if name in _BY_ENVIRONMENT), ())
    found = []
    for variable, default in zip(variables, (None, "1"), strict=False):
        given = command.variables.get(variable)
        word = given.words[0] if given is not None and given.words else None
        text = default if word is None else text_of(word)
        if not text or not text.isdecimal() or int(text) == 0:
            return ()
        found.append(Entry((variable,), text, (*(given.lines if given else ()), command.line)[0]))
    return tuple(found)


def _product(counts: _Counts, arguments: tuple[Entry, ...], path: str) -> Entry | None:
    """Return the world size that the launcher's own counts give; None when it states none."""
    given = [_stated(names, arguments, path) for names, _ in counts]
    if not any(given) or any(not entry and not default for entry, (_, default) in zip(given, counts, strict=True)):
        return None
    stated = [entry for entry in given if entry is not None]
    lines = list(dict.fromkeys(line for entry in stated for line in (entry.line, *entry.also)))
    for entry in stated:
        if isinstance(entry.value, Missing):
            why = f"{entry.key} is {entry.value.text}: {entry.value.why}" if entry.value.text else entry.value.why
            return Entry(entry.path, Missing(entry.value.text, why, entry.value.runs), entry.line)
        if not entry.value.isdecimal() or int(entry.value) == 0:
            why = f"{entry.key} is {entry.value}, which is not a fixed number of ranks"
            return Entry(entry.path, Missing(entry.value, why), entry.line)
    key = " x ".join(f"{entry.key} {entry.value}" for entry in stated)
    default = any(entry.default for entry in stated)
    return Entry((key,), prod(int(entry.value) for entry in stated), lines[0], tuple(lines[1:]), default)


def _stated(names: tuple[str, ...], arguments: tuple[Entry, ...], path: str) -> Entry | None:
    """One count of the launcher; the words after it are the program's."""
    same = [entry.single for entry in arguments if entry.key in names]
    for other in same[1:]:
        if other.value != same[0].value:
            rule = f"line {same[0].line} says {same[0]}"
            raise refused(path, other, rule, "keep one of the two", code="contradiction")
    if same and same[0].value is True:
        return replace(same[0], value=Missing("", f"{same[0].key} has no value"))
    return same[0] if same else None


def slurm_variables(text: str) -> dict[str, Variable]:
    """Return the variables that Slurm sets from the ``#SBATCH`` lines."""
    return {
        name: Variable(((Part(str(value), (line,)),),), False, (line,))
        for name, (value, line) in slurm.counts(text).items()
    }
