"""Megatron: a launch script, a file of its arguments, or a YAML of them.

Source: ``megatron/training/arguments.py`` of NVIDIA Megatron-LM for the names, ``initialize.py`` for what each of them
does to the groups. In a YAML the names have underscores, and may be in sections (``model_parallel:``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rankmesh.errors import PlanError, cut
from rankmesh.readers.launches import check_unknown, program
from rankmesh.readers.options import NO_LAYOUT, Option, Options, line_error, refused, report, run_it
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, add_world, flag, settle, whole
from rankmesh.readers.tokens import Missing, gap_of, line_of, shown

__all__ = ["FLAGS", "MEGATRON", "TABLE"]


def _sizes(option: Option, path: str) -> tuple[int, ...] | None:
    if option.value is None:
        return None
    values = option.value if isinstance(option.value, list) else [option.value]
    sizes = [whole(replace(option, value=value), path) for value in values]
    return tuple(size for size in sizes if size is not None)


def _one(option: Option, path: str) -> int | None:
    """Return a single size; in a script, words that follow it belong to the program."""
    return whole(option.single, path)


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
# Arguments of the engine that serves rollouts.
_ENGINES = ("sglang_", "vllm_", "rollout_", "infer_")


def _key(option: Option) -> str | None:
    return None if option.name.startswith(_ENGINES) else option.name


TABLE = Table(_READS, _REFUSED, _HARMLESS, _key)
_NAMES = [name for name in (*_READS, *_REFUSED) if name != "world_size"]
# As Megatron spells them, and as ms-swift does.
FLAGS = frozenset(["--" + name.replace("_", "-") for name in _NAMES] + ["--" + name for name in _NAMES])
_OPTION = re.compile(r"--[\w-]+")
_PROGRAM = re.compile(r"(.*[/.])?pretrain_\w+(\.py)?")
_CONFIG = re.compile(r"[^=]+\.(ya?ml|toml|json)")
_LONG = ["--" + name.replace("_", "-") for name in list(_READS)[:5]]
_SWITCHES = {
    "use_tp_pp_dp_mapping", "hybrid_context_parallel", "use_mp_args_from_checkpoint_args", "sequence_parallel",
    "use_sharp",
}  # fmt: skip
# What shapes a model and its batch in every run of Megatron, whose sizes may all be its defaults, which are 1.
_MODEL = {"--num-layers", "--hidden-size", "--num-attention-heads", "--micro-batch-size", "--seq-length"}
_MARKS = frozenset(_READS) - {"world_size", "data_parallel_size", "context_parallel_size"}


def _matches(options: Options) -> bool:
    """Return whether a document has an argument that only Megatron has, or its model and both of its batches."""
    if options.is_command:  # what no other format is of
        return True
    names = {_key(option) for option in _training(options.flags)}
    return (
        not _MARKS.isdisjoint(names) or {"micro_batch_size", "global_batch_size", "num_layers", "hidden_size"} <= names
    )


def _training(options: Iterable[Option]) -> list[Option]:
    """Return the options outside of engines and checkpoints, which name other sizes as Megatron does."""
    found = [option for option in options if _CHECKPOINTS not in option.path]
    engines = {option.path[:-1] for option in found if option.path[-1] == "gpu_memory_utilization"}
    return [option for option in found if option.path[:-1] not in engines]


def _settled(options: Options) -> Settled:
    """Return the arguments of a command, or of a YAML; NeMo's has the ranks of its trainer, which is Lightning's."""
    if options.is_command:
        return _of_command(options)
    settled = settle(TABLE, _training(options.flags), options.path)
    # Primus' model and defaults of a module, which its overrides go before.
    settled.notes += [
        (option.line, f"{option} is a file of its own, which is not read; it may set sizes")
        for option in options.flags
        if option.path[0] == "modules"
        and option.path[-1] in ("model", "config")
        and str(option.value).endswith(".yaml")
    ]
    if "world_size" not in settled.arguments:
        add_world(settled, options.flags, _TRAINER, options.path)
    return settled


def _of_command(options: Options) -> Settled:
    """Return the arguments of a command, or of a file of flags."""
    path, by_swift = options.path, options.words[:1] in (["megatron"], ["swift"])
    check_unknown(options, lambda text: not FLAGS.isdisjoint(_OPTION.findall(text)))
    flags = [option for option in options.flags if option.key.startswith("--")]
    # Words after a switch are the program's.
    arguments = [replace(option, value=True) if option.name in _SWITCHES else option for option in flags]
    _check_short(arguments, path)
    if _PROGRAM.fullmatch(program(options)) and not by_swift:
        _check_hyphens(arguments, path)
    overrides = [option for option in options.settings if len(option.path) > 1 and option.name in _READS]
    if not overrides and not any(option.key in FLAGS for option in arguments):
        _check_sizes(options, arguments)
    settled = _deepspeed(settle(TABLE, [*arguments, *overrides], path), path)
    if by_swift and "ep" in settled.arguments and "etp" not in settled.arguments:
        settled.arguments["etp"] = 1
        settled.notes.append((options.command.line, "expert_tensor_parallel_size is 1, the default of ms-swift"))
    if overrides:
        _check_overrides(options, settled)
    settled.notes += options.notes
    for word in options.strays:
        text = f"{cut(shown(word))} is unknown; arguments that it adds are not read"
        settled.notes.append((line_of(word), text))
    if options.world is not None and not isinstance(options.world.value, Missing):
        settled.add("world_size", options.world.value, options.world, path)
    used = {line for reading in settled.readings for line in (reading.line, *reading.also)}
    settled.notes += [(line, text) for line, text in options.defaults.items() if line in used]
    return settled


def _check_overrides(options: Options, settled: Settled) -> None:
    """Note that the other settings are in a recipe, which is not read (Megatron-Bridge, NeMo)."""
    named = next((option for option in options.flags if option.key in _RECIPES), None)
    recipe = str(named.single) if named is not None else "the recipe of the program"
    option = settled.reading("ep")
    if option is not None and settled.arguments["ep"] > 1 and "etp" not in settled.arguments:
        rule = f"{recipe} may set expert_tensor_parallel_size, and is not read"
        raise refused(
            options.path, option, rule, f"add {option.key.replace('expert_model', 'expert_tensor')}=1, or what it is"
        )
    line = options.command.line
    settled.notes.append((line, f"{recipe} is not read: it may set the sizes that the command does not set"))
    add_world(settled, options.settings, _TRAINER, options.path)


def _deepspeed(settled: Settled, path: str) -> Settled:
    """Turn Megatron-DeepSpeed's sequence and expert axes into DeepSpeed's, if no other axis has a size above 1."""
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


def _check_sizes(options: Options, arguments: list[Option]) -> None:
    """Refuse a run without a size, unless its program is Megatron's and all its arguments are known."""
    path, line = options.path, options.command.line
    by_megatron = _PROGRAM.fullmatch(program(options)) or options.words[:1] == ["megatron"]
    if not by_megatron and len(_MODEL & {option.key for option in arguments}) < len(_MODEL) - 1:
        raise line_error(
            path,
            line,
            f"the run has no argument of Megatron ({_config(options, arguments)}); a launch script is read for "
            "Megatron's arguments; give the config file of the run, with --world-size",
            code=NO_LAYOUT,
        )
    for word in options.strays:
        written, gap = cut(shown(word)), gap_of(word)
        problem = f"the run has no parallel size, but the arguments {written}; {gap.why if gap else 'they are unknown'}"
        raise line_error(path, line_of(word), f"{problem}, so they may state sizes; {run_it(path)}", received=written)


def _config(options: Options, arguments: list[Option]) -> str:
    named = [f"{option.key} = {option.first}" for option in arguments if "config" in option.key]
    files = [word for word in options.words if _CONFIG.fullmatch(word)]
    return f"it names {cut((named or files)[0])}" if named or files else "it names no config file"


def _check_hyphens(arguments: list[Option], path: str) -> None:
    """Refuse ``--tensor_model_parallel_size``, which Megatron's parser refuses."""
    for option in arguments:
        if "_" in option.key and option.key in FLAGS:
            name = option.key.replace("_", "-")
            rule = "Megatron's parser does not know this spelling"
            report(refused(path, option.single, rule, f"write {name}", code="unknown-size", fix=name))


def _check_short(arguments: list[Option], path: str) -> None:
    """Refuse ``--tensor-model 2``: Python's parser completes it to an option that begins with it."""
    for option in arguments:
        meant = next((name for name in _LONG if name.startswith(option.key) and name != option.key), "")
        if meant and option.key.count("-") > len("--"):
            raise refused(path, option, f"this is the beginning of {meant}", "write the whole name")


MEGATRON = Format(_matches, _settled, "a YAML of Megatron's arguments", "a Megatron launch script")
