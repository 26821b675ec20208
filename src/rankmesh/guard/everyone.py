"""Everyone: the process group of all ranks of a plan, and small reductions over it.

Each slot of a reduction has the least of what ranks give for it; who gives nothing for a slot leaves it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups

__all__ = ["NOTHING", "Everyone", "Reduced"]

# Bytes of text in one slot.
_BYTES = 7
# What a rank gives for a slot that is not its own.
NOTHING = 2**63 - 1


class Everyone:
    """All ranks of the plan of some live groups: torch's default group where it has no others."""

    def __init__(self, groups: LiveGroups) -> None:
        mesh = groups.plan.mesh
        self.rank, self._connected, self.pg = groups.rank, None, dist.group.WORLD
        if mesh.size < groups.world_size:
            spec = GroupSpec("everyone", axes="-".join(mesh.axes))
            self._connected = connect(Plan(mesh, [spec]))
            self.pg = self._connected["everyone"].pg
        backend = str(dist.get_backend_config(self.pg)) if mesh.size > 1 else ""
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    def reduce(self, size: int, given: Mapping[int, int] | tuple[Tensor, Tensor]) -> Reduced:
        """Begin a reduction of so many slots: values by slot, or a tensor of slots and one of values."""
        slots = torch.full((size,), NOTHING, dtype=torch.int64, device=self.device)
        if isinstance(given, Mapping):
            given = torch.tensor([*given], dtype=torch.int64), torch.tensor([*given.values()], dtype=torch.int64)
        where, values = given
        slots[where.to(self.device)] = values.to(self.device)
        return Reduced(slots, dist.all_reduce(slots, dist.ReduceOp.MIN, group=self.pg, async_op=True))

    def gather(self, ranks: Sequence[int], value: int | None) -> list[int]:
        """Return what each of these ranks gives; the same list on every rank, and every rank calls it."""
        mine = {ranks.index(self.rank): value} if value is not None and self.rank in ranks else {}
        return self.reduce(len(ranks), mine).values()

    def text_of(self, rank: int, text: str) -> str:
        """Return the text of one rank; every rank calls it, with its own text."""
        data = text.encode()
        count = self.gather([rank], len(data))[0]
        mine = range(0, count, _BYTES) if self.rank == rank else ()
        words = {at // _BYTES: int.from_bytes(data[at : at + _BYTES], "big") for at in mine}
        found = self.reduce(-(-count // _BYTES), words).values()
        lengths = [min(_BYTES, count - at) for at in range(0, count, _BYTES)]
        return b"".join(word.to_bytes(length, "big") for word, length in zip(found, lengths, strict=True)).decode()

    def close(self) -> None:
        """Destroy the process group, unless it is torch's own."""
        if self._connected is not None:
            self._connected.close()


class Reduced:
    """A reduction under way."""

    def __init__(self, slots: Tensor, work: dist.Work | None) -> None:
        self._slots, self._work = slots, work

    def values(self) -> list[int]:
        """Wait for the result: the least value of each slot, ``NOTHING`` where no rank gave one."""
        if self._work is not None:
            self._work.wait()
        found: list[int] = self._slots.tolist()
        return found
