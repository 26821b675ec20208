"""The agreement of the members when an epoch ends: pure functions of what each of them reports.

```
reports of those that arrived ──> who is lost ──> the next members ──> the step that all of them can have
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from rankmesh.errors import LayoutError, PlanError, in_words, quoted
from rankmesh.rendezvous import Outcome
from rankmesh.survival.epoch import Contact, Epoch
from rankmesh.survival.members import Members, Sizes, SizesData

__all__ = ["CONDITIONS", "EpochEnd", "Relayout", "Report", "Suspicion", "conclude", "may_go_on", "same_step"]

# The fix of commits that differ between ranks.
_SAME_STEPS = "have every rank commit the same steps, in the same order"

# Between a coordinate and a step, where an error is named by both.
_STEP = " in step "

# Errors in one message.
_SHOWN = 4


@dataclass(frozen=True)
class Suspicion:
    """A difference whose steps are repeated: its step, the tensor, the ranks that differed, and where all go back to.

    ``tied``: these are both sides of a difference between two halves. ``repeat`` is 1 or 2. ``first`` are the digests
    that this rank had at that step the first time, ``second`` in the first repeat; None if it was not a member then.
    """

    step: int
    tensor: str
    ranks: tuple[int, ...]
    back: int
    tied: bool
    repeat: int = 1
    first: Mapping[str, int] | None = field(default=None, compare=False)
    second: Mapping[str, int] | None = field(default=None, compare=False)

    @property
    def data(self) -> dict[str, object]:
        """Return the fields that all ranks share, as plain data."""
        names = ("step", "tensor", "ranks", "back", "tied", "repeat")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, data: Mapping[str, Any], mine: Suspicion | None) -> Suspicion:
        """Return a suspicion from plain data; ``mine`` if it is that one, with this rank's digests."""
        found = cls(**{**data, "ranks": tuple(data["ranks"])})
        return mine if mine is not None and mine == found else found

    def __str__(self) -> str:
        if self.repeat == 1:
            who = f"{quoted(self.tensor)} differs on {in_words(self.ranks)} at step {self.step}"
            return f"{who}; all ranks repeat the steps from {self.back} on"
        return (
            f"{quoted(self.tensor)} is equal at step {self.step} now; all ranks repeat the steps from {self.back} on "
            "once more, to learn whether they always give the same"
        )


class Relayout(TypedDict):
    """Another layout that was asked for, and the memory to move state with."""

    sizes: SizesData
    budget: int | None


@dataclass(frozen=True)
class Report:
    """The state that one member reports at the end of an epoch.

    ``done``       ``train`` has returned here; ``over``: it has on every rank
    ``error``      what left ``train`` and is this member's own; ``torn``: what may only follow from the loss of another
    ``first``      this member began the change; ``handled``: its program handles the error, and calls ``regroup``
    ``steps``      of each epoch of which it has snapshots, the steps of them
    ``commits``    the last steps that were committed in the epoch, by the number of the commit
    ``committed``  some member has committed, as far as it knows
    ``loads``      what nobody holds can be loaded
    ``began``      the step at which the epoch began
    ``at``         the step that this member was doing
    ``joining``    addresses of the processes that requested this member to let them join
    ``evicted``    members that the watch named as the cause of a hang
    ``unclear``    why ranks wait, where the watch named none of them as the cause
    ``equal``      of each epoch in which replicas are compared, the last step at which they were equal, -1 for none
    ``suspicion``  a difference that the guard has found: its step, and the one to go ``back`` to
    ``ended``      members on its host whose processes have ended, as the kernel there shows
    ``relayout``   the layout that all ranks, or somebody outside, asked for, and the memory to move state with
    """

    done: bool = False
    over: bool = False
    error: str = ""
    torn: str = ""
    first: bool = False
    handled: bool = False
    steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    commits: Mapping[int, int] = field(default_factory=dict)
    committed: bool = False
    loads: bool = False
    began: int = 0
    at: int = 0
    joining: Sequence[Contact] = ()
    evicted: Sequence[int] = ()
    unclear: str = ""
    equal: Mapping[int, int] = field(default_factory=dict)
    suspicion: Mapping[str, Any] | None = None
    ended: Sequence[int] = ()
    relayout: Relayout | None = None

    @property
    def text(self) -> str:
        """The report as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Report:
        """Return the report that a member gave."""
        data = json.loads(text)
        data["steps"] = {int(epoch): tuple(steps) for epoch, steps in data["steps"].items()}
        data["equal"] = {int(epoch): step for epoch, step in data["equal"].items()}
        data["commits"] = {int(number): step for number, step in data["commits"].items()}
        data["joining"] = tuple(map(Contact.read, data["joining"]))
        return cls(**{**data, "evicted": tuple(data["evicted"]), "ended": tuple(data["ended"])})


@dataclass(frozen=True)
class EpochEnd:
    """The epoch that ends, the last of ``history``; ``suspects`` and ``evicted`` may grow meanwhile.

    ``raised`` are the errors for which members were lost, by coordinate, and by step too for the epoch before.
    ``before`` is the epoch to whose layout all go back if the program fails in this one before a rank has committed,
    None if there is none. ``refused`` are the layouts from which they went back, by digest, with the reason.
    """

    epoch: Epoch
    history: Mapping[int, Members]
    raised: Mapping[str, str]
    suspects: Collection[int]
    evicted: Collection[int]
    before: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def same_step(rank: int, step: int, other: str, other_step: int) -> None:
    """Raise ``PlanError`` if two ranks commit different steps at the same time."""
    if step != other_step:
        raise PlanError(
            f"rank {rank} commits step {step} where {other} commits step {other_step}; {_SAME_STEPS}", step=step
        )


def conclude(
    history: Mapping[int, Members],
    epoch: int,
    reports: Mapping[int, Report],
    gone: Collection[int] = (),
    raised: Mapping[str, str] | None = None,
    *,
    before: int | None = None,
    refused: Mapping[str, str] | None = None,
) -> Outcome:
    """Return the continuation of the job after ``epoch``, by the reports of the members that arrived.

    ``history`` has the members of this epoch, and of those before of which there may be snapshots; ``gone`` are the
    members that did not arrive and whose ports refuse connections, which is no proof that they have ended. ``raised``,
    ``before`` and ``refused`` are as in ``EpochEnd``. The outcome's ``ranks`` are the members that are lost, its
    ``value`` is what follows.
    """
    found = _found(history, epoch, reports, gone, raised or {}, before, refused or {})
    return next(outcome for condition in CONDITIONS if (outcome := condition(found)) is not None)


@dataclass(frozen=True)
class _Found:
    """The reports of an epoch: ``there`` are the members at a rank that have reported, ``returned`` ranks.

    ``ended`` names the member that reports each process that has ended; ``began`` the members that began the change if
    nobody is lost for it; ``undone`` why all go back to the layout before; ``following`` the next members, or why there
    are too few; ``again`` the coordinate at which an error came back; ``now`` the step that all take again, if they do.
    """

    members: Members
    reports: Mapping[int, Report]
    absent: tuple[int, ...]
    there: Sequence[int]
    returned: Sequence[int]
    ended: Mapping[int, int]
    lost: Collection[int]
    began: Collection[int]
    unclear: str
    again: str | None
    errors: Mapping[str, str]
    following: Members | PlanError
    source: int | None
    step: int
    load: bool
    last: str | None
    now: str
    value: Mapping[str, object]

    def failed(self, message: str, ranks: Collection[int], *fields: str) -> Outcome:
        return Outcome("failed", tuple(sorted(ranks)), self.absent, fields, message=message)


def _found(
    history: Mapping[int, Members],
    epoch: int,
    reports: Mapping[int, Report],
    gone: Collection[int],
    raised: Mapping[str, str],
    before: int | None,
    refused: Mapping[str, str],
) -> _Found:
    members = history[epoch]
    absent = tuple(sorted(set(members.all) - reports.keys()))
    there = [member for member in members.ranks if member in reports]
    returned = [rank for rank, member in enumerate(members.ranks) if member in reports and reports[member].done]
    ended = {one: by for by in sorted(reports, reverse=True) for one in reports[by].ended if one in absent}
    evicted = {member for report in reports.values() for member in report.evicted}
    lost = set(absent).union(evicted, (member for member, report in reports.items() if report.error))
    unclear = next((report.unclear for report in reports.values() if report.unclear), "")
    # A collective failed, and nobody is missing; the others may have waited for a rank that has returned.
    began = set() if lost else {member for member, report in reports.items() if report.torn and report.first}
    # A layout is tried until each rank has committed a step in it: the hold's own commit is number 0.
    if before is not None and all(reports[one].done or max(reports[one].commits, default=0) for one in there):
        before = None
    undone = "" if before is None else _refusal(members, reports, {*absent, *evicted})
    if undone:
        lost, began, refused = {*absent, *evicted}, set(), {**refused, members.sizes.first.digest: undone}
    elif len(began) == 1 and not unclear and not returned and not reports[min(began)].handled:
        lost, began = began, set()
    errors = _raised(members, reports, lost)
    again = next((key.partition(_STEP)[0] for key, text in errors.items() if raised.get(key) == text), None)
    joining = {contact for report in reports.values() for contact in report.joining}
    joined = dict(enumerate(sorted(joining), members.started))
    hosts = {member: contact.host for member, contact in joined.items()}
    asked = next((reports[one].relayout for one in sorted(reports) if reports[one].relayout and not undone), None)
    old = None if before is None else history[before]
    following: Members | PlanError
    try:
        following = _following(members.joined(hosts), lost, asked, old, undone=bool(undone))
    except PlanError as error:
        following = error
    # A spare, which compares nothing, only reports what was decided before.
    suspicions = [reports[member].suspicion for member in there]
    suspicion = max(filter(None, suspicions), key=lambda one: int(one["repeat"]), default=None)
    source, step, equal = _source(history, reports, lost, suspicion["back"] if suspicion else None)
    load = source is None and any(report.committed for report in reports.values())
    if load:
        step = max((report.began for member, report in reports.items() if member not in lost), default=0)
    kept = {key: text for key, text in raised.items() if key and _STEP not in key} | errors
    last, now = raised.get(""), ""
    if following == members:  # all take the step again, once: an epoch without progress would follow another for ever
        now = f"step {step}" + (f", repeat {suspicion['repeat']}" if suspicion else "")
        if suspicion and last is not None and last.startswith(now):  # the repeat was interrupted
            now += " again"
        kept[""] = now
    value: dict[str, object] = {}
    if isinstance(following, Members):
        changed = following.sizes != members.sizes
        if changed:
            before = epoch if old is None else None if following.sizes == old.sizes else before
        value = {
            **following.data,
            "sizes": following.sizes.data if changed else None,
            "budget": None if asked is None else asked["budget"],
            "asked": None if asked is None else asked["sizes"]["plan"],
            "joined": {str(member): vars(contact) for member, contact in joined.items()},
            "step": step,
            "source": source,
            "equal": equal,
            "load": load,
            "raised": kept,
            "reasons": _reasons(reports, lost, ended, gone),
            "before": before,
            "refused": refused,
            "suspicion": suspicion if following == members else None,
        }
    args = (members, reports, absent, there, returned, ended, lost, began, unclear, again, errors, following)
    return _Found(*args, source, step, load, last, now, value)


def _over(found: _Found) -> Outcome | None:
    """``train`` has returned on all ranks."""
    announced = any(report.over for report in found.reports.values())
    complete = announced or len(found.there) == len(found.members.ranks)
    return Outcome(value={"over": True}) if complete and len(found.returned) == len(found.there) else None


def _too_few(found: _Found) -> Outcome | None:
    """Others, who may live, may go on without these."""
    reports, alive = found.reports, sorted(set(found.members.all).difference(found.ended))
    if may_go_on(reports, alive):
        return None
    part = "fewer than half" if 2 * len(reports) < len(alive) else f"half, but not the one with member {alive[0]}"
    message = f"{len(reports)} of {len(alive)} members that may live are here, {part}; the others may go on without"
    message += " them; start spares on further hosts, so that more than half are left"
    return Outcome("missing", found.absent, found.absent, message=message)


def _different_steps(found: _Found) -> Outcome | None:
    """Two ranks have committed different steps."""
    different = _different(found.members, found.reports)
    return found.failed(different, (), "step") if different else None


def _same_error(found: _Found) -> Outcome | None:
    """Another machine raises the error of one that failed, at the same coordinate."""
    if (again := found.again) is None:
        return None
    error = next(f"{key[len(again) :]}: {found.errors[key]}" for key in found.errors if key.startswith(again + _STEP))
    message = f"the rank at {again} raised the same error again{error}; no other member can avoid it"
    return found.failed(message, found.lost, "error")


def _no_members(found: _Found) -> Outcome | None:
    """Too few are left for any layout."""
    if isinstance(found.following, Members):
        return None
    message = _of_all(found.members, found.reports)
    return found.failed(message or _with_errors(found.following.message, found.reports, found.lost), found.lost)


def _nothing_to_restore(found: _Found) -> Outcome | None:
    """No step is held by all that are left, and it cannot be loaded."""
    left = [report for member, report in found.reports.items() if member not in found.lost]
    loads = all(report.loads for report in left) and not any(any(report.steps.values()) for report in left)
    if not found.load or loads:
        return None
    message = _with_errors(_nothing_in_common(found.reports, found.lost), found.reports, found.lost)
    return found.failed(message, found.lost)


def _no_progress(found: _Found) -> Outcome | None:
    """All fail in one step for the second time."""
    if not found.now or found.last != found.now:
        return None
    message = f"{found.now} failed again, and no rank is known to be at fault"
    message += f": {found.unclear or _why(found.reports, found.began)}"
    message += f"; train() had returned on {in_words(found.returned)}" if found.returned else ""
    return Outcome("failed", tuple(sorted(found.began)), fields=("error",), message=message)


def _goes_on(found: _Found) -> Outcome:
    return Outcome(ranks=tuple(sorted(found.lost)), missing=found.absent, value=found.value)


# The first of these that holds is the outcome.
CONDITIONS: tuple[Callable[[_Found], Outcome | None], ...] = (
    *(_over, _too_few, _different_steps, _same_error, _no_members, _nothing_to_restore, _no_progress),
    _goes_on,
)


def may_go_on(here: Collection[int], alive: Collection[int]) -> bool:
    """Return whether the members ``here`` may go on without the others of those that are not known to have ended.

    More than half of them may, and half with the lowest one: of two parts that cannot reach each other, at most one.
    """
    return 2 * len(here) > len(alive) or (2 * len(here) == len(alive) and min(alive) in here)


def _reasons(
    reports: Mapping[int, Report], lost: Collection[int], ended: Mapping[int, int], gone: Collection[int]
) -> dict[str, str]:
    """Return why each lost member is left out, and whether that is evidence or a guess."""
    found = {}
    for member in sorted(lost):
        report = reports.get(member, Report())
        if text := report.error or report.torn:
            found[member] = f"evidence: it raised {text}"
        elif member in ended:
            found[member] = f"evidence: its process has ended, as member {ended[member]} on its host reports"
        elif member in gone:
            found[member] = "guess: its host refuses connections, and no member there reports that it has ended"
        else:
            found[member] = "guess: it does not reply"
    return {str(member): text for member, text in found.items()}


def _following(
    members: Members, lost: Collection[int], asked: Relayout | None, old: Members | None, *, undone: bool
) -> Members:
    """Return the next members: in the layout that was asked for, unless losses leave too few for it.

    While a layout is tried, the layout of the ``old`` members follows if it is ``undone``, or too few are left.
    """
    if asked is not None:
        with suppress(LayoutError, PlanError):
            return members.relaid(Sizes.read(asked["sizes"])).without(lost)
    try:
        return members.back(old, lost) if undone and old is not None else members.without(lost).grown()
    except PlanError:
        if old is None:
            raise
        return members.back(old, lost)


def _refusal(members: Members, reports: Mapping[int, Report], lost: Collection[int]) -> str:
    """Return why the program fails in a layout, "" if it does not; another rank's loss may fail calls, too."""
    by_rank = [(rank, reports[member]) for rank, member in enumerate(members.ranks) if member in reports]
    errors = [(rank, report.error) for rank, report in by_rank if report.error]
    torn = sorted((not report.first, rank, report.torn) for rank, report in by_rank if report.torn and not lost)
    found = [*errors, *((rank, text) for _, rank, text in torn)]
    return f"the job went back from {members.plan.mesh}, since rank {found[0][0]} raised {found[0][1]}" if found else ""


def _different(members: Members, reports: Mapping[int, Report]) -> str:
    """Return which commits of two ranks differ: of one number by their steps, or of one step by their numbers."""
    seen: dict[tuple[str, int], tuple[int, int, int]] = {}
    for rank, member in enumerate(members.ranks):
        for number, step in reports[member].commits.items() if member in reports else ():
            for key in (("number", number), ("step", step)):
                other, *before = seen.setdefault(key, (rank, number, step))
                if before != [number, step]:
                    of_other = f"commit {before[0]} of rank {other} of step {before[1]}"
                    return f"commit {number} of rank {rank} is of step {step}, and {of_other}; {_SAME_STEPS}"
    return ""


def _raised(members: Members, reports: Mapping[int, Report], lost: Collection[int]) -> dict[str, str]:
    """Return the errors of the lost members by coordinate; and by coordinate and step, also where others raised them.

    Numbers in a quoted value, such as a file's name, do not count.
    """
    texts = {reports[member].error or reports[member].torn for member in lost if member in reports} - {""}
    found = {}
    for rank, member in enumerate(members.ranks):
        report = reports.get(member)
        if report is not None and (text := report.error or report.torn) in texts:
            where = ",".join(f"{axis}={at}" for axis, at in members.plan.mesh.coordinate(rank).items())
            found[f"{where}{_STEP}{report.at}"] = text
            if member in lost:
                what, quote, value = text.partition("'")
                found[where] = what + quote + re.sub(r"\d+", "#", value)
    return found


def _of_all(members: Members, reports: Mapping[int, Report]) -> str:
    """Return the errors of the ranks if each rank has raised one: the program ends the job, not the lack of spares."""
    texts = [reports[member].error for member in members.ranks if member in reports]
    if len(texts) < len(members.ranks) or "" in texts:
        return ""
    return f"every rank raised an error: {'; '.join([*dict.fromkeys(texts)][:_SHOWN])}"


def _why(reports: Mapping[int, Report], began: Collection[int]) -> str:
    """Return the first errors that ranks report, beginning with the ranks that began the change."""
    members = sorted(reports, key=lambda member: (member not in began, member))
    texts = dict.fromkeys(reports[member].torn for member in members if reports[member].torn)
    return "; ".join([*texts][:_SHOWN]) or "no rank reported an error; look for ranks that stop for a while"


def _source(
    history: Mapping[int, Members], reports: Mapping[int, Report], lost: Collection[int], back: int | None
) -> tuple[int | None, int, int | None]:
    """Return the newest epoch whose ranks, as far as they are left, all have snapshots; and the last common step.

    The third value is the last common step at which replicas were found equal, None where they are not compared. After
    a difference all go to that one, at most ``back``; an epoch that has none is not a source.
    """
    failed = [report for member, report in reports.items() if member in lost and (report.error or report.first)]
    raised = min((report.at for report in failed), default=None)
    for epoch in sorted(history, reverse=True):
        there = [member for member in history[epoch].ranks if member in reports and member not in lost]
        steps = [set(reports[member].steps.get(epoch, ())) for member in there]
        common = set.intersection(*steps) if steps else set()
        # The step in which a rank raised an error is done again, also where others have committed it.
        common = {step for step in common if raised is None or step <= raised} or common
        found = [report.equal[epoch] for report in reports.values() if epoch in report.equal]
        if common and not found:
            return epoch, max(common), None
        last = max(found, default=-1)
        if known := {step for step in common if step <= (last if back is None else min(last, back))}:
            return epoch, max(common if back is None else known), max(known)
    return None, 0, None


def _with_errors(message: str, reports: Mapping[int, Report], lost: Collection[int]) -> str:
    """Return a message with the errors of the members that are lost."""
    given = ((member, reports[member]) for member in sorted(lost) if member in reports)
    lines = [f"member {member}: {text}" for member, report in given if (text := report.error or report.torn)]
    return "; ".join([message, *lines[:_SHOWN]])


def _nothing_in_common(reports: Mapping[int, Report], lost: Collection[int]) -> str:
    left = {member: report.steps for member, report in sorted(reports.items()) if member not in lost and report.steps}
    if not left:
        return "no member is left that held anything; start more ranks, or keep copies with redundancy=1"
    last = {member: max((max(of, default=0) for of in steps.values()), default=0) for member, steps in left.items()}
    least, most = min(last, key=lambda member: last[member]), max(last, key=lambda member: last[member])
    return (
        f"{in_words([least])} is at step {last[least]} and {in_words([most])} at step {last[most]}, and each keeps two "
        "steps; have all ranks take part in a collective in each step"
    )
