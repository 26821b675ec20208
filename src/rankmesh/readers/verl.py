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

from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, add_world, settle, unless

__all__ = ["SETTING", "from_document", "matches", "starts_verl", "states_sizes"]

# A word of a command that is a setting.
SETTING = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(.*[./])?(verl|recipe)[./](.*[./])?(main_(ppo|dapo)|fully_async_main|\w*sft_trainer\w*)(\.py)?")
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
    reads={
        "ulysses_sequence_parallel_size": Read("sp"),
        "fsdp_size": Read("fsdp", unless(-1, "-1")),
    },
    refused={"expert_parallel_size": Refused("its expert groups are none of this layout's")},
)
# What sets one of these, the engine, or a count of the world.
_SIZE = re.compile(
    rf"(actor_rollout_ref\.actor\.|engine\.)([\w.]+\.)?({'|'.join([*_MEGATRON.reads, *_SHARDS.reads])}|strategy)="
    r"|model_engine=|trainer\.(nnodes|n_gpus_per_node)="
)


def starts_verl(words: Iterable[str]) -> bool:
    """Return whether a command starts one of verl's trainers, or has a setting of its actor."""
    return any(_PROGRAM.fullmatch(word) or word.lstrip("+").startswith("actor_rollout_ref.actor.") for word in words)


def states_sizes(text: str) -> bool:
    """Return whether a text sets a size of the actor, its engine, or the world.

    >>> states_sizes("actor_rollout_ref.actor.fsdp_config.fsdp_size=8"), states_sizes("actor_rollout_ref.rollout.n=8")
    (True, False)
    """
    return _SIZE.search(text) is not None


def matches(entries: Iterable[Entry]) -> bool:
    """Return whether the document has an actor as only verl has it."""
    return any(entry.path[:2] == _ACTOR and len(entry.path) > 2 for entry in entries)


def from_document(entries: list[Entry], path: str, program: str = "") -> Settled:
    """Return the layout of the actor; ``program``: the command with its options, which may name the engine."""
    tuning = not matches(entries)
    prefix = () if tuning else _ACTOR
    below = [entry for entry in entries if entry.path[: len(prefix)] == prefix]
    sections = {"engine", "megatron"} if tuning else {"megatron"}
    megatron = [entry for entry in below if len(entry.path) == len(prefix) + 2 and entry.path[-2] in sections]
    engine = _engine(below, entries, prefix, program)
    sized = any(entry.path[-1] in _MEGATRON.reads for entry in megatron)
    if engine == "megatron" or (not engine and not tuning and sized):
        settled = settle(_MEGATRON, megatron, path)
        settled.arguments["recipe"] = "megatron"
    else:
        inner = {"fsdp_config", "engine", *prefix[-1:]}
        shards = [entry for entry in below if len(entry.path) == 1 or entry.path[-2] in inner]
        settled = settle(_SHARDS, _last_of(shards), path)
        settled.arguments["recipe"] = "verl"
    add_world(settled, entries, _COUNTS, path)
    return settled


def _engine(below: list[Entry], entries: list[Entry], prefix: tuple[str, ...], program: str) -> str:
    """Return the engine that trains, empty where neither a setting nor the program's configuration names it."""
    named = {
        (*prefix, "strategy"): below,
        ("model_engine",): entries,
        ("engine",): entries,
        ("engine", "strategy"): below,
    }
    for key, among in named.items():
        found = [str(entry.value) for entry in among if entry.path == key]
        if found:
            return found[-1]
    return "megatron" if "megatron" in program else ""


def _last_of(entries: list[Entry]) -> list[Entry]:
    """Keep one entry of a size that the actor and its engine both have: the one that is not 1."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.path[-1] not in found or str(found[entry.path[-1]].value) in ("1", "-1"):
            found[entry.path[-1]] = entry
    return list(found.values())
