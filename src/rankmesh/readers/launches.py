"""Commands of a launch script that start training or serving: launcher, world size, flags of the program.

A file of flags alone is a command whose launcher is not known.

```
torchrun --nproc_per_node 8 --nnodes 4        32 ranks; also python -m torch.distributed.run and .launch
srun -n 32 python ...                         32 ranks; -N 4 --ntasks-per-node 8 is the same
accelerate launch --num_processes 32          32 ranks
deepspeed --num_gpus 8 --num_nodes 4          32 ranks
#SBATCH --nodes=4                             gives SLURM_NNODES and related variables their values
```

>>> found = read_launch("torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 4", "run.sh")
>>> found.world.value, [str(option) for option in found.flags]
(8, ['--nproc_per_node = 8', '--tensor-model-parallel-size = 4'])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING

from rankmesh.errors import PlanError, cut
from rankmesh.readers.options import Option, Options, line_error, refused, run_it
from rankmesh.readers.script import TAKEN, TEXT, Command, Script, Variable, read_script
from rankmesh.readers.tokens import Missing, Part, Word, gap_of, line_of, lines_of, shown, text_of, value_of
from rankmesh.readers.tools import slurm

if TYPE_CHECKING:
    from rankmesh.readers.recording.record import Launch

__all__ = [
    "check_unknown", "launches_of", "program", "read_flags", "read_launch", "recorded_launch", "slurm_variables",
    "starts_verl", "system", "typed",
]  # fmt: skip

_VERL = re.compile(r"(.*[./])?(verl|recipe)[./](.*[./])?(main_(ppo|dapo)|fully_async_main|\w*sft_trainer\w*)(\.py)?")
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
# What torchrun takes from its environment where it is not given the option.
_OF_ENVIRONMENT = ("PET_NPROC_PER_NODE", "PET_NNODES")
_STARTS_RANKS = ("torchrun", "accelerate", "deepspeed", "msrun")
# Systems with launchers of their own, and the commands that start them.
_SYSTEMS: Mapping[str, str] = {
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
_STARTERS = re.compile("|".join([*(_LAUNCHERS[name][0] for name in _STARTS_RANKS), *_SYSTEMS.values()]))
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


def recorded_launch(launch: Launch, path: str, marks: frozenset[str] = frozenset()) -> Options | None:
    """Return the options of a recorded launch that starts training, None for another command."""
    known = {name: Variable(((Part(value, ()),),), False, ()) for name, value in launch.environment.items()}
    command = Command(tuple((Part(word, ()),) for word in launch.words), 0, known)
    if not _starts(command, marks):
        return None
    options = _options(command, Script({}, {}), path)
    # A count may be what this machine answers (nproc), which --world-size overrules.
    world = options.world and replace(options.world, line=0, default=not isinstance(options.world.value, Missing))
    return replace(options, world=world, counts=(), notes=_given_again(_flags(command)[0], marks))


def _last_of_each(flags: tuple[Option, ...]) -> dict[str, Option]:
    """Return the last of each flag that is given twice, as programs take it."""
    return {option.key.replace("_", "-"): option for option in flags}


def _given_again(flags: tuple[Option, ...], marks: frozenset[str]) -> tuple[tuple[int, str], ...]:
    """Return a note for each size that a later one overrules."""
    last = _last_of_each(flags)
    pairs = [(option, last[option.key.replace("_", "-")]) for option in flags if option.key in marks]
    return tuple((0, f"{option} is given again; {of} counts") for option, of in pairs if option.value != of.value)


def read_launch(
    text: str, path: str, marks: frozenset[str] = frozenset(), given: Mapping[str, str] | None = None
) -> Options | None:
    """Return the options of the one launch of a script, None if it starts none; ``marks`` are flags of training.

    ``given`` are variables of the environment: they beat defaults, and are used where the script leaves one open.
    """
    script = read_script(text, slurm_variables(text), given)
    found = launches_of(script, path, marks)
    if len(found) > 1:
        commands = [each.command for each in found]
        listed = "; ".join(f"line {command.line}: {cut(str(command))}" for command in commands[:8])
        raise line_error(
            path,
            commands[1].line,
            f"the script has {len(found)} runs ({listed}), so which one is meant is ambiguous; choose one: "
            f"rankmesh show --run {path} --launch N",
            runs=tuple(command.line for command in commands),
        )
    return replace(found[0], notes=(*found[0].notes, *_given(script, path))) if found else None


def launches_of(script: Script, path: str, marks: frozenset[str] = frozenset()) -> list[Options]:
    """Return all launches of a script. Raises ``PlanError`` for one that is in a function or in a text."""
    commands = [command for command in script.commands if _starts(command, marks)]
    for command in commands:
        if command.within:
            raise line_error(path, command.line, f"the run is in {command.within}, which is not read; {run_it(path)}")
    return [_options(command, script, path) for command in commands]


def _options(command: Command, script: Script, path: str) -> Options:
    flags, strays = _flags(command)
    flags = flags if command.line else tuple(_last_of_each(flags).values())  # recorded
    line = f"{command} "
    launcher = next((name for name, (pattern, _) in _LAUNCHERS.items() if re.search(pattern, line)), "")
    counts, unknown = _of_launcher(command, launcher) if launcher else (flags, ())
    made = Options(path, flags, command, None, counts, strays, tuple(script.notes), script.defaults, script.texts)
    world = _world(made, launcher, unknown)
    return replace(made, world=world, counts=(*counts, *_environment_counts(command)))


def read_flags(text: str, path: str) -> Options | None:
    r"""Return the options of a file that holds nothing but flags, None for another file.

    >>> str(read_flags("--tp 4  # adjacent\n--pp 2\n", "args.txt").flags[1])
    '--pp = 2'
    """
    if not _ARGUMENTS.match(text):
        return None
    # In an array, line ends and comments may be between the words.
    script = read_script(f"ARGUMENTS=({text}\n)")
    flags, strays = _flags(Command(script.variables["ARGUMENTS"].words, 1))
    return Options(path, flags, Command((), 1), strays=strays, defaults=script.defaults, texts=script.texts)


def check_unknown(options: Options, states_sizes: Callable[[str], bool]) -> None:
    """Refuse a word that only bash can expand if the script has a size that is in no other word of the command."""
    path, parts = options.path, [part for word in options.command.words for part in word]
    known = {part.at for part in parts if part.text is not None}
    for gap in [part for part in parts if part.text is None and part.runs][:1]:
        for place, (line, text) in options.texts.items():
            if place not in known and states_sizes(text):
                option = Option((gap.shown,), cut(" ".join(text.split())), line)
                raise refused(path, option, gap.why, run_it(path))
    # A path or a setting with the output of a command in it is one word, and so is an output in quotes.
    whole = (word[0] for word in options.strays if len(word) == 1 and word[0].elsewhere)
    for part in (part for part in whole if part.split or not part.shown.startswith(("$(", "`"))):
        problem = f"the arguments {cut(part.shown)} may state sizes; {part.why}; {run_it(path)}"
        raise line_error(path, line_of((part,)), problem, received=part.shown)


def _given(script: Script, path: str) -> Iterator[tuple[int, str]]:
    """Refuse a variable of --set that the script does not use; yield a note for one that the script sets itself."""
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


def system(command: Command) -> str:
    """Return the system of ``_SYSTEMS`` that a command starts, empty for none."""
    line = f" {command} "
    return next((name for name, pattern in _SYSTEMS.items() if re.search(pattern, line)), "")


def program(options: Options) -> str:
    """Return the file or the module that a command starts, empty where none is named."""
    words = options.words
    for number, word in enumerate(words):
        named = word.endswith(".py") or (number and words[number - 1] in _MODULE)
        if named and not _OF_LAUNCHER.fullmatch(word):
            return word
    return ""


def starts_verl(words: Iterable[str]) -> bool:
    """Return whether a command starts one of verl's trainers, or has a setting of its actor."""
    return any(_VERL.fullmatch(word) or word.lstrip("+").startswith("actor_rollout_ref.actor.") for word in words)


def typed(option: Option) -> Option:
    """Return a flag with its first value, as a number where it is one."""
    text = option.first
    return replace(option, value=int(text) if isinstance(text, str) and re.fullmatch(r"-?\d+", text) else text)


def _starts(command: Command, marks: frozenset[str]) -> bool:
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
        or starts_verl(names)
    )


def _flags(command: Command) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
    """Return the flags with their values, and the unknown words that are not values of one."""
    found, strays = [], []
    flag: Word | None = None
    values: list[Word] = []
    for word in command.words:
        text = text_of(word)
        if text is None and (_names_unknown(word) if shown(word).startswith("-") else flag is None or values):
            strays.append(word)
        elif shown(word).startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", shown(word)):
            if flag is not None:
                found.append(_option(flag, values))
            flag, values = word, []
        elif flag is not None:
            values.append(word)
    if flag is not None:
        found.append(_option(flag, values))
    return tuple(found), tuple(strays)


def _names_unknown(flag: Word) -> bool:
    """Return whether the name of a flag is unknown, such as ``--$NAME``."""
    gap = gap_of(flag)
    return gap is not None and gap.shown in shown(flag).partition("=")[0]


def _option(flag: Word, values: list[Word]) -> Option:
    name, equals, rest = shown(flag).partition("=")
    lines = lines_of(flag)
    found = [value_of(word) for word in values]
    if equals:
        gap = gap_of(flag)
        found = [Missing(rest, gap.why, gap.runs) if gap else rest]
    also = tuple(dict.fromkeys(n for word in (flag, *values[:1]) for n in lines_of(word) if n != lines[0]))
    value: object = True if not found else found[0] if len(found) == 1 else found
    default = any(part.default for word in (flag, *values[:1]) for part in word)
    return Option((name,), value, lines[0] if lines else 0, also, default)


def _world(options: Options, launcher: str, unknown: Sequence[Word]) -> Option | None:
    """Return the ranks that a command starts, None where it states none; ``unknown``: words of its launcher."""
    command, path = options.command, options.path
    for gap in (gap for word in unknown if (gap := gap_of(word)) and gap.runs):
        why = f"the options {cut(gap.shown)} of {launcher} are unknown: {gap.why}"
        return Option((launcher,), Missing(gap.shown, why, runs=True), command.line)
    for counts in _LAUNCHERS[launcher][1] if launcher else ():
        found = _product(counts, options.counts, path)
        if found is not None:
            return found
    if launcher == "srun" and not _all_nodes(options.counts, command):
        return None
    if (actors := _product(_ACTORS, options.flags, path)) is not None:
        return actors
    if given := _environment_counts(command):
        key = " x ".join(f"{option.key} {option.value}" for option in given)
        return Option((key,), prod(int(option.value) for option in given), command.line)
    for name in ("SLURM_NTASKS", "WORLD_SIZE") if launcher == "srun" else ("WORLD_SIZE",):
        word, first = command.variable(name)
        text = text_of(word)
        if text and text.isdecimal():
            also = tuple(line for line in lines_of(word) if line != first)
            return Option((name,), int(text), first, also, any(part.default for part in word))
    return None


def _of_launcher(command: Command, launcher: str) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
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
    found, strays = _flags(replace(command, words=command.words[start:stop]))
    options = tuple(map(_glued, found))
    if not command.line:  # recorded
        options = tuple(_last_of_each(options).values())
    if launcher != "torchrun":
        return options, strays
    given = {option.key.lstrip("-").replace("-", "_") for option in options}
    for name in _OF_ENVIRONMENT:
        word, _ = command.variable(name)
        if word and name.removeprefix("PET_").lower() not in given:
            options += (_option((Part(name, command.variables[name].lines),), [word]),)
    return options, strays


def _glued(option: Option) -> Option:
    """Return ``-N2`` as ``-N 2``."""
    short = re.fullmatch(r"(-[nN])(\d+)", option.key)
    return option if short is None else replace(option, path=(short[1],), value=short[2])


def _all_nodes(options: tuple[Option, ...], command: Command) -> bool:
    """Return whether a job step runs on all nodes of the job by its options."""
    nodes, _ = command.variable("SLURM_NNODES")
    text = text_of(nodes) if nodes else None
    return all(option.value == text for option in options if option.key in ("-N", "--nodes"))


def _environment_counts(command: Command) -> tuple[Option, ...]:
    """Return the ranks of a node and the nodes, 1 by default, of a command that takes them from its environment."""
    names = [shown(word).rpartition("/")[2] for word in command.words[:2]]  # the second after bash
    variables = next((_BY_ENVIRONMENT[name] for name in names if name in _BY_ENVIRONMENT), ())
    found = []
    for name, default in zip(variables, (None, "1"), strict=False):
        word, line = command.variable(name)
        text = text_of(word) if word else default
        if not text or not text.isdecimal() or int(text) == 0:
            return ()
        found.append(Option((name,), text, line))
    return tuple(found)


def _product(counts: _Counts, arguments: tuple[Option, ...], path: str) -> Option | None:
    """Return the world size that the launcher's own counts give; None when it states none."""
    given = [_stated(names, arguments, path) for names, _ in counts]
    if not any(given) or any(not option and not default for option, (_, default) in zip(given, counts, strict=True)):
        return None
    stated = [option for option in given if option is not None]
    lines = list(dict.fromkeys(line for option in stated for line in (option.line, *option.also)))
    for option in stated:
        if isinstance(option.value, Missing):
            why = f"{option.key} is {option.value.text}: {option.value.why}" if option.value.text else option.value.why
            return Option(option.path, Missing(option.value.text, why, option.value.runs), option.line)
        if not option.value.isdecimal() or int(option.value) == 0:
            why = f"{option.key} is {option.value}, which is not a fixed number of ranks"
            return Option(option.path, Missing(option.value, why), option.line)
    key = " x ".join(f"{option.key} {option.value}" for option in stated)
    default = any(option.default for option in stated)
    return Option((key,), prod(int(option.value) for option in stated), lines[0], tuple(lines[1:]), default)


def _stated(names: tuple[str, ...], arguments: tuple[Option, ...], path: str) -> Option | None:
    """Return one count of the launcher; further words belong to the program."""
    same = [option.single for option in arguments if option.key in names]
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
