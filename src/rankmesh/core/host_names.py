"""Host names: lists in brackets, and their natural order.

```
node[1-3,7]        node1 node2 node3 node7
gpu[08-10]x        gpu08x gpu09x gpu10x
a[1-2]b[3-4]       a1b3 a1b4 a2b3 a2b4
```

>>> sorted(host_list("node[9-10],node2"), key=natural)
['node2', 'node9', 'node10']
>>> sorted(["10.0.0.10", "10.0.0.9", "fe80::10", "fe80::9"], key=natural)
['10.0.0.9', '10.0.0.10', 'fe80::9', 'fe80::10']
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from itertools import islice, product
from math import prod
from string import whitespace

from rankmesh.errors import ClusterError, quoted

__all__ = ["HOST_LIST", "host_list", "listed_hosts", "natural", "task_counts"]

# What an error is about, in its values: a list of hosts, whatever file the hosts are looked up in.
HOST_LIST = "host list"

# More hosts than any cluster has: a range with a typing error is refused, not listed.
_LIMIT = 2**15
_PARTS = re.compile(r"([0-9]+)")
_WORD = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")

Key = tuple[tuple[int, str], ...]


def natural(name: str) -> tuple[Key, str]:
    """Return a sort key: numbers by value, the rest letter by letter, whatever their case; addresses as numbers.

    Only 0 to 9 are digits, and of any length; names that differ in leading zeros or case alone are ordered as strings.
    """
    address = _ipv6(name)
    if address is not None:
        return ((1, f"{address:032x}"),), name
    return tuple(_part(number, text) for number, text in enumerate(_PARTS.split(name))), name


def _part(number: int, text: str) -> tuple[int, str]:
    """Return a part as a key: text is at even places, digits at odd ones, first their length, then their value."""
    if number % 2 == 0:
        return 0, text.lower()
    digits = text.lstrip("0")
    return len(digits), digits


def _ipv6(name: str) -> int | None:
    if ":" not in name:
        return None
    try:
        return int(ipaddress.IPv6Address(name.strip("[]").partition("%")[0]))
    except ValueError:
        return None


def host_list(text: str | Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of a list of Slurm or PBS, in its order: ``node[1-4,7],login1``; numbers keep their zeros.

    Raises ``ClusterError`` for brackets that do not close, ranges that run backwards, and more than 32,768 hosts.
    """
    parts = [text] if isinstance(text, str) else list(text)
    names = tuple(islice((name for part in parts for word in _words(part) for name in _expand(word, part)), _LIMIT + 1))
    if len(names) > _LIMIT:
        raise _refused(text, f"it has more than {_LIMIT} hosts")
    return names


def listed_hosts(hosts: str | Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the hosts of a list, each of which is known and is listed once.

    >>> listed_hosts("node[1-2]", ["node1", "node2", "node3"])
    ('node1', 'node2')
    """
    names = host_list(hosts)
    for name, count in Counter(names).items():
        if count > 1:
            raise ClusterError(f"the host list has {quoted(name)} twice; list each host once", host=name, of=HOST_LIST)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            some = ", ".join(sorted(known, key=natural)[:8]) + (", ..." if len(known) > 8 else "")
            raise ClusterError(
                f"the host list has {quoted(name)}, which is none of the cluster's {len(known)} hosts ({some}); "
                + (f"did you mean {near[0]!r}?" if near else "list hosts by these names"),
                host=name,
                of=HOST_LIST,
            )
    return names


def _words(text: object) -> list[str]:
    """Return the words between commas and spaces that are outside of brackets."""
    if not isinstance(text, str):
        raise _refused(text, "a host is a name")
    if _WORD.sub("", text).strip(f",{whitespace}"):
        raise _refused(text, "its brackets do not match")
    return _WORD.findall(text)


def _expand(word: str, text: str) -> Iterator[str]:
    """Yield every name of one word, in Slurm's order: the last bracket fastest, then from the first one on.

    An IPv6 address in brackets is a name.
    """
    if _ipv6(word) is not None:
        yield word
        return
    words, brackets = _BRACKET.split(word)[::2], _BRACKET.split(word)[1::2]
    numbers = [list(_numbers(inside, text)) for inside in brackets]
    fastest = [*range(len(numbers))[-1:], *range(len(numbers) - 1)]
    if prod(map(len, numbers)) > _LIMIT:
        raise _refused(text, f"it has more than {_LIMIT} hosts")
    for chosen in product(*(numbers[place] for place in reversed(fastest))):
        at = dict(zip(reversed(fastest), chosen, strict=True))
        yield words[0] + "".join(at[place] + rest for place, rest in enumerate(words[1:]))


def _numbers(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None or max(map(len, filter(None, found.groups()))) > 18:
            raise _refused(text, f"{quoted(item)} in brackets is neither a number nor a range")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < _LIMIT:
            raise _refused(text, f"the range {quoted(item)} runs backwards or is too long")
        for number in range(first, last + 1):
            yield str(number).zfill(len(found[1]))


def task_counts(text: str) -> tuple[int, ...]:
    """Return the tasks of each host as Slurm counts them; ``ClusterError`` for anything else.

    >>> task_counts("4(x2),2")
    (4, 4, 2)
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ClusterError(f"tasks per node are {quoted(text)}; Slurm writes 4 or 4(x2),2", received=text)
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _refused(text: object, why: str) -> ClusterError:
    return ClusterError(
        f"host list {quoted(text)}: {why}; write names, ranges and commas, such as node[1-4,7]", received=text
    )
