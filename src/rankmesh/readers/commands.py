"""Runs of other programs than Megatron's: what each command states of its layout.

```
verl         python -m verl.trainer.main_ppo key=value            the actor's layout
torchtitan   torchrun -m torchtitan.train --parallelism.*         what the Python config sets is not read
deepspeed    deepspeed train.py --deepspeed zero3.json            the layout of that file
vllm         vllm serve MODEL --tensor-parallel-size 4            one engine, or what --world-size has of them
sglang       sglang serve, python -m sglang.launch_server         one engine
```

Other systems are named, so that nobody looks for a mistake in the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rankmesh.core.documents import Unreadable, read_text
from rankmesh.errors import PlanError
from rankmesh.readers import deepspeed, frameworks, verl
from rankmesh.readers.documents import entries
from rankmesh.readers.reading import Entry, Missing, Read, Settled, Table, place, settle
from rankmesh.readers.run import Run, check_unknown
from rankmesh.readers.tokens import shown

__all__ = ["PROGRAMS", "Program", "check_known", "check_readable"]

_LAYOUT = "give the layout as a SPEC, such as rankmesh show tp=2,dp=4"


@dataclass(frozen=True)
class Program:
    """A program: its format, the title of its runs, whether a run is of it, and how one becomes arguments."""

    format: str
    title: str
    matches: Callable[[Run], bool]
    settle: Callable[[Run, str], Settled]


def _words(run: Run) -> list[str]:
    return [shown(word) for word in run.command.words]


def _name(entry: Entry) -> str:
    return entry.path[-1].lstrip("-").replace("-", "_")


def _with_first(entry: Entry) -> Entry:
    return replace(entry, value=entry.first)


def _with_world(settled: Settled, run: Run, path: str) -> Settled:
    settled.notes += run.notes
    if "world_size" not in settled.arguments and run.world_size and not isinstance(run.world_size.value, Missing):
        settled.add("world_size", run.world_size.value, run.world_size, path)
    return settled


# -- verl -----------------------------------------------------------------------------------------------------------


def _verl(run: Run, path: str) -> Settled:
    check_unknown(run, verl.states_sizes, path)
    options = " ".join(word for word in _words(run) if verl.SETTING.fullmatch(word) is None)
    return _with_world(verl.from_document(run.settings, path, options), run, path)


# -- torchtitan -----------------------------------------------------------------------------------------------------

_TITAN = "--parallelism."


def _titan(run: Run, path: str) -> Settled:
    """Settle ``--parallelism.*``; the sizes of a Python config (``--module``, ``--config``) are not known here."""
    check_unknown(run, lambda text: _TITAN in text, path)
    given = [entry for entry in run.arguments if entry.key.startswith(_TITAN)]
    numbers = [
        replace(entry, path=tuple(entry.key[2:].split(".")), value=int(text) if re.fullmatch(r"-?\d+", text) else text)
        for entry in given
        for text in [str(entry.first)]
    ]
    settled = _with_world(frameworks.TORCHTITAN.from_document(numbers, path), run, path)
    named = [str(_with_first(entry)) for entry in run.arguments if entry.key in ("--module", "--config")]
    if named:
        text = f"the sizes that {', '.join(named)} sets beside these are not read"
        settled.notes.append((run.command.line, text))
    return settled


# -- DeepSpeed ------------------------------------------------------------------------------------------------------

_FILE_OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")


def _file_of(run: Run) -> Entry | None:
    named = (_with_first(entry) for entry in run.arguments if entry.key in _FILE_OPTIONS)
    return next((entry for entry in named if str(entry.value).endswith(".json")), None)


def _deepspeed(run: Run, path: str) -> Settled:
    named = _file_of(run)
    assert named is not None  # noqa: S101  - it matched
    file = Path(path).parent / str(named.value)
    try:
        found = entries(read_text(file), str(file))
    except Unreadable as error:
        raise PlanError(
            f"{place(path, named.line)}: the run's layout is in {named.value}, which {error}; give the path of that "
            "file, with --world-size",
            path=path,
            line=named.line,
        ) from error
    return _with_world(deepspeed.from_document([replace(entry, line=named.line) for entry in found], path), run, path)


# -- vLLM and SGLang ------------------------------------------------------------------------------------------------


def _sizes(**names: str) -> Mapping[str, Read]:
    """Return rows of a table: each argument of a recipe, and its names on the command line."""
    return {name: Read(argument) for argument, listed in names.items() for name in listed.split()}


_VLLM = Table(
    _sizes(
        tp="tensor_parallel_size tp",
        pp="pipeline_parallel_size pp",
        dp="data_parallel_size dp",
        pcp="prefill_context_parallel_size pcp",
        dcp="decode_context_parallel_size dcp",
    ),
    harmless=("data_parallel_size_local",),
    key=_name,
)
_SGLANG = Table(
    _sizes(
        tp="tensor_parallel_size tp_size tp",
        pp="pipeline_parallel_size pp_size pp",
        attn_dp="data_parallel_size dp_size dp",
        ep="expert_parallel_size ep_size ep",
        attn_cp="attention_context_parallel_size attn_cp_size",
        moe_dp="moe_data_parallel_size moe_dp_size",
        dcp="decode_context_parallel_size dcp_size",
    ),
    harmless=("moe_dense_tp_size",),
    key=_name,
)


def _engine(run: Run, path: str, table: Table) -> Settled:
    check_unknown(run, lambda text: "parallel" in text, path)
    settled = settle(table, list(map(_with_first, run.arguments)), path)
    settled.notes += run.notes
    return settled


def _sglang(run: Run, path: str) -> Settled:
    """Settle one engine: without attention in data parallel, ``--dp`` starts engines of their own beside it."""
    settled = _engine(run, path, _SGLANG)
    if "--enable-dp-attention" not in {entry.key for entry in run.arguments}:
        replicas = settled.arguments.pop("attn_dp", 1)
        entry = next((reading for reading in settled.readings if reading.argument == "attn_dp"), None)
        settled.readings[:] = [reading for reading in settled.readings if reading.argument != "attn_dp"]
        if entry is not None and replicas > 1:
            settled.notes.append((entry.line, f"{entry} starts {replicas} engines of this layout"))
    return settled


PROGRAMS = (
    Program("verl", "a verl launch script", lambda run: verl.starts_verl(_words(run)), _verl),
    Program(
        "torchtitan",
        "a torchtitan launch script",
        lambda run: any(entry.key.startswith(_TITAN) for entry in run.arguments),
        _titan,
    ),
    Program(
        "vllm",
        "a command of vLLM",
        lambda run: run.system == "vllm",
        lambda run, path: _engine(run, path, _VLLM),
    ),
    Program("sglang", "a command of SGLang", lambda run: run.system == "sglang", _sglang),
    Program("deepspeed", "a launch script of DeepSpeed", lambda run: _file_of(run) is not None, _deepspeed),
)

# -- systems that are not read ----------------------------------------------------------------------------------------

# Beside the commands that start them: how their programs are named under another launcher.
_UNSUPPORTED_PROGRAMS = {
    "OpenRLHF": r"\sopenrlhf\.cli\.|/openrlhf/",
    "AReaL": r"[\s/]areal/|\sallocation_mode=",
    "NeMo Automodel": r"\snemo_automodel[./]",
}
_UNSUPPORTED_KEYS: Mapping[str, tuple[set[tuple[str, ...]], ...]] = {
    "NeMo Automodel": ({("distributed", "strategy"), ("distributed", "tp_size")},),
    "AReaL": ({("allocation_mode",)},),
    "OpenRLHF": ({("ds", "tensor_parallel_size")}, {("actor", "num_gpus_per_node")}),
}


def check_known(run: Run, path: str) -> None:
    """Refuse the run of a system whose sizes are not read, by its name."""
    words = f" {' '.join(_words(run))} "
    name = run.system or next((name for name, how in _UNSUPPORTED_PROGRAMS.items() if re.search(how, words)), "")
    if name and not any(program.format == name for program in PROGRAMS):
        raise _unsupported(name, place(path, run.command.line), path)


def check_readable(found: Iterable[Entry], path: str) -> None:
    """Refuse the config of a system whose sizes are not read, by its name."""
    keys = {entry.path for entry in found}
    for name, marks in _UNSUPPORTED_KEYS.items():
        if any(mark <= keys for mark in marks):
            raise _unsupported(name, path, path)


def _unsupported(name: str, where: str, path: str) -> PlanError:
    return PlanError(f"{where}: this is a run of {name}, whose sizes are not read; {_LAYOUT}", path=path, system=name)
