"""A recording: what the flight recorder kept of the calls of one rank, as columns.

```
process_group  collective_seq_id  profiling_name   sizes    state      ->   group  number  signature  pending  site
tp/0/f116...   41                 nccl:all_reduce  [[4]]    completed       0      41      0          no       3
tp/0/f116...   42                 nccl:all_reduce  [[4]]    started         0      42      0          yes      3
```

Signatures, sites and groups are listed once and numbered. The number of a call counts the collectives of its group, so
the calls of two ranks with one number are one call. A call that is sent from one member to another has a peer instead.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from rankmesh.doctor.calls import Signature
from rankmesh.errors import RecordingError

__all__ = ["Exchange", "GroupName", "InCall", "Recording", "recording_of", "signature_of"]

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_PLUMBING = re.compile(r"(^|/)(torch|rankmesh)/|^<frozen|/(contextlib|threading|functools)\.py$")
_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_COMPARED = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
_MOST = 64


@dataclass(frozen=True)
class GroupName:
    """A process group as a rank knows it; ``members`` are None where the recording does not say."""

    name: str
    desc: str
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class InCall:
    """The call that a rank's program was in when it spoke, as its Python frames told; ``running`` where in none."""

    operation: str = ""
    group: str = ""
    peer: int | None = None
    root: int | None = None
    reduction: str = ""
    site: str = ""
    running: bool = False


@dataclass(frozen=True)
class Exchange:
    """A send to, or a receive from, one member; both are positions in the group. ``at`` is its row of the recording."""

    group: int
    operation: str
    me: int
    peer: int
    signature: Signature
    pending: bool
    site: int
    at: int


@dataclass(eq=False)
class Recording:
    """The calls of one rank, oldest first; ``dropped`` where the ring buffer no longer holds the oldest."""

    rank: int
    path: str = ""
    world_size: int | None = None
    run: str = ""
    attempt: int = 0
    host: str = ""
    written: int = 0
    ended: bool = False
    state: str = ""
    dropped: bool = False
    groups: list[GroupName] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    group: Any = None
    number: Any = None
    signature: Any = None
    pending: Any = None
    site: Any = None
    created: Any = None
    exchanges: list[Exchange] = field(default_factory=list)
    in_call: InCall | None = None

    def __len__(self) -> int:
        return len(self.number)

    @property
    def spoke(self) -> bool:
        """Whether there are calls; a rank that could not speak has only what others saw of it."""
        return not self.state


def recording_of(data: Mapping[str, Any], rank: int | None, path: str = "") -> Recording:
    """The recording that a document holds; ``rank`` is what the name of its file says.

    Raises ``RecordingError`` for what is no recording, or of a format that is not known.
    """
    entries = _entries(data, path)
    own = data.get("rankmesh")
    about: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    number = about.get("rank", rank)
    if not isinstance(number, int) or not 0 <= number < 2**31:
        raise RecordingError(f"received {path}, which does not say of which rank it is; let its name end with the rank")
    result = Recording(
        rank=number,
        path=path,
        world_size=_whole(about.get("world_size")),
        run=str(about.get("run", ""))[:200],
        attempt=_whole(about.get("attempt")) or 0,
        host=str(about.get("host", ""))[:200],
        written=_whole(about.get("time_ns")) or 0,
        ended=about.get("ended") is True,
        state=str(about.get("state", ""))[:80],
        in_call=_in_call(about.get("in_call")),
    )
    try:
        _fill(result, entries, data)
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise RecordingError(f"received {path}, whose entries are not those of a recording ({error!r:.80})") from error
    return result


def _entries(data: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """The calls of a document of a format that is known."""
    entries = data.get("entries")
    version = str(data.get("version", ""))[:20]
    parts = version.split(".")
    if not all(part.isdecimal() for part in parts) or not isinstance(entries, list):
        raise RecordingError(f"received {path}, which is no recording: it has no version, or no entries")
    if int(parts[0]) != 2 or (len(parts) > 1 and int(parts[1]) < 1):
        raise RecordingError(
            f"received {path}, a recording of format {version}; formats from 2.1 to before 3 are known"
        )
    return entries


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _in_call(data: object) -> InCall | None:
    if not isinstance(data, Mapping):
        return None
    texts = {name: str(data.get(name, ""))[:400] for name in ("operation", "group", "reduction", "site")}
    numbers = {name: _whole(data.get(name)) for name in ("peer", "root")}
    return InCall(**texts, **numbers, running=data.get("running") is True)  # type: ignore[arg-type]


class _Columns:
    """The rows of one recording while its entries are read; each thing is listed once and numbered."""

    def __init__(self, stacks: Sequence[Any]) -> None:
        self.names: dict[tuple[str, str], int] = {}
        self.signatures: dict[Signature, int] = {}
        self.sites: dict[tuple[str, int, str], int] = {}
        self.exchanges: list[Exchange] = []
        self._rows: list[tuple[int, int, int, bool, int, int]] = []
        self._stacks = stacks
        self._known: dict[bytes, tuple[int, Signature]] = {}
        self._latest: dict[int, int] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """One call; what is sent from one member to another is kept apart."""
        name, call = entry["process_group"], entry["profiling_name"]
        group = self.names.setdefault((name[0], name[1]), len(self.names))
        signature, compared = self._signature(entry, call)
        site, pending = self._site(entry.get("frames")), not _done(entry, call)
        if entry.get("is_p2p") or " " in call:
            peers = _PEERS.search(call)
            if peers:
                me, peer = int(peers[2]), int(peers[3])
                self.exchanges.append(Exchange(group, peers[1], me, peer, compared, pending, site, len(self._rows)))
            return
        turn, created = entry["collective_seq_id"], entry.get("time_created_ns") or 0
        before = self._latest.get(group, 0)
        if turn == before and self._rows and self._rows[-1][0] == group:
            self._join(compared, pending)
            return
        if turn <= 1 < before:
            # The group was made again under its name: its last life counts.
            self._rows = [row for row in self._rows if row[0] != group]
        self._latest[group] = turn
        self._rows.append((group, turn, signature, pending, site, created))

    def _signature(self, entry: Mapping[str, Any], call: str) -> tuple[int, Signature]:
        key = marshal.dumps((call, *map(entry.get, _COMPARED)), 2)
        found = self._known.get(key)
        if found is None:
            signature = signature_of(entry)
            found = self._known[key] = self._number(signature), signature
        return found

    def _number(self, signature: Signature) -> int:
        return self.signatures.setdefault(signature, len(self.signatures))

    def _join(self, more: Signature, pending: bool) -> None:
        """Several calls that were made as one."""
        group, turn, signature, waiting, site, created = self._rows.pop()
        one = next(known for known, number in self.signatures.items() if number == signature)
        if more.operation != "coalesced" and len(one.facts) < _MOST:
            signature = self._number(
                Signature(f"{one.operation}+{more.operation}", (*one.facts, *more.facts), one.shown)
            )
        self._rows.append((group, turn, signature, waiting or pending, site, created))

    def _site(self, frames: Any) -> int:
        """The innermost line that belongs neither to torch nor to rankmesh; the outermost where all do."""
        if frames is None or frames == []:
            return -1
        listed = self._stacks[frames] if isinstance(frames, int) else frames
        chosen = next((frame for frame in listed if not _is_plumbing(frame["filename"])), listed[-1])
        return self.sites.setdefault((chosen["filename"], chosen["line"], chosen["name"]), len(self.sites))

    def fill(self, result: Recording) -> None:
        """Give the recording its columns."""
        values = chain.from_iterable(self._rows)
        columns = np.fromiter(values, dtype=np.int64, count=6 * len(self._rows)).reshape(-1, 6)
        result.group, result.number, result.signature = (columns[:, i].astype(np.int32) for i in range(3))
        result.pending, result.site = columns[:, 3].astype(bool), columns[:, 4].astype(np.int32)
        result.created = columns[:, 5]
        result.signatures, result.exchanges = list(self.signatures), self.exchanges
        result.sites = [f"{str(file)[:400]}:{int(line)} in {str(name)[:100]}" for file, line, name in self.sites]


@cache
def _is_plumbing(file: str) -> bool:
    return bool(_PLUMBING.search(str(file)[:4000]))


def _fill(result: Recording, entries: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> None:
    stacks = data.get("stacks")
    columns = _Columns(stacks if isinstance(stacks, list) else [])
    for entry in entries:
        columns.add(entry)
    columns.fill(result)
    first = entries[0].get("record_id", 0) if entries else 0
    result.dropped = isinstance(first, int) and first > 0
    result.groups = _named(columns.names, data)


def _done(entry: Mapping[str, Any], call: str) -> bool:
    """Whether a call is over: gloo's stay ``scheduled`` and are retired; NCCL's that are retired have timed out."""
    if entry.get("state") == "completed":
        return True
    return bool(entry.get("retired")) and not call.startswith(("nccl", "rccl", "hccl", "xccl", "mccl"))


def _named(names: Mapping[tuple[str, str], int], data: Mapping[str, Any]) -> list[GroupName]:
    """The groups of the calls, with their members where the recording has them; then those without calls."""
    config = data.get("pg_config")
    members: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for name, about in (config if isinstance(config, Mapping) else {}).items():
        if isinstance(about, Mapping):
            members[str(name)] = (str(about.get("desc", ""))[:400], _ranks(about.get("ranks")))
    found = [GroupName(str(name)[:400], str(desc)[:400], members.get(str(name), ("", None))[1]) for name, desc in names]
    seen = {group.name for group in found}
    return found + [
        GroupName(name, desc, ranks) for name, (desc, ranks) in members.items() if ranks and name not in seen
    ]


def _ranks(value: object) -> tuple[int, ...] | None:
    """The members, which torch writes as a text: ``[0, 1]``."""
    if isinstance(value, str):
        listed: Sequence[Any] = re.findall(r"\d{1,9}", value[: 2**22])
    else:
        listed = value if isinstance(value, list | tuple) else ()
    return tuple(int(rank) for rank in listed) or None


# -- one call ----------------------------------------------------------------------------------------------------------


def signature_of(entry: Mapping[str, Any]) -> Signature:
    """The facts of a call on which all members agree: sizes in elements, since networks know no shapes; dtypes.

    >>> print(signature_of({"profiling_name": "gloo:gather", "input_sizes": [[4, 2]], "input_dtypes": ["Float"]}))
    gather float32[4, 2]
    """
    operation = str(entry["profiling_name"])[:100].rpartition(":")[2].partition(" ")[0]
    gives = _shapes(entry.get("input_sizes"), entry.get("input_dtypes"))
    takes = _shapes(entry.get("output_sizes"), entry.get("output_dtypes"))
    shown = takes if operation == "scatter" or not gives else gives
    text = " ".join(f"{dtype}{list(sizes)}" for sizes, dtype in shown[:4]) + (" ..." if len(shown) > 4 else "")
    facts: dict[str, Any] = {"dtypes": tuple(sorted({dtype for _, dtype in shown}))}
    if not operation.lower().startswith(("all_to_all", "alltoall")):
        facts["sizes"] = tuple(prod(sizes) for sizes, _ in shown)
    return Signature.of(operation, text, **facts)


def _shapes(sizes: object, dtypes: object) -> list[tuple[tuple[int, ...], str]]:
    listed = sizes if isinstance(sizes, list | tuple) else ()
    names = dtypes if isinstance(dtypes, list | tuple) else ()
    return [
        (
            tuple(int(size) for size in shape[:_MOST]),
            _DTYPES.get(str(names[i]), str(names[i])) if i < len(names) else "",
        )
        for i, shape in enumerate(listed)
    ]
