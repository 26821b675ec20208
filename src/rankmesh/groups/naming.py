"""Names of process groups: pure functions of the plan's digest, the generation, the kind and the members.

torch's own hashed names count the groups that a rank already has, so two ranks that own different numbers of groups
wait for each other under two names. Here nothing local enters the name.

>>> process_group_name("ab" * 32, 0, "tp", (0, 1))
'tp/0/cca6f1546d102a4e'
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["process_group_name"]


def process_group_name(digest: str, generation: int, name: str, members: Sequence[int], key: str = "") -> str:
    """The name under which all members register one process group: kind, generation, 16 hexadecimal digits.

    ``key`` tells the plans of one job apart, which may be equal.
    """
    text = hashlib.sha256(f"{digest}/{generation}/{key}{'/' if key else ''}{name}/".encode())
    text.update(struct.pack(f"<{len(members)}q", *members))
    return f"{name}/{generation}/{text.hexdigest()[:16]}"
