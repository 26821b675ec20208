"""Names of process groups: pure functions of the plan's digest, the generation, the kind and the place of the group.

torch's own hashed names count the groups that a rank already has, so two ranks that own different numbers of groups
wait for each other under two names. Here nothing local enters the name. What all members agree on stands for the
members, which it tells apart from those of any other group of the plan: a name costs the same for two as for a million.

>>> process_group_name("ab" * 32, 0, "tp", "tp@pp1")
'tp/0/b39e4b61ac27105e'
"""

from __future__ import annotations

import hashlib

__all__ = ["process_group_name"]


def process_group_name(digest: str, generation: int, kind: str, place: str, key: str = "") -> str:
    """The name under which all members register one process group: kind, generation, 16 hexadecimal digits.

    ``place`` is the group in words, its kind and the coordinate of its members; ``key`` tells the plans of one job
    apart, which may be equal.
    """
    text = f"{digest}/{generation}/{key}{'/' if key else ''}{place}"
    return f"{kind}/{generation}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
