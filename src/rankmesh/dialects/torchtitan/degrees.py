"""The degrees of parallelism of torchtitan, and what follows from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rankmesh.core import Plan, recipes
from rankmesh.errors import PlanError, SizesError, quoted
from rankmesh.runtime.registry import refusing_sizes

__all__ = ["Degrees"]

_Degrees = TypeVar("_Degrees", bound="Degrees")

_BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
# The release that is followed, and what later sources of torchtitan no longer have.
_FOLLOWED = "0.3.0"
_DROPPED = ("full_dtensor", "spmd_meshes")


def _above_one(axis: str) -> property:
    return property(lambda self: getattr(self, axis) > 1, doc=f"Whether the degree ``{axis}`` is above 1.")


@dataclass
class Degrees:
    """The degrees, and the plan of the process groups that meshes over them are made of.

    ``dp_shard=-1`` is what the others leave of ``world_size``. ``SizesError`` (an ``AssertionError`` and a
    ``ValueError``) for degrees that do not give the world, ``PlanError`` for another ``spmd_backend``.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int
    spmd_backend: str = "spmd_types"
    plan: Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if departure := installed_departure():
            warnings.warn(departure, stacklevel=4)
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1 and others > 0:
            self.dp_shard = self.world_size // others
        if self.spmd_backend not in _BACKENDS:
            raise PlanError(
                f"spmd_backend {quoted(self.spmd_backend)} is unknown; use one of {', '.join(_BACKENDS)}",
                received=self.spmd_backend,
            )
        if self.dp_shard < 1:
            raise SizesError(
                f"dp_shard is {self.dp_shard} in a world of {self.world_size}, of which the other degrees take "
                f"{others}; it is 1 or more, or -1 for what they leave; lower the others",
                dp_shard=self.dp_shard,
            )
        with refusing_sizes():
            self.plan = self._planned()

    @classmethod
    def from_config(cls: type[_Degrees], parallelism_config: Any, world_size: int) -> _Degrees:
        """Return the degrees of torchtitan's ``ParallelismConfig``."""
        given = parallelism_config
        return cls(
            dp_replicate=given.data_parallel_replicate_degree,
            dp_shard=given.data_parallel_shard_degree,
            cp=given.context_parallel_degree,
            tp=given.tensor_parallel_degree,
            pp=given.pipeline_parallel_degree,
            ep=given.expert_parallel_degree,
            world_size=world_size,
            spmd_backend=given.spmd_backend,
        )

    def _planned(self) -> Plan:
        """Return the kinds that meshes of this backend are made of; without experts there is no ``efsdp``."""
        plan = recipes.torchtitan(
            self.world_size, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp,
            pp=self.pp, ep=self.ep,
        )  # fmt: skip
        unused = {"etp", "dp_shard" if self.spmd_backend == "partial_dtensor" else "fsdp"}
        return plan.without(*(unused if self.ep > 1 else unused | {"efsdp"}))

    # -- which axes there are ---------------------------------------------------------------------------------------

    dp_replicate_enabled = _above_one("dp_replicate")
    dp_shard_enabled = _above_one("dp_shard")
    cp_enabled = _above_one("cp")
    tp_enabled = _above_one("tp")
    pp_enabled = _above_one("pp")
    ep_enabled = _above_one("ep")

    @property
    def dp_enabled(self) -> bool:
        """Whether data is parallel, replicated or sharded."""
        return self.dp_replicate > 1 or self.dp_shard > 1

    @property
    def dp_cp_enabled(self) -> bool:
        """Whether a loss is reduced over ranks."""
        return self.dp_enabled or self.cp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether parameters are sharded over data or sequences."""
        return self.dp_shard > 1 or self.cp > 1

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks see the same data."""
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """What divides the length of a sequence: tp for sequence parallelism, 2 x cp for balanced sharding."""
        return self.tp * self.cp * 2


@cache
def installed_departure() -> str | None:
    """Return how the installed torchtitan, which is not imported, differs from the release that is followed; None: not.

    Sources of torchtitan may carry an older version than the release that they follow, so their text counts, too.
    """
    try:
        found = find_spec("torchtitan")
    except ValueError:  # a module that a program has put together itself has no spec
        return None
    if found is None or not found.submodule_search_locations:
        return None
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "without a version"
    file = Path(found.submodule_search_locations[0], "distributed", "parallel_dims.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lacking = [name for name in _DROPPED if text and name not in text]
    if not lacking and not _is_newer(installed):
        return None
    without = f"; the installed one has no {' and no '.join(lacking)}" if lacking else ""
    return (
        f"torchtitan {installed} is installed, and rankmesh.dialects.torchtitan follows {_FOLLOWED}{without}; compare "
        f"the meshes that your code asks for, or install torchtitan=={_FOLLOWED}"
    )


def _is_newer(installed: str) -> bool:
    numbers = [int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdecimal()]
    return numbers > [int(part) for part in _FOLLOWED.split(".")]
