"""Getters: what one question to a live group costs, asked as code asks it, in one process that holds both sides.

First through a group's handle, then, under Megatron's own names, through the drop-in for its parallel state.
"""

from __future__ import annotations

from collections.abc import Callable
from timeit import Timer
from typing import Any

from bench.contests import MEGATRON, load, missing
from bench.live import live_sizes
from bench.processes import run_isolated
from bench.results import Comparison, compare
from bench.worlds import fake_world
from rankmesh.core.recipes.megatron_core import megatron

__all__ = ["getters"]

_WORLD = 64
_CALLS = 20_000

# Megatron's functions that training code calls in its inner loops.
_DROP_IN = (
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_data_parallel_rank",
    "get_context_parallel_world_size",
    "get_expert_model_parallel_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
)

Question = Callable[[], object]


def getters(rounds: int, limit: float) -> list[Comparison]:
    """Time every question, ``rounds`` times on each side in turn."""
    absent = missing(MEGATRON)
    outcome = run_isolated(lambda: _measure(rounds, absent is None), limit=limit)
    failures = {} if absent is None else {"theirs": absent}
    if outcome.failure is not None:
        return [Comparison("getters", "all", _WORLD, "megatron-core", compare([], []), {"ours": outcome.failure})]
    return [
        Comparison("getters", what, _WORLD, "megatron-core", compare(sides["ours"], sides["theirs"]), failures)
        for what, sides in outcome.reports[0].items()
    ]


def _measure(rounds: int, with_peer: bool) -> dict[str, dict[str, list[dict[str, float]]]]:
    fake_world(_WORLD)
    sides = {"ours": _ours(), "theirs": _theirs() if with_peer else {}}
    found: dict[str, dict[str, list[dict[str, float]]]] = {what: {"ours": [], "theirs": []} for what in sides["ours"]}
    for _ in range(rounds):
        for what, each in found.items():
            for side, questions in sides.items():
                if what in questions:
                    each[side].append({"call": float(f"{Timer(questions[what]).timeit(_CALLS) / _CALLS:.3g}")})
    return found


def _ours() -> dict[str, Question]:
    from rankmesh.dialects.megatron import parallel_state
    from rankmesh.runtime import connect

    groups = connect(megatron(_WORLD, tp=2, cp=2, pp=2, ep=2))
    kept = groups["tp"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    )
    return {
        "position in tp": lambda: groups["tp"].rank,
        "position in tp, group kept": lambda: kept.rank,
        "size of dp_cp": lambda: groups["dp_cp"].size,
        "process group of tp": lambda: groups["tp"].pg,
        "process group of tp, group kept": lambda: kept.pg,
        "members of dp_cp": lambda: groups["dp_cp"].ranks,
        "next stage of pp": lambda: groups["pp"].next,
        "an empty function": lambda: None,
        **_drop_in(parallel_state),
    }


def _drop_in(state: Any) -> dict[str, Question]:
    return {name: getattr(state, name) for name in _DROP_IN}


def _theirs() -> dict[str, Question]:
    import torch.distributed as dist

    MEGATRON.theirs(live_sizes(_WORLD))
    state = load(MEGATRON.module)
    return {
        "position in tp": state.get_tensor_model_parallel_rank,
        "position in tp, group kept": state.get_tensor_model_parallel_group().rank,
        "size of dp_cp": lambda: state.get_data_parallel_world_size(with_context_parallel=True),
        "process group of tp": state.get_tensor_model_parallel_group,
        "process group of tp, group kept": state.get_tensor_model_parallel_group,
        "members of dp_cp": lambda: dist.get_process_group_ranks(
            state.get_data_parallel_group(with_context_parallel=True)
        ),
        "next stage of pp": state.get_pipeline_model_parallel_next_rank,
        **_drop_in(state),
    }
