"""Megatron: a launch script, a file of its arguments, or a YAML of them.

Source: ``megatron/training/arguments.py`` of NVIDIA Megatron-LM for the names, ``initialize.py`` for what each of them
does to the groups. In a YAML the names have underscores, and may be in sections (``model_parallel:``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rankmesh.errors import PlanError, cut
from rankmesh.readers.reading import (
    NO_LAYOUT,
    Entry,
    Missing,
    Read,
    Refused,
    Settled,
    Table,
    add_world,
    flag,
    line_error,
    refused,
    report,
    run_it,
    settle,
    whole,
)
from rankmesh.readers.run import Run, check_unknown
from rankmesh.readers.tokens import Part, gap_of, line_of, shown

__all__ = ["FLAGS", "TABLE", "from_document", "from_run", "matches"]


def _sizes(entry: Entry, path: str) -> tuple[int, ...] | None:
    if entry.value is None:
        return None
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    sizes = [whole(replace(entry, value=value), path) for value in values]
    return tuple(size for size in sizes if size is not None)


def _one(entry: Entry, path: str) -> int | None:
    """Return a single size; in a script, words that follow it belong to the program."""
    return whole(entry.single, path)


_READS = {
    "tensor_model_parallel_size": Read("tp", _one),
    "context_parallel_size": Read("cp", _one),
    "pipeline_model_parallel_size": Read("pp", _one),
    "expert_model_parallel_size": Read("ep", _one),
    "expert_tensor_parallel_size": Read("etp", _one),
    "data_parallel_size": Read("dp", _one),
    "world_size": Read("world_size", _one),
    "use_tp_pp_dp_mapping": Read("order", flag("tp-cp-ep-pp-dp")),
    "num_distributed_optimizer_instances": Read("optimizer_instances", _one),
    "hierarchical_context_parallel_sizes": Read("hierarchical_cp", _sizes),
    "hybrid_context_parallel": Read("hybrid_cp", flag(True)),
    "ds_sequence_parallel_size": Read("sp", _one),
    "moe_expert_parallel_size": Read("moe_ep", _one),
}

_REFUSED = {
    "model_parallel_size": Refused("Megatron itself refuses this old name of --tensor-model-parallel-size", (None,)),
    "encoder_tensor_model_parallel_size": Refused("an encoder with sizes of its own is a second mesh in the world"),
    "encoder_pipeline_model_parallel_size": Refused("an encoder with sizes of its own is a second mesh in the world"),
    "pipeline_model_parallel_split_rank": Refused("a split pipeline adds its split stages to the embedding groups"),
    "gtp_weight_remat_size": Refused("it cuts the data-parallel groups by an axis of its own"),
    "expert_gtp_weight_remat_size": Refused("it cuts the expert data-parallel groups by an axis of its own"),
    "tensor_parallel_num_weight_shards": Refused("it cuts the data-parallel groups by an axis of its own", (None,)),
    "expert_tensor_parallel_num_weight_shards": Refused("it cuts the expert groups by an axis of its own", (None,)),
    "use_mp_args_from_checkpoint_args": Refused(
        "the sizes then come from the checkpoint, which is not read", (None, False)
    ),
    "hetero_process_meshes": Refused("each of its meshes has sizes of its own", (None,)),
    "yaml_cfg": Refused("the arguments are in that file; give its path", (None,)),
}

_HARMLESS = (
    "sequence_parallel", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "distributed_timeout_minutes",
    "pipeline_model_parallel_comm_backend", "ds_sequence_parallel_fpdt_chunk_size",
)  # fmt: skip


# The counts of ranks in a YAML of NeMo.
_TRAINER = (("trainer", "num_nodes"), ("trainer", "devices"))
# NeMo's names of checkpoints, which have the product of two sizes in them.
_CHECKPOINTS = "checkpoint_callback_params"
# What names the recipe or config of settings.
_RECIPES = ("--recipe", "--config-name", "--config_name", "--config-path", "--config")
# Arguments of the engine that serves rollouts, beside those of training.
_ENGINES = ("sglang_", "vllm_", "rollout_", "infer_")


def _key(entry: Entry) -> str | None:
    return None if entry.name.startswith(_ENGINES) else entry.name


TABLE = Table(_READS, _REFUSED, _HARMLESS, _key)
_NAMES = [name for name in (*_READS, *_REFUSED) if name != "world_size"]
# As Megatron spells them, and as ms-swift does.
FLAGS = frozenset(["--" + name.replace("_", "-") for name in _NAMES] + ["--" + name for name in _NAMES])
_OPTION = re.compile(r"--[\w-]+")
_PROGRAM = re.compile(r"(.*[/.])?pretrain_\w+(\.py)?")
_CONFIG = re.compile(r"[^=]+\.(ya?ml|toml|json)")
_LONG = ["--" + name.replace("_", "-") for name in list(_READS)[:5]]
_SWITCHES = {
    "use_tp_pp_dp_mapping",
    "hybrid_context_parallel",
    "use_mp_args_from_checkpoint_args",
    "sequence_parallel",
    "use_sharp",
}
# What shapes a model and its batch in every run of Megatron, whose sizes may all be its defaults, which are 1.
_MODEL = {"--num-layers", "--hidden-size", "--num-attention-heads", "--micro-batch-size", "--seq-length"}
_MARKS = frozenset(_READS) - {"world_size", "data_parallel_size", "context_parallel_size"}


def matches(entries: Iterable[Entry]) -> bool:
    """Return whether a document has an argument that only Megatron has, or its model and both of its batches."""
    names = {_key(entry) for entry in _training(entries)}
    return (
        not _MARKS.isdisjoint(names) or {"micro_batch_size", "global_batch_size", "num_layers", "hidden_size"} <= names
    )


def _training(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries outside of engines and checkpoints, which name other sizes as Megatron does."""
    found = [entry for entry in entries if _CHECKPOINTS not in entry.path]
    engines = {entry.path[:-1] for entry in found if entry.path[-1] == "gpu_memory_utilization"}
    return [entry for entry in found if entry.path[:-1] not in engines]


def from_document(entries: list[Entry], path: str) -> Settled:
    """Return the arguments of a YAML; NeMo's has the ranks of its trainer, which is Lightning's."""
    settled = settle(TABLE, _training(entries), path)
    # Primus' model and defaults of a module, which its overrides go before.
    settled.notes += [
        (entry.line, f"{entry} is a file of its own, which is not read; it may set sizes")
        for entry in entries
        if entry.path[0] == "modules" and entry.path[-1] in ("model", "config") and str(entry.value).endswith(".yaml")
    ]
    if "world_size" not in settled.arguments:
        add_world(settled, entries, _TRAINER, path)
    return settled


def from_run(run: Run, path: str) -> Settled:
    """Return the arguments of a launch script's run."""
    check_unknown(run, lambda text: not FLAGS.isdisjoint(_OPTION.findall(text)), path)
    arguments = [_switched(entry) for entry in run.arguments if entry.key.startswith("--")]
    _check_short(arguments, path)
    if _PROGRAM.fullmatch(run.program) and not run.by_swift:
        _check_hyphens(arguments, path)
    overrides = [entry for entry in run.settings if len(entry.path) > 1 and entry.name in _READS]
    if not overrides and not any(entry.key in FLAGS for entry in arguments):
        _check_sizes(run, arguments, path)
    settled = _deepspeed(settle(TABLE, [*arguments, *overrides], path), path)
    if run.by_swift and "ep" in settled.arguments and "etp" not in settled.arguments:
        settled.arguments["etp"] = 1
        settled.notes.append((run.command.line, "expert_tensor_parallel_size is 1, the default of ms-swift"))
    if overrides:
        _check_overrides(run, settled, path)
    settled.notes += run.notes
    for word in run.strays:
        text = f"{_written(word)} is unknown; arguments that it adds are not read"
        settled.notes.append((line_of(word), text))
    if run.world_size is not None and not isinstance(run.world_size.value, Missing):
        settled.add("world_size", run.world_size.value, run.world_size, path)
    used = {line for reading in settled.readings for line in (reading.line, *reading.also)}
    settled.notes += [(line, text) for line, text in run.defaults.items() if line in used]
    return settled


def _check_overrides(run: Run, settled: Settled, path: str) -> None:
    """Note that a recipe, which is not read, has what the settings leave out (Megatron-Bridge, NeMo)."""
    named = next((entry for entry in run.arguments if entry.key in _RECIPES), None)
    recipe = str(named.single) if named is not None else "the recipe of the program"
    entry = settled.reading("ep")
    if entry is not None and settled.arguments["ep"] > 1 and "etp" not in settled.arguments:
        rule = f"{recipe} may set expert_tensor_parallel_size, and is not read"
        raise refused(path, entry, rule, f"add {entry.key.replace('expert_model', 'expert_tensor')}=1, or what it is")
    line = run.command.line
    settled.notes.append((line, f"{recipe} is not read: it may set the sizes that the command does not set"))
    add_world(settled, run.settings, _TRAINER, path)


def _deepspeed(settled: Settled, path: str) -> Settled:
    """Turn Megatron-DeepSpeed's sequence and expert axes into DeepSpeed's where only data is beside them."""
    sizes = settled.arguments
    separate = {name: size for name in ("sp", "moe_ep") if (size := sizes.pop(name, 1)) > 1}
    if not separate:
        return settled
    if len(separate) > 1 or max(sizes.get("tp", 1), sizes.get("pp", 1)) > 1:
        raise PlanError(
            f"{path}: no recipe has DeepSpeed's sequence or expert axis beside another of the sizes "
            f"{', '.join(str(reading) for reading in settled.readings)}; describe the layout with axes",
            path=path,
        )
    for name in ("tp", "pp"):
        sizes.pop(name, None)
    sizes.update(
        {"recipe": "sequences", "sp": separate["sp"]}
        if "sp" in separate
        else {"recipe": "deepspeed", "ep": separate["moe_ep"]}
    )
    return settled


def _check_sizes(run: Run, arguments: list[Entry], path: str) -> None:
    """Refuse a run without a size, unless its program is Megatron's and all its arguments are known."""
    line = run.command.line
    by_megatron = _PROGRAM.fullmatch(run.program) or (run.by_swift and shown(run.command.words[0]) == "megatron")
    if not by_megatron and len(_MODEL & {entry.key for entry in arguments}) < len(_MODEL) - 1:
        raise line_error(
            path,
            line,
            f"the run has no argument of Megatron ({_config(run, arguments)}); a launch script is read for Megatron's "
            "arguments; give the config file of the run, with --world-size",
            code=NO_LAYOUT,
        )
    for word in run.strays:
        written, gap = _written(word), gap_of(word)
        problem = f"the run has no parallel size, but the arguments {written}; {gap.why if gap else 'they are unknown'}"
        raise line_error(path, line_of(word), f"{problem}, so they may state sizes; {run_it(path)}", received=written)


def _switched(entry: Entry) -> Entry:
    """Make a switch true: words after it are the program's."""
    return replace(entry, value=True) if entry.name in _SWITCHES else entry


def _written(word: tuple[Part, ...]) -> str:
    return cut("".join(part.shown or part.text or "" for part in word))


def _config(run: Run, arguments: list[Entry]) -> str:
    options = [entry for entry in arguments if "config" in entry.key]
    named = [f"{entry.key} = {entry.first}" for entry in options]
    files = [word for word in map(shown, run.command.words) if _CONFIG.fullmatch(word)]
    return f"it names {cut((named or files)[0])}" if named or files else "it names no config file"


def _check_hyphens(arguments: list[Entry], path: str) -> None:
    """Refuse ``--tensor_model_parallel_size``, which Megatron's parser does not know."""
    for entry in arguments:
        if "_" in entry.key and entry.key in FLAGS:
            name = entry.key.replace("_", "-")
            rule = "Megatron's parser does not know this spelling"
            report(refused(path, entry.single, rule, f"write {name}", code="unknown-size", fix=name))


def _check_short(arguments: list[Entry], path: str) -> None:
    """Refuse ``--tensor-model 2``, which Python's parser takes for the option that begins so."""
    for entry in arguments:
        meant = next((name for name in _LONG if name.startswith(entry.key) and name != entry.key), "")
        if meant and entry.key.count("-") > len("--"):
            raise refused(path, entry, f"this is the beginning of {meant}", "write the whole name")
