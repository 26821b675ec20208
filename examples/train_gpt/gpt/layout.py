"""Where every process group comes from: sizes -> a plan -> the groups that the model needs, in one frozen value.

```
tp=2,cp=2,pp=2,ep=2 on 16 ranks     rank = tp + 2·(cp + 2·(dp + 2·pp))      experts: etp + 2·(ep + 2·(edp + 2·pp))
```

The experts are laid over the ranks of dp x cp, as Megatron-Core does it: ep takes no ranks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import ProcessGroup

import rankmesh as rm


class Refused(ValueError):
    """What was asked for cannot be run; the message is one sentence for the person who asked."""


@dataclass(frozen=True)
class Sizes:
    """The size of each axis; tp · cp · dp · pp is the world, and ep divides dp · cp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str, world_size: int) -> Sizes:
        """The sizes of ``tp=2,pp=2,ep=2`` in a world; dp, where it is left out, is what is left of the world."""
        given: dict[str, Any] = dict(rm.Mesh.parse(text).axes) if text.strip() else {}
        for name in given:
            if name not in ("tp", "cp", "dp", "pp", "ep", "etp"):
                raise Refused(f"received the axis {name!r} in {text!r}; a layout is made of tp, cp, dp, pp and ep")
        tp = given.get("tp", 1)
        if given.pop("etp", tp) != tp:
            raise Refused(f"received {text!r}; experts are split as the rest is, so etp equals tp; leave etp out")
        try:
            mesh = rm.recipes.megatron(world_size, **given).mesh
        except rm.PlanError as error:
            raise Refused(f"{error}, or start another number of ranks: torchrun --nproc-per-node N") from error
        return cls(**{name: mesh.axes[name] for name in ("tp", "cp", "dp", "pp")}, ep=given.get("ep", 1))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items() if size > 1) or "one process"


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank, and which share of the data is its own.

    ``tied`` is empty on a stage without embeddings: nothing here is None, which torch would take for the world.
    """

    tp: ProcessGroup  # heads, hidden units and vocabulary
    cp: ProcessGroup  # pieces of one sequence
    pp: ProcessGroup  # stages, in order
    ep: ProcessGroup  # different experts: tokens travel here
    ep_tp: ProcessGroup  # pieces of one expert
    data: ProcessGroup  # all that see different tokens: what the loss is summed over
    shards: ProcessGroup  # replicas of a dense weight, which share its optimizer
    expert_shards: ProcessGroup  # replicas of an expert, which share its optimizer
    tied: tuple[ProcessGroup, ...]  # first and last stage: two copies of the embedding
    model: tuple[ProcessGroup, ...]  # with shards: every dense weight once
    expert_model: tuple[ProcessGroup, ...]  # with expert_shards: every expert once
    mesh: rm.Mesh  # where each weight lies: dense ones over tp and pp ...
    expert_axes: tuple[str, str]  # ... experts over these: which experts, and which units of them ...
    expert_view: str | None  # ... of this view
    shard_axes: tuple[str, str]  # the axes of shards and of expert_shards, outermost first
    replica: int  # which samples of a batch are this rank's ...
    replicas: int  # ... of how many shares


@contextmanager
def rankmesh(sizes: Sizes, rank_map: Sequence[int] | None = None) -> Iterator[Groups]:
    """The groups of Megatron-Core's plan, made by rankmesh, on ranks as a placement orders them."""
    with rm.connect(rm.recipes.megatron(**asdict(sizes)).replace(rank_map=rank_map)) as groups:
        yield of(groups)


def of(groups: rm.LiveGroups) -> Groups:
    """The same of a plan of Megatron-Core's groups that is connected.

    Raises ``Refused`` for an order of axes in which ranks that share an expert do not have the same tokens.
    """
    if groups["ep_tp"].ranks != groups["tp"].ranks:
        raise Refused(
            f"received the order {'-'.join(groups.plan.mesh.axes)}, in which the groups of etp are others "
            "than those of tp; put tp first"
        )
    return Groups(
        tp=groups["tp"].pg,
        cp=groups["cp"].pg,
        pp=groups["pp"].pg,
        ep=groups["ep"].pg,
        ep_tp=groups["ep_tp"].pg,
        data=groups["dp_cp"].pg,
        shards=groups["intra_dp_cp"].pg,
        expert_shards=groups["intra_ep_dp"].pg,
        tied=(groups["embd"].pg,) if "embd" in groups else (),
        model=(groups["mp"].pg,),
        expert_model=(groups["tp_ep_pp"].pg,),
        mesh=groups.plan.mesh,
        expert_axes=("ep", "etp"),
        expert_view="expert",
        shard_axes=("-".join(axis for axis in reversed(groups.plan.mesh.axes) if axis in ("dp", "cp")), "edp"),
        replica=groups["dp"].rank,
        replicas=groups["dp"].size,
    )
