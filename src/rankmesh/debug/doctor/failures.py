"""Failures: the ranks whose programs ended by an error of their own, by torchrun's files and logs.

```
attempt_0/3/error.json      {"message": {"message": "ValueError: ...", "extraInfo": {"py_callstack": "...", ...}}}
Root Cause (first observed failure):  rank : 3 (local_rank: 3)  exitcode : -9 (pid: 77)
[rank3]: Traceback (most recent call last): ... ValueError: ...       torch's own prefix: nobody caught the error
```

An error of communication, an abort or a SIGTERM ends ranks that waited for others: such a rank is not named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.lines import Line
from rankmesh.debug.doctor.sites import site_of
from rankmesh.debug.doctor.texts import Origin, Text, origin_of, ranked
from rankmesh.errors import in_words

__all__ = ["Failure", "failures_of", "is_secondary", "lines_of_failures"]

_LENGTH, _LINES = 200, 4096
_FIRST = "Root Cause (first observed failure)"
_MARKS = (_FIRST, "Traceback (most recent call last)", "py_callstack", "Fatal Python error")
_SECONDARY = re.compile(
    r"Dist(?:Backend|Network|Store)Error|ChildFailedError|SignalException|KeyboardInterrupt|NCCL|nccl|gloo"
    r"|[Cc]onnection (?:was )?(?:closed|reset|refused)|[Bb]roken pipe|[Ss]ocketTimeout|[Tt]imed out|timeout|watchdog"
)
_STATES_RANK = re.compile(r"\[rank\d{1,7}\]:|Fatal Python error: ")
# Signals by which launchers, the watchdog and users end ranks.
_ENDED = {2, 6, 15}
_FIELD = re.compile(r"^\s*(time|rank|exitcode)\s*: ?(.*)", re.M)
_TRACEBACK = re.compile(r"^\s*traceback\s*:", re.M)
_FRAME = re.compile(r"\s*File \"([^\"]{1,400})\", line (\d{1,7}),? in (.{1,200})")
_ERROR = re.compile(r"[A-Za-z_][\w.]{0,200}(?:: .*|)$")


@dataclass(frozen=True)
class Failure:
    """The end of a process: its error and line of the program where they are known, ``time`` in seconds, 0 for none.

    ``is_first``: torchrun observed it before the others of its host. ``first_rank`` is the first rank of that host, by
    which a file that is named after a local rank has its rank.
    """

    origin: Origin
    error: str = ""
    site: str = ""
    time: float = 0.0
    exit_code: int | None = None
    is_first: bool = False
    first_rank: int | None = None

    @property
    def is_primary(self) -> bool:
        """Whether the process ended for a reason of its own, as far as that is known."""
        ended = self.exit_code is not None and -self.exit_code in _ENDED
        return not ended and not is_secondary(self.error)


def is_secondary(error: str) -> bool:
    """Return whether an error is one by which a rank ends that waited for another rank."""
    return bool(_SECONDARY.search(error))


def failures_of(text: Text) -> tuple[Failure, ...]:
    """Return the failures that a text reports."""
    if not any(mark in text.content for mark in _MARKS):
        return ()
    if text.content.lstrip()[:1] == "{":
        failure = _of_file(text)
        return () if failure is None else (failure,)
    reported = _reported(text) if _FIRST in text.content else ()
    return (*reported, *(_raised(text) if _STATES_RANK.search(text.content) else ()))


def _of_file(text: Text) -> Failure | None:
    """Return the failure in an error file."""
    try:
        message = json.loads(text.content)["message"]
        extra = message.get("extraInfo", {}) if isinstance(message, Mapping) else {}
        words = str(message.get("message", "") if isinstance(message, Mapping) else message)
        stack = str(extra.get("py_callstack", ""))
        time = float(extra.get("timestamp") or 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    error, site = _traceback(stack.splitlines())
    return Failure(origin_of(text.path), (error or words.partition("\n")[0])[:_LENGTH], site, time)


def _reported(text: Text) -> Iterator[Failure]:
    """Yield the first failure of each report of torchrun."""
    plain = "\n".join(line for _, line in text.lines(text.content.index(_FIRST)))
    for block in plain.split(_FIRST)[1:]:
        head, *traceback = _TRACEBACK.split(block.partition("\n====")[0], maxsplit=1)
        fields = dict(_FIELD.findall(head))
        rank, local, code = (
            re.search(pattern, fields.get(name, ""))
            for name, pattern in (
                ("rank", r"^\d{1,7}"),
                ("rank", r"\(local_rank: (\d{1,7})\)"),
                ("exitcode", r"^-?\d{1,7}"),
            )
        )
        if rank is None:
            continue
        try:
            time = datetime.fromisoformat(fields.get("time", "").strip().replace("_", "T")).timestamp()
        except (ValueError, OverflowError):
            time = 0.0
        lines = re.split(r"\n\s*\n", "".join(traceback), maxsplit=1)[0].splitlines()
        stack = [line for line in lines if line[:1].isspace()]
        error, site = _traceback(stack)
        error = error or next((line.strip() for line in stack if not line.lstrip().startswith("To enable")), "")
        yield Failure(
            Origin(text.path.name, rank=int(rank[0])),
            error[:_LENGTH],
            site,
            time,
            int(code[0]) if code else None,
            is_first=True,
            first_rank=int(rank[0]) - int(local[1]) if local else None,
        )


def _raised(text: Text) -> Iterator[Failure]:
    """Yield the uncaught errors; torch prefixes their lines with the rank."""
    stacks: dict[Origin, list[str]] = {}
    for origin, line in text.lines():
        if line.startswith("Traceback (most recent call last)"):
            stacks[origin] = [line]
        elif line.startswith("Fatal Python error: ") and origin.rank is not None and "Aborted" not in line:
            yield Failure(origin, line[:_LENGTH])
        elif origin in stacks and len(stacks[origin]) < _LINES:
            stacks[origin].append(line)
            if line[:1].strip() and _ERROR.match(line):
                error, site = _traceback(stacks.pop(origin))
                if origin.rank is not None and "rank" in origin.prefix:
                    yield Failure(origin, error[:_LENGTH], site)


def _traceback(lines: Sequence[str]) -> tuple[str, str]:
    """Return the error at the end of a traceback, and the innermost line of the program in it."""
    frames = [(match[1], int(match[2]), match[3].strip()) for line in lines if (match := _FRAME.match(line))]
    error = next((line.strip() for line in reversed(lines) if frames and _ERROR.fullmatch(line.strip())), "")
    return error, site_of(reversed(frames))


# -- lines of ranks ----------------------------------------------------------------------------------------------------


def lines_of_failures(failures: Sequence[Failure], world_size: int = 0) -> Iterator[Line | str]:
    """Yield the first rank that failed by an error of its own; a sentence if all may have followed another."""
    begins = {failure.first_rank for failure in failures if failure.first_rank is not None} or {0}
    rank_of = {
        origin: rank if rank is None or origin.rank is not None else rank + min(begins) if len(begins) == 1 else None
        for origin, rank in ranked((failure.origin for failure in failures), world_size).items()
    }
    by_rank = grouped((rank_of[failure.origin], failure) for failure in failures)
    primary = {rank: found for rank, found in by_rank.items() if rank is not None and all(f.is_primary for f in found)}
    if failures and not primary:
        one = min(failures, key=lambda failure: (not failure.is_first, failure.time))
        rank = rank_of[one.origin]
        who = "a process" if rank is None else f"rank {rank}"
        yield f"{who} failed: {_words([one])}" + ("" if one.is_primary else "; it may have waited for another rank")
    # Who raised something comes before who only ended, then the first; one without a time comes after all others.
    when = {rank: min((one.time for one in found if one.time), default=inf) for rank, found in primary.items()}
    order = sorted(primary, key=lambda rank: (not any(one.error for one in primary[rank]), when[rank], rank))
    is_first = any(one.is_first for rank in order[:1] for one in primary[rank])
    named = [rank for rank in order if rank == order[0] or (when[rank] == when[order[0]] and not is_first)]
    later = [rank for rank in order if rank not in named]
    for rank in named:
        words = _words(primary[rank]) + (f"; {in_words(later)} failed later" if later else "")
        yield Line(source=", ".join(dict.fromkeys(f.origin.path for f in primary[rank])), rank=rank, failure=words)


def _words(found: Sequence[Failure]) -> str:
    """Return the error by which a process ended, else its exit code, and the line of the program."""
    error = next((one.error for one in found if one.error), "")
    site = next((one.site for one in found if one.site), "")
    code = next((one.exit_code for one in found if one.exit_code is not None), None)
    how = "" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return ", ".join(filter(None, [error or how, site and f"at {site}"]))
