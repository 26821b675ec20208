"""Last findings of the watch on a slow job, in a file beside its recordings: for people, monitoring and pages.

>>> late = Finding("computes", (13,), "dp@tp1", "dp", None, ("node4",), 0.084, 0.14, 0.61, 1, 0.0, "it computes long")
>>> print(late.sentence)  # doctest: +ELLIPSIS
rank 13 (host node4) makes dp wait: 84 ms of each step of 610 ms (14 %), since ...; it computes long
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Limits, Unreadable, parse_json, read_text, refused_as
from rankmesh.core.private import write_whole
from rankmesh.errors import RecordingError, first_of, in_words, quoted, quoted_path

__all__ = ["CAUSES", "FILE", "Finding", "SlowReport", "duration"]

FILE, _FORMAT = "slow.json", 1
CAUSES = ("computes", "input", "pause", "link", "host", "imbalance", "everyone")
# 16,384 ranks take 0.8 MiB and 82,000 values.
_LIMITS = Limits(size=16 << 20, values=1 << 20, depth=6)
# The types of a field's values in JSON, by its annotation.
_TEXT, _NUMBER, _NONE = frozenset([str]), frozenset([int, float]), frozenset([type(None)])
_TYPES = {"str": _TEXT, "str | None": _TEXT | _NONE, "int": {int}, "float": _NUMBER, "Finding": {dict}}


@dataclass(frozen=True)
class Finding:
    """One thing that makes a job slow.

    The job waits ``seconds`` because of it, averaged over all steps: a ``share`` of a ``step``, which is in seconds,
    too. It happens in one of ``every`` steps, ``since`` a time in seconds since the epoch. ``group`` waits or is slow,
    by the framework's name; ``kind`` is its axes. ``evidence`` is a clause for the end of `sentence`; where ``every``
    is more than 1 it begins with the place: ``in next_batch at train.py:88``.
    """

    cause: str
    ranks: tuple[int, ...]
    group: str | None
    kind: str | None
    operation: str | None
    hosts: tuple[str, ...]
    seconds: float
    share: float
    step: float
    every: int
    since: float
    evidence: str

    @property
    def what(self) -> str:
        """The ranks, host or group that is slow."""
        ranks, hosts = in_words(self.ranks), f"host{'s' if len(self.hosts) > 1 else ''} {first_of(self.hosts)}"
        if self.cause in ("everyone", "link"):
            return "the whole job" if self.cause == "everyone" else f"{self.group or 'a group'} of {ranks}"
        first, then = (hosts, ranks) if self.cause == "host" else (ranks, hosts)
        return f"{first} ({then})" if self.hosts else ranks

    @property
    def sentence(self) -> str:
        """The finding as a log has it: who, how long, since when, and why."""
        cost = f"{duration(self.seconds)} of each step of {duration(self.step)} ({100 * self.share:.0f} %)"
        cost += time.strftime(", since %H:%M:%S", time.localtime(self.since))
        several = len(self.hosts if self.cause == "host" else self.ranks) > 1
        others = self.kind if self.kind not in (None, "group") else "the others"
        if self.cause == "everyone":
            return f"{self.what} is slower than before: {cost}; {self.evidence}"
        if self.cause == "link":
            return f"{self.what}: {self.evidence}; {cost}"
        if self.every > 1:
            late = f"late once in about {self.every} steps, by {duration(self.seconds * self.every)}"
            return f"{self.what} {'are' if several else 'is'} {late}, {self.evidence}"
        return f"{self.what} {'make' if several else 'makes'} {others} wait: {cost}; {self.evidence}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data, with its sentence."""
        return {**{field.name: _plain(getattr(self, field.name)) for field in fields(self)}, "sentence": self.sentence}


@dataclass(frozen=True)
class SlowReport:
    """One evaluation of a job's speed.

    At ``time``, in seconds since the epoch, ``steps`` steps within ``window`` seconds took ``step`` seconds each (the
    median); ``lost`` is the share of the ranks' time that they waited for late ranks. ``findings`` begin with the
    costliest. For each rank: ``hosts`` (an index of ``host_names``), ``places`` (equal for ranks that make the same
    calls), ``caused``, ``waits`` and ``computes``: seconds of a step that it makes others wait, that it waits, and that
    it spends outside calls. ``trend`` has the step of up to 120 evaluations, the latest last.
    """

    time: float
    window: float
    steps: int
    step: float
    lost: float
    findings: tuple[Finding, ...]
    host_names: tuple[str, ...]
    hosts: tuple[int, ...]
    places: tuple[int, ...]
    caused: tuple[float, ...]
    waits: tuple[float, ...]
    computes: tuple[float, ...]
    trend: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, seconds rounded to microseconds."""
        return {"format": _FORMAT, **{field.name: _plain(getattr(self, field.name)) for field in fields(self)}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlowReport:
        """Return the report in plain data. Raises ``Unreadable``, or an error of Python, for any other data."""
        if data["format"] != _FORMAT:
            raise Unreadable(f"has format {quoted(data['format'])}, and this version of rankmesh reads {_FORMAT}")
        findings = tuple(Finding(**_values(Finding, found)) for found in _values(cls, data)["findings"])
        report = cls(**{**_values(cls, data), "findings": findings})
        ranks, hosts = set(range(len(report.places))), set(range(len(report.host_names)))
        lists = (report.hosts, report.caused, report.waits, report.computes)
        fits = all(len(values) == len(ranks) for values in lists) and hosts.issuperset(report.hosts)
        if not fits or not all(found.cause in CAUSES and ranks.issuperset(found.ranks) for found in findings):
            raise Unreadable(f"has lists of other ranks or hosts, or a cause that is not one of {', '.join(CAUSES)}")
        return report

    def write(self, folder: str | Path) -> None:
        """Write the report to a folder, which is made if it is not there; whole or not at all. Raises ``OSError``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / FILE, json.dumps(self.to_dict(), separators=(",", ":")).encode())

    @classmethod
    def read(cls, folder: str | Path) -> SlowReport | None:
        """Return the report in a folder, None if there is none. Raises ``RecordingError`` for any other file."""
        path = Path(folder) / FILE
        with refused_as(RecordingError, quoted_path(path), "delete it; the watch writes it anew", path=str(path)):
            return cls.from_dict(parse_json(read_text(path, _LIMITS.size), _LIMITS)) if path.exists() else None


def duration(seconds: float) -> str:
    """Format a time in seconds for people.

    >>> duration(0.0004), duration(0.084), duration(1.93), duration(185), duration(9000)
    ('0.4 ms', '84 ms', '1.9 s', '3 min', '2.5 h')
    """
    if seconds < 99.5:
        return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _plain(value: object) -> object:
    if isinstance(value, tuple | Finding):
        return value.to_dict() if isinstance(value, Finding) else [_plain(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _values(kind: type[Finding | SlowReport], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields. Raises ``Unreadable`` for other types than its annotations."""
    found = dict[str, Any]()
    for field in fields(kind):
        value, (name, *several) = data[field.name], str(field.type).removeprefix("tuple[").split(",")
        if (several and type(value) is not list) or not set(map(type, value if several else [value])) <= _TYPES[name]:
            raise Unreadable(f"has {quoted(value)} as {field.name}")
        found[field.name] = tuple(value) if several else value
    return found
