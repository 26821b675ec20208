"""Which variables a command sets in another way than ``NAME=value``; their values are not followed.

```
read NAME   mapfile NAME   getopts OPTIONS NAME      let NAME=1   ((NAME++))      printf -v NAME FORMAT
```

>>> assigned_by(["let", "TP=4", "PP*=2", "TP==2"]), assigned_by(["printf", "-v", "TP", "%d", "4"])
(['TP', 'PP'], ['TP'])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["assigned_by", "assigned_in"]

_LET = re.compile(r"(?:\+\+|--)?(\w+)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=)|$)")
_COMPARISONS = ("==", "!=", "<=", ">=")


def assigned_by(names: Sequence[str]) -> list[str]:
    """The variables that a command sets, from its words."""
    if names[0] in ("read", "mapfile", "readarray", "getopts"):
        return list(names[1:])
    if names[0] == "let":
        return [found[1] for found in map(_LET.match, names[1:]) if found]
    if names[0] == "printf" and len(names) > 2 and names[1] == "-v":
        return [names[2]]
    return []


def assigned_in(node: Node, source_of: Callable[[Node], str]) -> Iterator[str]:
    """The variables that an arithmetic command ``(( ))`` sets."""
    for child in node.named_children:
        sign = next((part.type for part in child.children if not part.is_named), "")
        sets = sign in ("++", "--") or (sign.endswith("=") and sign not in _COMPARISONS)
        if sets and child.named_children and child.named_children[0].type == "variable_name":
            yield source_of(child.named_children[0])
        yield from assigned_in(child, source_of)
