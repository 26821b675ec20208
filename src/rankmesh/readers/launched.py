"""The layout of a launch script that is run with recorders in the place of its launchers: ``rankmesh show --run``.

The script runs as bash runs it, so its conditions, functions and files need no reader. Of all launches, those that
start training are read; if they have different layouts, one has to be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rankmesh.errors import PlanError, cut
from rankmesh.readers.config import Config, made
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.launches import recorded_launch, starts_verl
from rankmesh.readers.options import Options
from rankmesh.readers.recording.record import SECONDS, Launch, Recording, chosen_sandbox, record

__all__ = ["run_config"]

_LISTED = 8
_CONFIGS = (".yaml", ".yml", ".toml", ".json")


def run_config(
    path: Path | str,
    arguments: Sequence[str] = (),
    *,
    world_size: int | None = None,
    variables: Mapping[str, str] | None = None,
    launch: int | None = None,
    sandbox: str | None = None,
    seconds: float = SECONDS,
) -> Config:
    """Run a script in a sandbox, and return the plan of the run that it starts.

    ``arguments`` are passed to the script; ``variables`` are added to its environment. ``launch``: which of several
    launches is meant, from 1 on. ``seconds``: when the script is stopped. ``sandbox``: ``namespaces``,
    ``bubblewrap``, or ``none``, in which the script runs for real; by default the strongest one that works here.
    Raises ``PlanError``, also where the machine allows no sandbox and ``none`` is not named.
    """
    name = str(path)
    kind = chosen_sandbox(sandbox)
    found = record(Path(path), arguments, variables, kind=kind, seconds=seconds)
    runs = [
        (each, run)
        for each in found.launches
        if not each.idle and (run := recorded_launch(each, name, FLAGS)) is not None
    ]
    if not runs:
        raise PlanError(f"{name}: {_nothing(found, seconds)}", path=name)
    if launch is not None:
        if not 1 <= launch <= len(runs):
            raise PlanError(f"{name}: launch {launch} of {len(runs)}; choose one of 1 to {len(runs)}", path=name)
        config = made(runs[launch - 1][1], f"launch {launch} of {len(runs)}", world_size=world_size)
    else:
        config = _the_one(runs, name, world_size)
    return replace(config, notes=(*config.notes, *_notes(found, runs, seconds)))


def _the_one(runs: Sequence[tuple[Launch, Options]], path: str, world_size: int | None) -> Config:
    """Return the plan that all launches have; raises ``PlanError`` where they differ.

    Launches without a parallel size, such as of an evaluation, count only where no other has one.
    """
    stating = [
        (each, run) for each, run in runs if starts_verl(each.words) or any(option.key in FLAGS for option in run.flags)
    ]
    configs = [(each, _read(run, world_size)) for each, run in stating or runs]
    first = configs[0][1]
    if any(_key(config) != _key(first) for _, config in configs):
        numbered = [(number, each) for number, (each, _) in enumerate(runs, 1)]
        meant = {id(each) for each, _ in configs}
        listed = "; ".join(f"{number}: {cut(str(each))}" for number, each in numbered if id(each) in meant)
        raise PlanError(
            f"{path}: the script starts {len(configs)} runs of different layouts ({listed}); choose one with --launch",
            path=path,
        )
    if isinstance(first, PlanError):
        raise first
    return first


def _read(run: Options, world_size: int | None) -> Config | PlanError:
    try:
        return made(run, "a run of this script", world_size=world_size)
    except PlanError as error:
        return error


def _key(config: Config | PlanError) -> object:
    return str(config) if isinstance(config, PlanError) else (config.format, config.plan)


def _nothing(found: Recording, seconds: float) -> str:
    """Explain why nothing was recorded, and what to do."""
    idle = next((each for each in found.launches if each.idle), None)
    if idle is not None:
        failed = "; ".join(f"bash: line {line}: {text}" for line, text in found.failed[:_LISTED])
        why = f"bash said: {failed}" if failed else "and its shell ended without an error"
        return f"the shell of {cut(str(idle))} started no launcher; {why}; make there what it needs, or give a SPEC"
    others = "; ".join(cut(str(each)) for each in found.launches[:_LISTED])
    if found.status is None:
        return f"the script was stopped after {seconds:g} s, and started no training by then; give a shorter one"
    last = f", and its last words are: {found.error}" if found.error else ""
    did = f"started {others}, which is not training" if others else "started no launcher"
    file = next((word for each in found.launches for word in each.words if word.endswith(_CONFIGS)), None)
    remedy = "give it the arguments that it needs"
    if file is not None:
        remedy = f"if {cut(file)} states the layout, give that file, with --world-size"
    return f"the script {did} (exit status {found.status}{last}); {remedy}"


def _notes(found: Recording, runs: Sequence[tuple[Launch, Options]], seconds: float) -> list[tuple[int, str]]:
    """Return notes of what may change a size on the cluster: lines that failed, programs that did not run."""
    notes = [(line, f"bash: {text}") for line, text in found.failed]
    read = {id(each) for each, _ in runs}
    unrun = dict.fromkeys(cut(str(each)) for each in found.launches if each.captured and id(each) not in read)
    notes += [(0, f"{words} did not run, so its output is empty") for words in unrun]
    if found.status is None:
        notes.append((0, f"the script was stopped after {seconds:g} s; later launches are not recorded"))
    return notes
