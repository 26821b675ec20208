"""Sharing: which groups may use one communicator, and why not.

Two groups share when they have the same members in the same order and the same effective options. The first of them
in the plan's order is canonical: its process group serves the others. A group of one rank needs no communicator.

```
dp_cp     [0, 2, 4, 6]   gloo        canonical
intra     [0, 2, 4, 6]   gloo        uses dp_cp's
dp_ag     [0, 2, 4, 6]   gloo        its own: overlap class 'gather'
```

Every member of a group finds the same canonical group, because it sees the same plan and the same members: if one
group of another kind has these members, it has them for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.core.groups import Group, Groups
from rankmesh.core.options import Options

__all__ = ["canonical_groups", "kinds_that_share"]


def canonical_groups(groups: Iterable[tuple[str, Group, Options]]) -> dict[str, str]:
    """For one rank's groups in plan order: the name of the group whose process group each uses.

    >>> from rankmesh.core import Mesh
    >>> mesh = Mesh(tp=2, dp=2)
    >>> whole = mesh.groups("tp-dp").of(0)
    >>> canonical_groups([("world", whole, Options()), ("mp", whole, Options()), ("own", whole, Options(share=False))])
    {'world': 'world', 'mp': 'world', 'own': 'own'}
    """
    found: dict[str, str] = {}
    # First, last and size sort out nearly all candidates without listing a member.
    candidates: dict[tuple[int, int, int, Options], list[tuple[str, Group]]] = {}
    for name, group, options in groups:
        found[name] = name
        if options.share is False:
            continue
        bucket = candidates.setdefault((len(group), group[0], group[-1], options), [])
        for canonical, other in bucket:
            if group == other:
                found[name] = canonical
                break
        else:
            bucket.append((name, group))
    return found


def kinds_that_share(kinds: Iterable[tuple[str, Groups, Options]]) -> list[tuple[str, ...]]:
    """Names of kinds that are the same groups with the same options on every rank, in classes, in plan order.

    >>> from rankmesh.core import Mesh
    >>> mesh = Mesh(tp=2, dp=2, pp=1)
    >>> kinds_that_share([(axes, mesh.groups(axes), Options()) for axes in ("tp", "tp-pp", "dp", "pp")])
    [('tp', 'tp-pp'), ('dp',), ('pp',)]
    """
    classes: dict[object, list[str]] = {}
    for name, groups, options in kinds:
        key = (name,) if options.share is False else (groups.partition, options)
        classes.setdefault(key, []).append(name)
    return [tuple(names) for names in classes.values()]
