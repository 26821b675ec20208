"""Runs of other programs than Megatron's: what each command states of its layout.

```
verl         python -m verl.trainer.main_ppo key=value            the actor's layout
torchtitan   torchrun -m torchtitan.train --parallelism.*         over its TOML; what a Python config sets is not read
deepspeed    deepspeed train.py --deepspeed zero3.json            the layout of that file
accelerate   accelerate launch --config_file fsdp.yaml            the options over that file
llamafactory llamafactory-cli train sft.yaml                      the layout of its DeepSpeed file, else replicas
vllm         vllm serve MODEL --tensor-parallel-size 4            one engine, or what --world-size has of them
sglang       sglang serve, python -m sglang.launch_server         one engine
```

Other systems are named, so that nobody looks for a mistake in the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rankmesh.errors import PlanError
from rankmesh.readers import accelerate, deepspeed, frameworks, verl
from rankmesh.readers.documents import entries_of, found_file
from rankmesh.readers.megatron import FLAGS
from rankmesh.readers.reading import Entry, Missing, Read, Settled, Table, place, settle
from rankmesh.readers.run import Run, check_unknown
from rankmesh.readers.tokens import line_of, shown

__all__ = ["PROGRAMS", "Program", "check_known", "check_readable"]

_ACCELERATE = re.compile(r"[\s/]accelerate\s+launch\s")
_LAYOUT = "give the layout as a SPEC, such as rankmesh show tp=2,dp=4"


@dataclass(frozen=True)
class Program:
    """A program: its format, the title of its runs, whether a run is of it, and how one becomes arguments."""

    format: str
    title: str
    matches: Callable[[Run, str], bool]
    settle: Callable[[Run, str], Settled]


def _words(run: Run) -> list[str]:
    return [shown(word) for word in run.command.words]


def _with_world(settled: Settled, run: Run, path: str) -> Settled:
    settled.notes += run.notes
    if "world_size" not in settled.arguments and run.world_size and not isinstance(run.world_size.value, Missing):
        settled.add("world_size", run.world_size.value, run.world_size, path)
    return settled


def _over(settings: list[Entry], found: list[Entry]) -> list[Entry]:
    """Return the settings of a command, and of its file where the command does not set them."""
    keys = {entry.path[-1] for entry in settings}
    return [*settings, *(entry for entry in found if entry.path[-1] not in keys)]


def _typed(entry: Entry) -> Entry:
    """Return an option with its first value, as a number where it is one."""
    text = entry.first
    return replace(entry, value=int(text) if isinstance(text, str) and re.fullmatch(r"-?\d+", text) else text)


# -- verl -----------------------------------------------------------------------------------------------------------


def _verl(run: Run, path: str) -> Settled:
    check_unknown(run, verl.states_sizes, path)
    options = " ".join(word for word in _words(run) if verl.SETTING.fullmatch(word) is None)
    return _with_world(verl.from_document(run.settings, path, options), run, path)


# -- torchtitan -----------------------------------------------------------------------------------------------------

_TITAN = "--parallelism."


def _titan_file(run: Run) -> Entry | None:
    """Return the TOML that a run names, as an option or as the variable of ``run_train.sh``."""
    named = [entry.single for entry in run.arguments if entry.name == "job.config_file"]
    variable = run.command.variables.get("CONFIG_FILE") if "run_train.sh" in str(run.command) else None
    if variable is not None and variable.words:
        named.append(Entry(("CONFIG_FILE",), shown(variable.words[0]), (*variable.lines, run.command.line)[0]))
    return named[0] if named else None


def _titan(run: Run, path: str) -> Settled:
    """Settle ``--parallelism.*`` over its TOML; a Python config (``--module``, ``--config``) is not read."""
    check_unknown(run, lambda text: _TITAN in text, path)
    given = [_typed(entry) for entry in run.arguments if entry.key.startswith(_TITAN)]
    settings = [replace(entry, path=tuple(entry.key.split("."))) for entry in given]
    named = _titan_file(run)
    if named is not None and found_file(path, named.value):
        settings = _over(settings, entries_of(named, path))
    settled = _with_world(frameworks.TORCHTITAN.from_document(settings, path), run, path)
    others = [str(entry.single) for entry in run.arguments if entry.key in ("--module", "--config")]
    if named is not None and not found_file(path, named.value):
        others.append(str(named))
    if others:
        text = f"the sizes that {', '.join(others)} sets beside these are not read"
        settled.notes.append((run.command.line, text))
    return settled


def _is_titan(run: Run, path: str) -> bool:
    named = _titan_file(run)
    return any(entry.key.startswith(_TITAN) for entry in run.arguments) or (
        named is not None and found_file(path, named.value) is not None
    )


# -- DeepSpeed, Accelerate and LLaMA-Factory --------------------------------------------------------------------------

_FILE_OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")
_ENGINES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}


def _file_of(run: Run) -> Entry | None:
    named = (entry.single for entry in run.arguments if entry.key in _FILE_OPTIONS)
    return next((entry for entry in named if str(entry.value).endswith(".json")), None)


def _deepspeed(run: Run, path: str) -> Settled:
    named = _file_of(run)
    found = entries_of(named, path) if named else []
    settled = deepspeed.from_document(found, path)
    settled.of_file = found
    return _with_world(settled, run, path)


def _accelerate_options(run: Run) -> list[Entry]:
    """Return what ``accelerate launch`` is given, as the keys of its YAML."""
    options = [replace(_typed(entry), path=(entry.name,)) for entry in run.counts]
    engines = [
        replace(entry, path=("distributed_type",), value=_ENGINES[entry.key])
        for entry in options
        if entry.key in _ENGINES
    ]
    return [
        *(entry for entry in options if entry.key in accelerate.TABLE.reads or entry.key == "config_file"),
        *engines,
    ]


def _is_accelerate(run: Run, path: str) -> bool:
    """Return whether a run has a size for ``accelerate launch``, or a file of its settings."""
    if _ACCELERATE.search(f" {run.command}") is None or not FLAGS.isdisjoint(entry.key for entry in run.arguments):
        return False
    return any(
        found_file(path, entry.value) if entry.key == "config_file" else entry.key.startswith("parallelism_config_")
        for entry in _accelerate_options(run)
    )


def _accelerate(run: Run, path: str) -> Settled:
    options = _accelerate_options(run)
    named = next((entry for entry in options if entry.key == "config_file"), None)
    return accelerate.from_document(_over(options, entries_of(named, path) if named else []), path)


def _factory(run: Run, path: str) -> Settled:
    """Settle a run of LLaMA-Factory: its YAML names DeepSpeed's file, else every rank is a replica."""
    files = [word for word in run.command.words if shown(word).endswith((".yaml", ".yml"))]
    found = [entry for word in files[:1] for entry in entries_of(Entry((), shown(word), line_of(word)), path)]
    named = next((entry for entry in found if entry.path == ("deepspeed",) and entry.value), None)
    settled = deepspeed.from_document(entries_of(named, path), path) if named else Settled()
    settled.arguments["recipe"] = "deepspeed" if named else "replicas"
    return _with_world(settled, run, path)


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
    harmless=("data_parallel_size_local", "enable_expert_parallel"),
    key=lambda entry: entry.name,
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
    harmless=("moe_dense_tp_size", "enable_expert_parallel"),
    key=lambda entry: entry.name,
)


def _engine(run: Run, path: str, table: Table) -> Settled:
    check_unknown(run, lambda text: "parallel" in text, path)
    settled = settle(table, [entry.single for entry in run.arguments], path)
    settled.notes += run.notes
    return settled


def _sglang(run: Run, path: str) -> Settled:
    """Settle one engine: without attention in data parallel, ``--dp`` starts engines of their own beside it."""
    settled = _engine(run, path, _SGLANG)
    if "--enable-dp-attention" not in {entry.key for entry in run.arguments}:
        replicas = settled.arguments.get("attn_dp", 1)
        settled.drop("attn_dp", f"starts {replicas} engines of this layout" if replicas > 1 else "")
    return settled


PROGRAMS = (
    Program("verl", "a verl launch script", lambda run, _: verl.starts_verl(_words(run)), _verl),
    Program("torchtitan", "a torchtitan launch script", _is_titan, _titan),
    Program(
        "vllm", "a command of vLLM", lambda run, _: run.system == "vllm", lambda run, path: _engine(run, path, _VLLM)
    ),
    Program("sglang", "a command of SGLang", lambda run, _: run.system == "sglang", _sglang),
    Program("llamafactory", "a command of LLaMA-Factory", lambda run, _: run.system == "llamafactory", _factory),
    Program("deepspeed", "a launch script of DeepSpeed", lambda run, _: _file_of(run) is not None, _deepspeed),
    Program("accelerate", "a command of Accelerate", _is_accelerate, _accelerate),
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
