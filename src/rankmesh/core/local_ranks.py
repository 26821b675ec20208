"""Local ranks that contradict each other: two ranks of a host that would use one device.

>>> facts = [LocalRank("a", rank, rank % 3, 3) for rank in range(6)]
>>> print(*contradictions(facts))
ranks 0 and 3, 1 and 4, 2 and 5 on a have one local rank each, so they would share a GPU; 6 ranks of this job are on \
a, but its local world size is 3; give each rank of a host a local rank of its own, 0 to 5
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from rankmesh.core.grouped import grouped

__all__ = ["LocalRank", "contradictions"]

_LISTED = 4


@dataclass(frozen=True)
class LocalRank:
    """A rank's place on its host, as the launcher gives it; None for what the launcher does not give.

    ``visible``  the devices that the rank may use, by which equal local ranks may be of different devices
    ``machine``  tells hosts of one name apart
    """

    host: str
    rank: int
    local_rank: int | None
    local_world_size: int | None
    visible: str = ""
    machine: Hashable = None


def contradictions(facts: Iterable[LocalRank]) -> Iterator[str]:
    """Yield a sentence for each host on which ranks have one local rank and the same devices."""
    for (host, _), here in grouped(((each.host, each.machine), each) for each in facts).items():
        known = [each for each in here if each.local_rank is not None]
        same = grouped(((each.local_rank, each.visible), each.rank) for each in known)
        shared = [" and ".join(map(str, sorted(ranks)[:3])) for ranks in same.values() if len(ranks) > 1]
        if not shared:
            continue
        more = f" and {len(shared) - _LISTED} more sets" if len(shared) > _LISTED else ""
        sizes = {each.local_world_size for each in known if each.local_world_size}
        count = ""
        if sizes and max(sizes) < len(here):
            count = f"; {len(here)} ranks of this job are on {host}, but its local world size is {max(sizes)}"
        yield (
            f"ranks {', '.join(shared[:_LISTED])}{more} on {host} have one local rank each, so they would share a GPU"
            f"{count}; give each rank of a host a local rank of its own, 0 to {len(here) - 1}"
        )
