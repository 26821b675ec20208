"""The traffic that is taken where none is given: that of a usual transformer on the axes that a plan has."""

from __future__ import annotations

from rankmesh.core.plan import Plan
from rankmesh.placement.model import Training, Transformer
from rankmesh.placement.steps import Roles, step_traffic
from rankmesh.placement.traffic import Message, Traffic

__all__ = ["usual"]


def usual(plan: Plan) -> tuple[Traffic, tuple[str, ...]]:
    """Traffic of blocks of 8192 hidden units, four a stage, in bfloat16; of kinds with other names 1 MiB each.

    The second value says so in words.
    """
    roles = Roles.of(plan)
    experts = 8 * roles.sizes["ep"] if roles.sizes["ep"] > 1 else 0
    model = Transformer(
        layers=4 * roles.sizes["pp"], hidden=8192, heads=64, kv_heads=8, units=28672, vocabulary=131072, gated=True,
        tied=False, experts=experts, top=2, expert_units=4096,
    )  # fmt: skip
    passes = 4 * roles.sizes["pp"]
    training = Training(batch=passes * roles.replicas, sequence=8192, sequence_parallel=True)
    found = step_traffic(plan, model, training)
    if found:
        return found, ("the traffic is that of a usual transformer; say yours with a traffic file or a model",)
    known = {name: [Message("all-reduce", 2**20)] for name, groups in plan.kinds.items() if groups.size > 1}
    return Traffic(known), ("the traffic is an all-reduce of 1 MiB for each kind; say yours with a traffic file",)
