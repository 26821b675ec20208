"""Worlds of up to 131,072 ranks in one fresh process: the groups of one rank on the backend "fake", and plans alone.

The plans are compared with the rank lists of megatron-core's RankGenerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.contests import MEGATRON, Contest, Make, Sizes, contested, load, megatron_plan, missing
from bench.processes import run_isolated
from bench.results import Comparison, alternate, taken
from rankmesh.core.plan import Plan

__all__ = ["dry", "fake_world", "planning"]

_DENSE = ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-dp-cp", "tp-dp", "tp-cp")
_EXPERT = ("tp", "ep", "dp", "tp-ep", "tp-ep-pp")


def _sizes(world: int) -> Sizes:
    """Return the layout of the large worlds, experts over eight ranks; a small world has two of every axis."""
    if world < 1024:
        return Sizes(world, tp=2, cp=2, pp=2, ep=2, etp=1)
    return Sizes(world, tp=8, cp=2, pp=8, ep=8, etp=1)


def fake_world(size: int) -> int:
    """Initialise a world without its other ranks, as one in the middle; return that rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = size // 3
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return rank


def dry(contest: Contest, world: int, rounds: int, limit: float) -> Comparison:
    """Compare both sides of a contest, for a rank in the middle of the world."""

    def measure(make: Make) -> dict[str, float]:
        fake_world(world)
        started = time.perf_counter()
        groups = make(_sizes(world))
        return {"built": time.perf_counter() - started, "groups": len(groups)}

    return contested("dry", contest, world, rounds, lambda make: run_isolated(lambda: measure(make), limit=limit))


def planning(world: int, rounds: int, limit: float) -> Iterator[Comparison]:
    """Compare each question to a fresh plan, in a fresh process."""
    sizes = _sizes(world)

    def asked(what: str, ours: Callable[[Plan], object], theirs: Callable[[Sizes], object] | None = None) -> Comparison:
        works: dict[str, Callable[[], object]] = {"ours": lambda: ours(megatron_plan(sizes))}
        if theirs is not None:
            works["theirs"] = lambda: theirs(sizes)
        runs = {side: partial(run_isolated, partial(_planned, work), limit=limit) for side, work in works.items()}
        peer, absent = ("RankGenerator", missing(MEGATRON)) if theirs else ("-", None)
        return alternate("planning", what, world, peer, runs, rounds, absent)

    yield asked("the plan, and one rank's groups", lambda plan: dict(plan.of(world // 3)))
    yield asked("the plan, and its digest", lambda plan: plan.digest)
    yield asked("every group of every kind", _every_group, _every_list)


def _planned(work: Callable[[], object]) -> dict[str, float]:
    return {"planned": taken(work)["wall"]}


def _every_group(plan: Plan) -> object:
    return [kind.array for kind in plan.kinds.values()]


def _every_list(sizes: Sizes) -> object:
    generator = load(MEGATRON.module).RankGenerator
    order, etp = "tp-cp-ep-dp-pp", sizes.tp if sizes.etp is None else sizes.etp
    dense = generator(tp=sizes.tp, ep=1, dp=sizes.dp, pp=sizes.pp, cp=sizes.cp, order=order)
    edp = sizes.world // (etp * sizes.ep * sizes.pp)
    expert = generator(tp=etp, ep=sizes.ep, dp=edp, pp=sizes.pp, cp=1, order=order)
    return [dense.get_ranks(kind) for kind in _DENSE] + [expert.get_ranks(kind) for kind in _EXPERT]
