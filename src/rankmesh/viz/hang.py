"""A hang as one page: the verdict, the causes, and a timeline of the groups involved.

```
dp@tp1   rank 1   ▬ ▬ ▬ ▬▬▬▬▬▬▬▬▬▬▬▬ 5  all_reduce, not finished
         rank 3   ▬ ▬ ▬ ·                never came
                  └ calls in the order of time, up to the last one of all
```
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from html import escape

from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.diagnosis import Diagnosis
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, Track
from rankmesh.errors import in_words
from rankmesh.viz.html import TEMPLATE, table

__all__ = ["page"]

_GROUPS, _RANKS, _CALLS = 12, 32, 24
_LEFT, _WIDTH, _ROW, _BAR = 90, 900, 20, 12
_COLOURS = {"done": "#8ab4d8", "open": "#d9822b", "cause": "#c23030"}


def page(found: Diagnosis) -> str:
    """The page of a diagnosis: up to 12 groups, 32 members of each, their last 24 calls."""
    sections = [f"<p>{escape(found.verdict)}</p>"]
    if found.causes:
        sections += ["<h2>Causes</h2>", _causes(found.causes), _lines(found.causes)]
    sections.append(f"<p>{escape(_waiting(found))}</p>")
    if found.unrecorded:
        sections.append(f"<p>{escape(in_words(found.unrecorded)).capitalize()} left no recording.</p>")
    groups = _involved(found)
    if groups:
        sections += ["<h2>Timeline</h2>", _LEGEND, *(_timeline(found, group) for group in groups)]
    sections += [f'<p class="note">{escape(text)}</p>' for text in found.notes]
    return TEMPLATE.substitute(title="What hangs", body="\n".join(sections))


_LEGEND = (
    f'<p class="note"><span style="color:{_COLOURS["done"]}">■</span> finished '
    f'<span style="color:{_COLOURS["open"]}">■</span> not finished '
    f'<span style="color:{_COLOURS["cause"]}">■</span> named as a cause, an outline where the rank never came; '
    "numbers count the calls of the group</p>"
)


def _waiting(found: Diagnosis) -> str:
    if not found.waiting:
        return "No rank waits."
    waits = "waits" if len(found.waiting) == 1 else "wait"
    return f"{in_words(found.waiting)} of {found.world_size} {waits}.".capitalize()


def _causes(causes: Iterable[Cause]) -> str:
    rows = [
        (
            cause.cause,
            in_words(cause.ranks),
            str(cause.group),
            cause.call,
            cause.operation,
            cause.explains,
        )
        for cause in causes
    ]
    return table(("cause", "ranks", "group", "call", "operation", "ranks that wait"), rows)


def _lines(causes: Iterable[Cause]) -> str:
    """Where the program of each rank of the causes is."""
    sites = {rank: site for cause in causes for rank, site in cause.sites.items()}
    rows = [(f"rank {rank}", site) for rank, site in sorted(sites.items())[:_RANKS]]
    return f"<h2>Lines</h2>\n{table(('rank', 'line'), rows)}" if rows else ""


def _involved(found: Diagnosis) -> list[KnownGroup]:
    """The groups of the causes, then those in which ranks wait."""
    groups = [cause.group for cause in found.causes] + [call.group for call in found.waits.calls]
    return list(dict.fromkeys(groups))[:_GROUPS]


def _timeline(found: Diagnosis, group: KnownGroup) -> str:
    """The last calls of each member on one axis of time."""
    history, ranks = found.history, _shown(found, group)
    failed = {call.number for call in found.waits.calls if call.group is group and call.failed}
    calls_by_rank = {rank: _calls(history, history.tracks[group].get(rank), failed) for rank in ranks}
    times = [time for calls in calls_by_rank.values() for _, time, _ in calls]
    low, high = min(times, default=0), max(times, default=1)
    scale = _WIDTH / (1.15 * max(high - low, 1))
    named = {(rank, cause.call) for cause in found.causes if cause.group is group for rank in cause.ranks}
    guilty = {rank for rank, _ in named}
    placed = {
        rank: [(number, (time - low) * scale, done) for number, time, done in calls]
        for rank, calls in calls_by_rank.items()
    }
    rows = [_row(place, rank, placed[rank], guilty, named) for place, rank in enumerate(ranks)]
    rows += [_missed(place, rank, named, placed) for place, rank in enumerate(ranks)]
    more = f" ({len(group.members) - len(ranks)} members not shown)" if len(group.members) > len(ranks) else ""
    height = _ROW * len(ranks) + 4
    return (
        f"<h3>{escape(str(group))}{more}</h3>\n"
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'role="img" font-size="11">{"".join(rows)}</svg>'
    )


def _missed(
    place: int, rank: int, named: set[tuple[int, int]], placed: dict[int, list[tuple[int, float, bool]]]
) -> str:
    """The outline of a call that a rank never reached, from where the first of the others made it."""
    made = {number for number, _, _ in placed[rank]}
    call = next((number for other, number in named if other == rank and number not in made), None)
    start = min((at for calls in placed.values() for number, at, _ in calls if number == call), default=None)
    if start is None:
        return ""
    return (
        f'<rect x="{_LEFT + start:.1f}" y="{place * _ROW + 2}" width="{max(3.0, _WIDTH - start):.1f}" height="{_BAR}" '
        f'rx="2" fill="none" stroke="{_COLOURS["cause"]}" stroke-dasharray="3 2">'
        f"<title>rank {rank} never reached call {call}</title></rect>"
    )


def _shown(found: Diagnosis, group: KnownGroup) -> list[int]:
    """The members, those that a cause names first where there are too many."""
    named = {rank for cause in found.causes for rank in cause.ranks}
    chosen = sorted(group.members, key=lambda rank: (rank not in named, rank))[:_RANKS]
    return sorted(chosen)


def _calls(history: History, track: Track | None, failed: Collection[int]) -> list[tuple[int, int, bool]]:
    """Number, time and whether it came through, of the last calls of a track."""
    if track is None:
        return []
    created = history.recordings[track.rank].created
    last = range(max(0, len(track.numbers) - _CALLS), len(track.numbers))
    numbers = [int(track.numbers[place]) for place in last]
    return [
        (number, int(created[track.rows[place]]), not track.pending[place] and number not in failed)
        for place, number in zip(last, numbers, strict=True)
    ]


def _row(
    place: int,
    rank: int,
    calls: list[tuple[int, float, bool]],
    guilty: set[int],
    named: set[tuple[int, int]],
) -> str:
    top = place * _ROW + 2
    style = f'fill="{_COLOURS["cause"]}" font-weight="600"' if rank in guilty else 'fill="#57606a"'
    parts = [f'<text x="0" y="{top + 11}" {style}>rank {rank}</text>']
    ends = [*(start for _, start, _ in calls[1:]), float(_WIDTH)][: len(calls)]
    for (number, start, done), end in zip(calls, ends, strict=True):
        colour = "cause" if (rank, number) in named else "done" if done else "open"
        width = max(3.0, min(end - start - 1, 40.0)) if done else max(3.0, _WIDTH - start)
        state = "finished" if done else "not finished"
        parts.append(
            f'<rect x="{_LEFT + start:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2" '
            f'fill="{_COLOURS[colour]}"><title>rank {rank}, call {number}, {state}</title></rect>'
        )
        if width > 14:
            parts.append(f'<text x="{_LEFT + start + 3:.1f}" y="{top + 10}" fill="#fff">{number}</text>')
    if not calls:
        parts.append(f'<text x="{_LEFT}" y="{top + 11}" fill="#57606a">no calls of this group</text>')
    return "".join(parts)
