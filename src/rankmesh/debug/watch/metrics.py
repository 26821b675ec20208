"""Metrics of a diagnosis and of a slow job for monitoring: a file of Prometheus, and spans of OpenTelemetry.

```
rankmesh.prom    rankmesh_hang 1   rankmesh_rank_state{rank="3",state="late"} 1   rankmesh_step_seconds 0.61
spans            rankmesh.hang ──> rankmesh.wait, one for each call that ranks wait in; an event rankmesh.diagnosis
                 rankmesh.slow, one for each finding
```

The rank that diagnoses or evaluates writes both. No span is sent without OpenTelemetry's API and a provider of the
program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rankmesh.core.documents import INDEX, Unreadable, read_text
from rankmesh.core.grouped import grouped
from rankmesh.core.private import write_whole
from rankmesh.debug.doctor.diagnosis import Diagnosis
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.debug.slow import SlowReport

__all__ = [
    "FILE",
    "Metrics",
    "export_difference",
    "metrics_of",
    "send_slow",
    "send_trace",
    "write_prometheus",
    "write_slow",
]

FILE = "rankmesh.prom"
_Samples = dict[str, list[tuple[dict[str, object], float]]]
_Key = TypeVar("_Key", bound=Hashable)
_Number = TypeVar("_Number", int, float)
# Calls of which a span is sent, and milliseconds that sending may take: the program may be ended next.
_TRACED, _FLUSH = 64, 2000
_HELP = {
    "hang": "1 while the last diagnosis names a cause, 0 once the job has gone on.",
    "diagnosis_timestamp_seconds": "When the job was diagnosed.",
    "diagnosis_info": "The diagnosis: its first cause, and the kind of group whose calls have waited longest.",
    "rank_state": "What each rank does: waiting, running, ended, unknown, or the cause that it is.",
    "rank_calls_behind": "Calls by which a rank is behind the first member of a group, at most, by kind of group.",
    "rank_waiting_seconds": "Since when a rank waits in a call.",
    "kind_waiting_seconds": "Since when a rank waits in a call of a group, by kind of group.",
    "step_seconds": "Seconds of a training step, the median of the last window.",
    "lost_share": "Share of the ranks' time that they wait for late ranks.",
    "rank_caused_seconds": "Seconds of each step that a rank makes others wait.",
    "slow": "Seconds of each step that the job waits because of a finding.",
    "difference_step": "The step at which the guard last found that replicas of a tensor differ.",
}


@dataclass(frozen=True)
class Metrics:
    """The numbers of one diagnosis; ``behind`` has those above 0 by rank and kind, ``kinds`` seconds by kind."""

    run: str
    verdict: str
    cause: Mapping[str, Any]
    time: int
    states: tuple[str, ...]
    behind: Mapping[tuple[int, str], int]
    waiting: Mapping[int, float]
    kinds: Mapping[str, float]
    calls: tuple[tuple[PendingCall, float], ...]

    @property
    def slowest(self) -> str:
        """The kind of group in whose calls a rank has waited longest, empty for none."""
        return max(self.kinds, key=lambda kind: self.kinds[kind], default="")


def metrics_of(diagnosis: Diagnosis) -> Metrics:
    """Return the numbers of a diagnosis; times are by the clock of the rank that waits."""
    history, recordings, calls = diagnosis.history, diagnosis.history.recordings, diagnosis.waits.calls
    waits = [(call, rank, _seconds(history, call, rank)) for call in calls for rank in call.waiting]
    return Metrics(
        run=next((one.run for one in recordings.values() if one.run), ""),
        verdict=diagnosis.verdict,
        cause=diagnosis.causes[0].to_dict() if diagnosis.causes else {},
        time=max((one.written for one in recordings.values()), default=0),
        states=tuple(_states(diagnosis)),
        behind=_behind(diagnosis),
        waiting=_highest((rank, seconds) for _, rank, seconds in waits),
        kinds=_highest((call.group.kind, seconds) for call, _, seconds in waits),
        calls=tuple(_highest((call, seconds) for call, _, seconds in waits).items()),
    )


def _seconds(history: History, call: PendingCall, rank: int) -> float:
    """Return for how long a rank waits in a call, 0.0 where that is not recorded."""
    made = history.created(call.group, rank, call.number) if call.numbered else 0
    return (history.recordings[rank].written - made) / 1e9 if made else 0.0


def _highest(pairs: Iterable[tuple[_Key, _Number]]) -> dict[_Key, _Number]:
    return {key: max(values) for key, values in grouped(pairs).items()}


def _states(diagnosis: Diagnosis) -> Iterator[str]:
    history, waiting = diagnosis.history, set(diagnosis.waiting)
    named = {rank: cause.cause for cause in reversed(diagnosis.causes) for rank in cause.ranks}
    for rank in range(diagnosis.world_size):
        if rank in named or rank in waiting:
            yield named.get(rank, "waiting")
        elif not history.has(rank):
            yield "unknown"
        else:
            yield "ended" if history.recordings[rank].ended else "running"


def _behind(diagnosis: Diagnosis) -> dict[tuple[int, str], int]:
    found = list[tuple[tuple[int, str], int]]()
    for group in diagnosis.history.tracks:
        last = {rank: diagnosis.history.last(group, rank) for rank in group.members if diagnosis.history.has(rank)}
        counted = {rank: number for rank, number in last.items() if number is not None}
        furthest = max(counted.values(), default=0)
        found += [((rank, group.kind), furthest - number) for rank, number in counted.items() if number < furthest]
    return _highest(found)


# -- Prometheus ------------------------------------------------------------------------------------------------------


def write_prometheus(folder: Path, found: Metrics, *, hangs: bool) -> None:
    """Write the numbers of a diagnosis."""
    samples: _Samples = {
        "hang": [({}, float(hangs))],
        "diagnosis_timestamp_seconds": [({}, found.time / 1e9)],
        "diagnosis_info": [(_about(found.cause) | {"slowest_kind": found.slowest, "verdict": found.verdict}, 1)],
        "rank_state": [({"rank": rank, "state": state}, 1) for rank, state in enumerate(found.states)],
        "rank_calls_behind": [({"rank": rank, "kind": kind}, n) for (rank, kind), n in sorted(found.behind.items())],
        "rank_waiting_seconds": [({"rank": rank}, seconds) for rank, seconds in sorted(found.waiting.items())],
        "kind_waiting_seconds": [({"kind": kind}, seconds) for kind, seconds in sorted(found.kinds.items())],
    }
    _write(folder / FILE, samples, found.run)


def write_slow(folder: Path, report: SlowReport, run: str) -> None:
    """Write the numbers of a job's speed; ``run`` is the launcher's number of the job."""
    ranks = enumerate(zip(report.hosts, report.caused, strict=True))
    samples: _Samples = {
        "step_seconds": [({}, report.step)],
        "lost_share": [({}, report.lost)],
        "rank_caused_seconds": [({"rank": rank, "host": report.host_names[at]}, value) for rank, (at, value) in ranks],
        "slow": [(_about(finding.to_dict()), finding.seconds) for finding in report.findings],
    }
    _write(folder / FILE, samples, run)


def export_difference(folder: Path, difference: Mapping[str, Any], run: str) -> None:
    """Write and send what the guard has found: its tensor, ranks, step and message."""
    ranks = ",".join(map(str, difference["ranks"]))
    labels = {"tensor": difference["tensor"], "ranks": ranks}
    _write(folder / FILE, {"difference_step": [(labels, difference["step"])]}, run)
    if (begun := _begun("rankmesh.difference", {**difference, "ranks": ranks})) is not None:
        begun.end()


def _write(path: Path, samples: _Samples, run: str) -> None:
    """Write these metrics, beside what the file has of others of this run; other users may read it."""
    lines = list[str]()
    with suppress(Unreadable, FileNotFoundError):
        metrics = f"\n{read_text(path, INDEX.size)}".rstrip().split("\n# HELP rankmesh_")[1:]
        ours = (text for text in metrics if _labels({"run": run})[1:-1] in text)
        lines += [f"# HELP rankmesh_{text}" for text in ours if text.partition(" ")[0] not in samples]
    for name, rows in samples.items():
        lines += [f"# HELP rankmesh_{name} {_HELP[name]}", f"# TYPE rankmesh_{name} gauge"]
        lines += [f"rankmesh_{name}{_labels({'run': run} | labels)} {value:.15g}" for labels, value in rows]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode(), mode=0o644)


def _about(cause: Mapping[str, Any]) -> dict[str, object]:
    ranks = ",".join(map(str, cause.get("ranks", ())))
    return {"ranks": ranks} | {name: cause.get(name) or "" for name in ("cause", "kind", "group", "operation")}


def _labels(labels: Mapping[str, object]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{str(value).translate(escaped)}"' for name, value in labels.items()) + "}"


# -- OpenTelemetry ---------------------------------------------------------------------------------------------------


def send_trace(found: Metrics) -> None:
    """Send a span of the hang with the diagnosis as its event, and one of each call that ranks wait in."""
    if not found.cause:
        return
    kept = ("cause", "ranks", "kind", "group", "call", "operation")
    about = {name: found.cause[name] for name in kept} | {"slowest_kind": found.slowest}
    longest = max(found.waiting.values(), default=0.0)
    if (hang := _begun("rankmesh.hang", about, found.time - int(longest * 1e9))) is None:
        return
    from opentelemetry import trace

    behind = _highest((f"calls_behind.{kind}", number) for (_, kind), number in found.behind.items())
    more = {"verdict": found.verdict, "states": found.states, "waiting_seconds": longest}
    hang.add_event("rankmesh.diagnosis", attributes=_named(about | more | behind), timestamp=found.time)
    hang.set_status(trace.StatusCode.ERROR, found.verdict)
    for call, seconds in found.calls[:_TRACED]:
        waits: dict[str, Any] = {
            "kind": call.group.kind,
            "group": call.group.label,
            "operation": call.operation,
            "call": call.number,
            "ranks": call.waiting,
            "missing": call.missing,
            "waiting_seconds": seconds,
        }
        if (wait := _begun("rankmesh.wait", waits, found.time - int(seconds * 1e9), hang)) is not None:
            wait.end(found.time)
    hang.end(found.time)
    # A provider of the API alone has nothing to send.
    if (flush := getattr(trace.get_tracer_provider(), "force_flush", None)) is not None:
        flush(_FLUSH)


def send_slow(report: SlowReport) -> None:
    """Send a span of each finding, since it began."""
    for one in report.findings:
        about = {name: value for name, value in one.to_dict().items() if value is not None}
        if (begun := _begun("rankmesh.slow", about, int(one.since * 1e9))) is not None:
            begun.end(int(report.time * 1e9))


def _begun(name: str, about: Mapping[str, Any], began: int | None = None, inside: Any = None) -> Any:
    """Start a span, in a trace of its own or inside another span; None without OpenTelemetry's API."""
    try:
        from opentelemetry import trace
        from opentelemetry.context import Context
    except ImportError:
        return None
    context = Context() if inside is None else trace.set_span_in_context(inside, Context())
    return trace.get_tracer("rankmesh").start_span(name, context=context, attributes=_named(about), start_time=began)


def _named(about: Mapping[str, Any]) -> dict[str, Any]:
    return {f"rankmesh.{name}": value for name, value in about.items()}
