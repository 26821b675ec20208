"""Claims: what one rank brings to a meeting. Ranks agree when their claims have one digest.

>>> from rankmesh.core.rank_range import RankRange
>>> one, other = (Claim(rank, 8, RankRange(0, 8), {"plan": "same"}) for rank in (0, 5))
>>> one.digest == other.digest, one.circle, Claim(4, 8, RankRange(4, 4), {}).circle
(True, '0-8', '4-8')
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rankmesh.core.rank_range import RankRange

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """What one rank brings: its fields as plain data, and the ranks that have to bring the same.

    ``stands`` is a text that is equal exactly where the fields are: digests that are known need not be made again.
    """

    rank: int
    world_size: int
    span: RankRange
    fields: Mapping[str, Any]
    stands: str = ""

    @cached_property
    def digest(self) -> str:
        """The hash of the fields: equal claims have equal digests."""
        return hashlib.sha256((self.stands or self.document).encode()).hexdigest()[:32]

    @cached_property
    def document(self) -> str:
        """The fields as canonical JSON."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"))

    @property
    def circle(self) -> str:
        """The ranks that meet, as part of a key: ``4-8`` for the ranks 4 to 7, whatever a rank takes for the world."""
        return f"{self.span.offset}-{self.span.stop}"

    @property
    def of_the_world(self) -> bool:
        """Whether every rank of the world meets."""
        return self.span.size == self.world_size
