"""Planning: plans of large worlds without torch, against the rank lists of megatron-core's RankGenerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.contests import MEGATRON, Sizes, load, missing
from bench.dry import dry_sizes
from bench.processes import run_isolated
from bench.results import Comparison, alternate
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.megatron_core import megatron

__all__ = ["planning"]

_DENSE = ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-dp-cp", "tp-dp", "tp-cp")
_EXPERT = ("tp", "ep", "dp", "tp-ep", "tp-ep-pp")


def planning(world: int, rounds: int, limit: float) -> list[Comparison]:
    """Each question to a fresh plan, in a fresh process."""
    sizes = dry_sizes(world)

    def requested(what: str, ours: Callable[[Plan], object], theirs: Callable[[Sizes], object] | None) -> Comparison:
        sides = {"ours": lambda: ours(_plan(sizes))}
        if theirs is not None:
            sides["theirs"] = lambda: theirs(sizes)
        return alternate(
            "planning",
            what,
            world,
            "RankGenerator" if theirs else "-",
            {side: _timed(work, limit) for side, work in sides.items()},
            rounds,
            reduce=lambda outcome: outcome.reports[0],
            absent=missing(MEGATRON) if theirs else None,
        )

    return [
        requested("the plan, and one rank's groups", _local(world), None),
        requested("the plan, and its digest", lambda plan: plan.digest, None),
        requested("every group of every kind", _every_group, _every_list),
    ]


def _local(world: int) -> Callable[[Plan], object]:
    return lambda plan: dict(plan.of(world // 3))


def _plan(sizes: Sizes) -> Plan:
    return megatron(sizes.world, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp)


def _every_group(plan: Plan) -> object:
    return [kind.array for kind in plan.kinds.values()]


def _every_list(sizes: Sizes) -> object:
    generator = load(MEGATRON.module).RankGenerator
    order, etp = "tp-cp-ep-dp-pp", sizes.tp if sizes.etp is None else sizes.etp
    dense = generator(tp=sizes.tp, ep=1, dp=sizes.dp, pp=sizes.pp, cp=sizes.cp, order=order)
    edp = sizes.world // (etp * sizes.ep * sizes.pp)
    expert = generator(tp=etp, ep=sizes.ep, dp=edp, pp=sizes.pp, cp=1, order=order)
    return [dense.get_ranks(kind) for kind in _DENSE] + [expert.get_ranks(kind) for kind in _EXPERT]


def _timed(work: Callable[[], object], limit: float) -> Any:
    def measure() -> dict[str, float]:
        started = time.perf_counter()
        work()
        return {"planned": time.perf_counter() - started}

    return lambda: run_isolated(measure, limit=limit)
