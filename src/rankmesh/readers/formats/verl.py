"""verl: the actor of a trainer, from its YAML or from the words ``key=value`` of a command.

```
actor_rollout_ref.actor.megatron.*          the layout of Megatron, where this is the actor's engine
actor_rollout_ref.actor.fsdp_config.*       else: sequences are cut inside of sp adjacent ranks, weights over all ranks
trainer.nnodes x trainer.n_gpus_per_node    the world
engine.*                                    the same of the trainer for fine-tuning
```

Sizes of the critic, the reference and the engine of rollouts are not part of the actor's layout.
Source: ``verl.workers`` and ``verl.trainer.config`` of verl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankmesh.readers.launches import check_unknown, starts_verl
from rankmesh.readers.options import SETTING, Option, Options
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, add_world, settle, unless

__all__ = ["VERL", "states_sizes"]

_ACTOR = ("actor_rollout_ref", "actor")
_COUNTS = (("trainer", "nnodes"), ("trainer", "n_gpus_per_node"))
_MEGATRON = Table(
    reads={
        "tensor_model_parallel_size": Read("tp"),
        "pipeline_model_parallel_size": Read("pp"),
        "context_parallel_size": Read("cp"),
        "expert_model_parallel_size": Read("ep"),
        "expert_tensor_parallel_size": Read("etp", unless("null", "None", "")),
    },
    harmless=("virtual_pipeline_model_parallel_size",),
)
_SHARDS = Table(
    reads={"ulysses_sequence_parallel_size": Read("sp"), "fsdp_size": Read("fsdp", unless(-1, "-1"))},
    refused={"expert_parallel_size": Refused("its expert groups are none of this layout's")},
)
# What sets one of these, the engine, or a count of the world.
_SIZE = re.compile(
    rf"(actor_rollout_ref\.actor\.|engine\.)([\w.]+\.)?({'|'.join([*_MEGATRON.reads, *_SHARDS.reads])}|strategy)="
    r"|model_engine=|trainer\.(nnodes|n_gpus_per_node)="
)


def states_sizes(text: str) -> bool:
    """Return whether a text sets a size of the actor, its engine, or the world.

    >>> states_sizes("actor_rollout_ref.actor.fsdp_config.fsdp_size=8"), states_sizes("actor_rollout_ref.rollout.n=8")
    (True, False)
    """
    return _SIZE.search(text) is not None


def _matches(options: Options) -> bool:
    """Return whether a document has an actor as only verl has it, or a command starts one of verl's trainers."""
    return starts_verl(options.words) if options.is_command else _has_actor(options.flags)


def _has_actor(options: Iterable[Option]) -> bool:
    return any(option.path[:2] == _ACTOR and len(option.path) > 2 for option in options)


def _settled(options: Options) -> Settled:
    """Return the layout of the actor."""
    path, given, program = options.path, list(options.flags), ""
    if options.is_command:
        check_unknown(options, states_sizes)
        given, program = options.settings, " ".join(word for word in options.words if not SETTING.fullmatch(word))
    tuning = not _has_actor(given)
    prefix = () if tuning else _ACTOR
    below = [option for option in given if option.path[: len(prefix)] == prefix]
    sections = {"engine", "megatron"} if tuning else {"megatron"}
    megatron = [option for option in below if len(option.path) == len(prefix) + 2 and option.path[-2] in sections]
    engine = _engine(below, given, prefix, program)
    sized = any(option.path[-1] in _MEGATRON.reads for option in megatron)
    if engine == "megatron" or (not engine and not tuning and sized):
        settled = settle(_MEGATRON, megatron, path)
        settled.arguments["recipe"] = "megatron"
    else:
        inner = {"fsdp_config", "engine", *prefix[-1:]}
        shards = [option for option in below if len(option.path) == 1 or option.path[-2] in inner]
        settled = settle(_SHARDS, _last_of(shards), path)
        settled.arguments["recipe"] = "verl"
    add_world(settled, given, _COUNTS, path)
    return settled.add_run(options)


def _engine(below: list[Option], options: list[Option], prefix: tuple[str, ...], program: str) -> str:
    """Return the engine that trains, empty where neither a setting nor the program's configuration names it."""
    keys = (((*prefix, "strategy"), below), (("model_engine",), options), (("engine",), options))
    named = [*keys, (("engine", "strategy"), below)]
    found = (str(option.value) for key, among in named for option in reversed(among) if option.path == key)
    return next(found, "megatron" if "megatron" in program else "")


def _last_of(options: list[Option]) -> list[Option]:
    """Keep one option of a size that the actor and its engine both have: the one that is not 1."""
    found: dict[str, Option] = {}
    for option in options:
        if option.path[-1] not in found or str(found[option.path[-1]].value) in ("1", "-1"):
            found[option.path[-1]] = option
    return list(found.values())


VERL = Format(_matches, _settled, "a verl config", "a verl launch script")
