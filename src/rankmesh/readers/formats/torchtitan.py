"""torchtitan: its TOML, and ``torchrun -m torchtitan.train --parallelism.*`` over it.

``[parallelism]``, ``[training]`` and ``[experimental]`` have sizes; shards of -1 are what is left of the world. A
config in Python is not read. Source: ``torchtitan.config.job_config``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rankmesh.readers.documents import found_file, options_of, over
from rankmesh.readers.launches import check_unknown, typed
from rankmesh.readers.options import Option, Options
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, settle, unless
from rankmesh.readers.tokens import shown

__all__ = ["TORCHTITAN"]

_SIZE = "--parallelism."


def _key(option: Option) -> str | None:
    if option.path == ("fault_tolerance", "enable"):
        return option.key
    section, *names = option.path
    section = section.removeprefix("--")
    if section not in ("parallelism", "training", "experimental") or len(names) != 1:
        return None
    return names[0] if section == "parallelism" or re.search("parallel", names[0]) else None


_TABLE = Table(
    reads={
        "data_parallel_replicate_degree": Read("dp_replicate"),
        "data_parallel_shard_degree": Read("dp_shard", unless(-1)),
        "context_parallel_degree": Read("cp"),
        "tensor_parallel_degree": Read("tp"),
        "pipeline_parallel_degree": Read("pp"),
        "expert_parallel_degree": Read("ep"),
        "expert_tensor_parallel_degree": Read("etp"),
    },
    refused={
        "fault_tolerance.enable": Refused("replica groups then come and go, so the world has no fixed layout"),
        "expert_parallel_mode": Refused("modes of expert parallelism lay experts out in their own ways", ("none",)),
    },
    harmless=(
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_microbatch_size",
        "num_pp_microbatches",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
    ),
    key=_key,
    closed=True,
)


def _matches(options: Options) -> bool:
    named = _file(options)
    return any(_key(option) in _TABLE.reads or option.key.startswith(_SIZE) for option in options.flags) or (
        named is not None and found_file(options.path, named.value) is not None
    )


def _file(options: Options) -> Option | None:
    """Return the TOML that a command names, as an option or as the variable of ``run_train.sh``."""
    named = [option.single for option in options.flags if option.name == "job.config_file"]
    word, line = options.command.variable("CONFIG_FILE")
    if word and "run_train.sh" in str(options.command):
        named.append(Option(("CONFIG_FILE",), shown(word), line))
    return named[0] if named else None


def _settled(options: Options) -> Settled:
    flags, path, line = list(options.flags), options.path, options.command.line
    others = []
    if options.is_command:
        check_unknown(options, lambda text: _SIZE in text)
        given = [typed(option) for option in flags if option.key.startswith(_SIZE)]
        flags = [replace(option, path=tuple(option.key.split("."))) for option in given]
        others = [str(option.single) for option in options.flags if option.key in ("--module", "--config")]
        named = _file(options)
        if named is not None and found_file(path, named.value):
            flags = over(flags, options_of(named, path))
        elif named is not None:
            others.append(str(named))
    settled = settle(_TABLE, flags, path)
    for option in flags:
        if _key(option) == "data_parallel_shard_degree" and option.value == -1:
            settled.notes.append((option.line, f"{option} is inferred from the world"))
    settled.add_run(options)
    if others:
        settled.notes.append((line, f"the sizes that {', '.join(others)} sets beside these are not read"))
    return settled


TORCHTITAN = Format(_matches, _settled, "a torchtitan config", "a torchtitan launch script")
