"""The state machine of one member: events in, actions out.

```
in an epoch ── an error, a loss, a message ──> epoch ended ── the outcome of its round ──> in the next epoch, or stopped
                 Abort, Announce                report                                      Enter, Stop
```

A method is an event and returns the actions that follow from it; ``driver`` carries them out. Nothing here waits or
has a thread, a socket or a tensor, so tests can try any order of events.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rankmesh.core.plan import Plan
from rankmesh.errors import (
    ConnectError,
    Diverged,
    LayoutError,
    LostState,
    PlanError,
    RankmeshError,
    first_line,
    in_words,
)
from rankmesh.rendezvous import Outcome
from rankmesh.survival.agreement import EpochEnd, Relayout, Report, Suspicion
from rankmesh.survival.conversation import Message
from rankmesh.survival.epoch import Contact, Epoch, Newcomers
from rankmesh.survival.members import Members, Sizes

__all__ = ["Abort", "Action", "Announce", "Enter", "Left", "Machine", "Stop"]

_log = logging.getLogger("rankmesh.survival")

# Outcomes that a member keeps for those that have not read them.
_KEPT = 8


@dataclass(frozen=True)
class Abort:
    """Wake whoever waits for the end of an epoch here, and abort its world."""

    epoch: Epoch


@dataclass(frozen=True)
class Announce:
    """Send a message to members."""

    members: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Enter:
    """Enter the next epoch; ``joined`` is where its new members are reached."""

    joined: Mapping[int, Contact]


@dataclass(frozen=True)
class Stop:
    """Leave the job: with an error, or with None because ``train`` has returned on all ranks."""

    error: Exception | None = None


Action = Abort | Announce


@dataclass
class Left:
    """The way in which this member left an epoch: ``train`` is ``done``, or an ``error`` ended it.

    ``first``: this member began the change; ``handled``: the program handles the error; ``suspicion``: the guard has
    found a difference, or its steps were being repeated.
    """

    done: bool = False
    error: Exception | None = None
    first: bool = False
    handled: bool = False
    suspicion: Suspicion | None = None

    @property
    def certain(self) -> bool:
        """Return whether the error is the program's for certain: a collective's may be the loss of another member."""
        if self.error is None or self.handled:
            return False
        if isinstance(self.error, LostState | PlanError | Diverged):
            return True
        return not isinstance(self.error, RuntimeError | RankmeshError)


@dataclass
class _End:
    """The end of an epoch: by a change of the members, or because the job is ``over``."""

    ended: bool = False
    over: bool = False
    suspects: set[int] = field(default_factory=set)
    # Members that are to be left out, each with the reason.
    evicted: dict[int, str] = field(default_factory=dict)
    # The diagnosis of a hang that names no member.
    unclear: str = ""


class Machine:
    """One member of a job: its epoch, the members of it, and how it ends.

    ``history`` has the members of this epoch and of epochs with snapshots. State that was held comes
    from the snapshots of epoch ``source``, or is loaded (``load``); ``step`` is the step to begin with. ``equal`` is
    the last one at which replicas were found equal, None if they are not compared; a later ``step`` is ``compared``
    first. ``suspicion`` is why steps are repeated, None if they are not. ``raised`` are
    the errors that ended the last epoch, by coordinate. ``exists``: something is held. ``unreplicated`` are the
    axes, with sizes, along which each rank of a held model has tensors of its own, which cannot be cut in another way.
    """

    def __init__(self) -> None:
        self.member, self.epoch, self.step = -1, Epoch(), 0
        self.history: dict[int, Members] = {}
        self.source: int | None = None
        self.load = self.exists = False
        self.equal: int | None = None
        self.suspicion: Suspicion | None = None
        self.raised: Mapping[str, str] = {}
        self.before: int | None = None
        self.refused: Mapping[str, str] = {}
        self.unreplicated: Mapping[str, int] = {}
        self.newcomers = Newcomers()
        self.last_change = "start"
        self.reasons: Mapping[str, str] = {}
        self.budget: int | None = None
        self._done = 0
        # A layout that all ranks ask for in this epoch, and those that this one was asked for, until they are adopted.
        self._asked: Relayout | None = None
        self._queue: list[Relayout] = []
        self._outcomes: dict[Epoch, str] = {}
        self._ends: dict[Epoch, _End] = {}
        self._is_entered = False

    @property
    def members(self) -> Members:
        """The members of this epoch."""
        return self.history[self.epoch.number]

    @property
    def has_ended(self) -> bool:
        """Return whether this epoch has ended, which the others may announce before this member has entered it."""
        return self._end_of(self.epoch).ended

    def _end_of(self, epoch: Epoch) -> _End:
        return self._ends.setdefault(epoch, _End())

    def begin(self, member: int, first: Members) -> None:
        """Take the members, now that they are known; others may have sent messages before."""
        self.member, self.history = member, {0: first}

    # -- in an epoch ----------------------------------------------------------------------------------------------

    def entered(self) -> None:
        """Take note that this member has entered the world of its epoch."""
        self._is_entered = True

    @property
    def unequal(self) -> bool:
        """Return whether nobody knows yet if replicas are equal at the step to begin with."""
        return self.equal is not None and self.step > self.equal

    def compared(self, *, equal: bool) -> None:
        """Take note of whether replicas are equal at the step to begin with; else it is the last at which they were."""
        if equal:
            self.equal = self.step
        elif self.equal is not None:
            self.step = self._done = self.equal

    def all_hold(self) -> None:
        """Every member has its part: what was held before is needed by nobody."""
        self.exists, self.source, self.load = True, None, False
        self.history = {number: of for number, of in self.history.items() if number in (self.epoch.number, self.before)}

    def committed(self, step: int) -> list[Action]:
        """End the epoch after a step if somebody asks for another layout, or processes that join let it grow."""
        self._done = step
        return self._changed()

    def _changed(self) -> list[Action]:
        while self._queue:
            sizes = Sizes.read(self._queue[0]["sizes"])
            try:
                self.relaid(sizes)
                if sizes.first != self.members.plan:  # which all ranks may have asked for meanwhile
                    break
            except (LayoutError, PlanError) as error:  # members were lost since, or hold something else
                _log.warning("rankmesh: a layout that was asked for does not fit any more: %s", error.message)
            del self._queue[0]
        return self.end() if self._asked or self._queue or self.newcomers.let_grow(self.members) else []

    def relaid(self, sizes: Sizes) -> Members:
        """Return the members in another layout; ``PlanError`` where it does not fit them, or what is held."""
        members, mesh, fixed = self.members.relaid(sizes), sizes.first.mesh, self.unreplicated
        if reason := self.refused.get(sizes.first.digest):
            raise PlanError(f"{reason}; ask for a layout that the program can build")
        if [(axis, size) for axis, size in mesh.axes.items() if size > 1 and axis in fixed] != [*fixed.items()]:
            axes = ",".join(f"{axis}={size}" for axis, size in fixed.items())
            raise PlanError(
                f"the plan {mesh} does not keep {axes}, along which each rank has tensors of its own: hold() was given "
                f"a model with plain tensors; keep {axes}, or give hold() tensors and shardings",
                axes=tuple(fixed),
            )
        return members

    def relayout(self, sizes: Sizes, budget: int | None) -> bool:
        """Take note of a layout that all ranks ask for; return whether it is another one."""
        if sizes.first == self.members.plan:
            return False
        self._asked = {"sizes": sizes.data, "budget": budget}
        return True

    @property
    def status(self) -> Message:
        """The facts on the job that this member states to somebody outside."""
        members = self.members
        return {
            "plan": str(members.plan.mesh),
            "step": self._done,
            "members": sorted(members.all),
            "spares": list(members.spares),
            "last_change": {"what": self.last_change, "why": dict(self.reasons)},
        }

    def end(
        self,
        *,
        over: bool = False,
        suspects: Collection[int] = (),
        evicted: Mapping[int, str] | None = None,
        epoch: Epoch | None = None,
    ) -> list[Action]:
        """End an epoch on every member, this one by default; whoever is not the first to do it has nothing to send."""
        epoch = epoch or self.epoch
        message = {"what": "end", "epoch": str(epoch), "over": over, "suspects": sorted(suspects)}
        message["evicted"] = {str(member): reason for member, reason in (evicted or {}).items()}
        actions = self._ended(message)
        if epoch == self.epoch and (actions or suspects or evicted):
            others = tuple(member for member in self.members.all if member != self.member)
            actions.append(Announce(others, message))
        return actions

    def diagnosed(self, epoch: Epoch, reason: str, members: Collection[int], *, unlimited: bool) -> list[Action]:
        """Leave out members because of which a call hangs.

        If none is known to be the cause, the limit of the call ends the epoch; if calls are ``unlimited``, this does.
        """
        if members:
            return self.end(evicted=dict.fromkeys(members, f"the others waited for it ({reason})"), epoch=epoch)
        self._end_of(epoch).unclear = reason
        return self.end(epoch=epoch) if unlimited else []

    def received(self, message: Message, server: int | None) -> tuple[Message, list[Action]]:
        """Return the reply to a message, and what follows; ``server`` has the store of the round of this member."""
        reply: Message = {"epoch": str(self.epoch)}
        actions: list[Action] = []
        with suppress(KeyError, TypeError, ValueError):
            if message["what"] == "end":
                actions = self._ended(message)
            if message["what"] == "join" and self.history:
                reply["welcome"] = self.newcomers.ask(Contact.read(message["contact"]))
            if message["what"] == "status" and self.history:
                reply |= self.status
            if message["what"] == "relayout" and self.history:
                reply |= self._requested(message)
            if message["what"] in ("join", "relayout") and self._is_entered and self.member in self.members.spares:
                actions = self._changed()  # a spare commits nothing
            if message["what"] == "outcome":
                reply |= {"outcome": self._outcomes.get(Epoch.read(message["epoch"])), "server": server}
        return reply, actions

    def _requested(self, message: Message) -> Message:
        """Take note of a layout that somebody outside asks for, after others; reply what follows, or why it is refused.

        Each rank keeps what it was asked for until the job has changed to it: of two, one comes later.
        """
        try:
            spec, plan = message["sizes"]["spec"], message["sizes"]["plan"]
            sizes = Sizes.read({"spec": spec, "plan": plan, "shrink": self.members.sizes.shrink, "follows": {}})
            self.relaid(Sizes.of(sizes.first, sizes.first, sizes.shrink))
        except (LayoutError, PlanError) as error:
            return {"refused": error.message}
        before = Plan.from_json(self._queue[-1]["sizes"]["plan"]) if self._queue else self.members.plan
        if sizes.first == before:
            return {"refused": "", "follows": f"the job {'changes to' if self._queue else 'has'} {before.mesh} already"}
        after = f"once it has changed to {before.mesh}" if self._queue else "after its next commit"
        self._queue.append({"sizes": sizes.data, "budget": None})
        return {"refused": "", "follows": f"accepted: the job changes to {sizes.first.mesh} {after}"}

    def _ended(self, message: Message) -> list[Action]:
        epoch = Epoch.read(message["epoch"])
        end = self._end_of(epoch)
        end.suspects.update(message["suspects"])
        end.evicted.update({int(member): str(reason) for member, reason in message["evicted"].items()})
        if end.ended:
            return []
        end.over, end.ended = message["over"], True
        return [Abort(epoch)] if epoch == self.epoch and self.history else []

    # -- the end of an epoch --------------------------------------------------------------------------------------

    @property
    def epoch_end(self) -> EpochEnd:
        """The end of this epoch, about which its members hold a round."""
        end = self._end_of(self.epoch)
        return EpochEnd(self.epoch, self.history, self.raised, end.suspects, end.evicted, self.before, self.refused)

    def report(
        self,
        left: Left,
        steps: Mapping[int, Sequence[int]],
        commits: Mapping[int, int],
        at: int,
        *,
        loads: bool = False,
        equal: Mapping[int, int] | None = None,
    ) -> Report:
        """Return this member's report in the round: how it left the epoch, and the steps of its snapshots."""
        end = self._end_of(self.epoch)
        text = "" if left.error is None else f"{type(left.error).__name__}: {first_line(left.error)}"[:200]
        return Report(
            done=left.done,
            over=end.over,
            error=text if left.certain else "",
            torn="" if left.certain else text,
            first=left.first,
            handled=left.handled,
            steps={epoch: tuple(of) for epoch, of in steps.items()},
            commits=commits,
            committed=self.exists,
            joining=sorted(self.newcomers.contacts),
            evicted=sorted(end.evicted),
            unclear=end.unclear,
            began=self.step,
            at=at,
            relayout=self._asked or next(iter(self._queue), None),
            loads=loads,
            equal=equal or {},
            suspicion=left.suspicion.data if left.suspicion else None,
        )

    def concluded(self, outcome: Outcome, left: Left, *, took_part: bool) -> Enter | Stop:
        """Adopt the outcome of the round; ``took_part``: the others had the report of this member for it."""
        if outcome.agreed or outcome.reason == "failed":
            self._outcomes = {**dict([*self._outcomes.items()][1 - _KEPT :]), self.epoch: outcome.text}
        error, is_lost = left.error, self.member in outcome.ranks
        reason = self._end_of(self.epoch).evicted.get(self.member)
        if reason and (not outcome.agreed or is_lost):
            return self._left_out(f"since {reason}", error)
        if not outcome.agreed:
            if error is not None and (left.certain or (outcome.fields and is_lost)):
                return Stop(error)
            message = f"the job ends, since {outcome.message}"
            return Stop(_caused(ConnectError(message, rank=self.member, ranks=outcome.ranks), error))
        if outcome.value.get("over"):
            return Stop()
        blamed = is_lost and (left.certain or (took_part and self.member not in outcome.missing))
        if error is not None and blamed:
            return Stop(error)
        if is_lost:
            others = in_words(outcome.ranks)
            return self._left_out(f"since it did not respond in time; the others went on without {others}", error)
        return self._adopt(outcome, left.suspicion)

    def _adopt(self, outcome: Outcome, mine: Suspicion | None = None) -> Enter:
        value = outcome.value
        joined = {int(member): Contact.read(contact) for member, contact in value["joined"].items()}
        following = self.members.following(value, {member: contact.host for member, contact in joined.items()})
        undone = value["refused"].get(self.members.sizes.first.digest)
        self.last_change = undone or _what(self.members, following, outcome.ranks)
        self.before, self.refused = value["before"], value["refused"]
        evicted = self._end_of(self.epoch).evicted
        named = {str(member): f"evidence: {evicted[member]}" for member in outcome.ranks if member in evicted}
        self.reasons = {**value["reasons"], **named}
        self.budget, self._asked, self.unreplicated = value["budget"], None, {}
        asked = self._queue.pop(0) if self._queue and value["asked"] == self._queue[0]["sizes"]["plan"] else None
        if asked is not None and following.sizes.data != asked["sizes"]:
            _log.warning("rankmesh: too few members are left for a layout that was asked for; %s stays", following.plan)
        self.newcomers.welcome(joined, outcome, self.epoch, self.history)
        self.source, self.step, self.load = value["source"], value["step"], value["load"]
        self.equal, found = value["equal"], value["suspicion"]
        self.suspicion = None if found is None else Suspicion.read(found, mine)
        self.raised, self._done = value["raised"], self.step
        self.epoch = self.epoch.after(outcome.text)
        self.history = {**self.history, self.epoch.number: following}
        self._ends = {epoch: end for epoch, end in self._ends.items() if epoch.number >= self.epoch.number}
        self._is_entered = False
        return Enter(joined)

    def _left_out(self, why: str, error: Exception | None) -> Stop:
        message = f"member {self.member} was left out of the job, {why}"
        return Stop(_caused(ConnectError(message, rank=self.member), error))

    # -- a member that joins --------------------------------------------------------------------------------------

    def welcomed(self, welcome: Message, hosts: Mapping[int, str]) -> Enter:
        """Become a member in the epoch that the others have agreed on."""
        first = self.members
        self.history |= {int(number): first.following(data, hosts) for number, data in welcome["history"].items()}
        self.epoch = Epoch.read(welcome["epoch"])
        return self._adopt(Outcome.read(welcome["outcome"], "welcome"))


def _what(before: Members, now: Members, lost: Collection[int]) -> str:
    """Return the changes between the members of two epochs."""
    if lost:
        return f"loss of members {', '.join(map(str, lost))}"
    if now.sizes != before.sizes:
        return "relayout"
    return "repeat" if now == before else "join"


def _caused(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error
