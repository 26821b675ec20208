"""Traffic: what a step sends in each kind of group.

```
{"tp": [{"collective": "all-reduce", "bytes": 1048576, "times": 4}], "pp": [{"collective": "send/recv", "bytes": 4096}]}

collective       bytes: what a rank holds before the call
all-reduce       its tensor                      n ranks hold n tensors of one size
all-gather       its part                        of n parts
reduce-scatter   its whole tensor                n parts of it go to n ranks
all-to-all       all that it gives away          n parts, one of which it keeps
broadcast        the tensor
send/recv        one message to the next member; the last one sends to nobody (a pipeline)
ring             one message to the next member, the last one to the first (ring attention)
```

>>> Traffic({"tp": [{"collective": "all_reduce", "bytes": 8, "times": 2}]})["tp"]
(Message(collective='all-reduce', bytes=8, times=2),)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rankmesh.core.axes import check_number
from rankmesh.core.documents import parse, read_text, refused_as
from rankmesh.errors import PlacementError, quoted, quoted_path

__all__ = ["COLLECTIVES", "Message", "Traffic"]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send/recv", "ring")
_FORM = 'a traffic file is {"tp": [{"collective": "all-reduce", "bytes": 1048576, "times": 4}]}'


@dataclass(frozen=True)
class Message:
    """One collective of a kind: the bytes that a rank holds, and how often a step."""

    collective: str
    bytes: float
    times: float = 1

    def __post_init__(self) -> None:
        name = str(self.collective).replace("_", "-")
        if name not in COLLECTIVES:
            raise PlacementError(
                f"unknown collective {quoted(self.collective)}; give one of {', '.join(COLLECTIVES)}",
                received=self.collective,
            )
        for what, value in (("bytes", self.bytes), ("times", self.times)):
            check_number(value, f"{what} of {name}", PlacementError, zero=True)
        object.__setattr__(self, "collective", name)


class Traffic(Mapping[str, tuple[Message, ...]]):
    """The messages of each kind by name; frozen, hashable. A kind that is not named sends nothing."""

    __slots__ = ("_kinds",)

    _kinds: dict[str, tuple[Message, ...]]

    def __init__(self, kinds: Mapping[str, Iterable[Message | Mapping[str, object]]]) -> None:
        if not isinstance(kinds, Mapping):
            raise PlacementError(f"{quoted(kinds)} is not traffic; {_FORM}", received=kinds)
        self._kinds = {str(name): tuple(_messages(name, rows)) for name, rows in kinds.items()}

    @classmethod
    def read(cls, path: str | Path) -> Traffic:
        """Read the traffic of a YAML or JSON file. Raises ``PlacementError``."""
        with refused_as(PlacementError, f"traffic file {quoted_path(path)}", _FORM, path=str(path)):
            try:
                return cls(parse(read_text(path)))
            except PlacementError as error:
                raise PlacementError(f"{path}: {error}", **error.values) from error

    def to_dict(self) -> dict[str, object]:
        """Plain data: the document of a traffic file."""
        return {name: [asdict(message) for message in messages] for name, messages in self._kinds.items()}

    def scaled(self, factor: float) -> Traffic:
        """Multiply every number of bytes by ``factor``."""
        return Traffic(
            {
                name: [Message(each.collective, each.bytes * factor, each.times) for each in messages]
                for name, messages in self._kinds.items()
            }
        )

    def __getitem__(self, name: str) -> tuple[Message, ...]:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def __repr__(self) -> str:
        return f"Traffic({self.to_dict()})"


def _messages(name: object, rows: object) -> Iterator[Message]:
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise PlacementError(f"traffic of {quoted(name)} is {quoted(rows)}; {_FORM}", kind=name)
    for row in rows:
        if isinstance(row, Message):
            yield row
            continue
        if not isinstance(row, Mapping):
            raise PlacementError(f"traffic of {quoted(name)} has {quoted(row)}; {_FORM}", kind=name)
        missing = {"collective", "bytes"} - row.keys()
        unknown = row.keys() - {"collective", "bytes", "times"}
        if missing or unknown:
            what = f"has no {' and no '.join(sorted(missing))}" if missing else f"has {quoted(min(map(str, unknown)))}"
            raise PlacementError(f"a message of {quoted(name)} {what}; {_FORM}", kind=name)
        yield Message(**row)
