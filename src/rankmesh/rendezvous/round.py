"""Rounds: the participants arrive, one of them coordinates, all get one outcome.

```
rank 0  ── arrive ───────────────── wait ─┐
rank 1  ── arrive ───────────────── wait ─┤ outcome
rank 2  ── arrive: complete ── conclude ──┘
```

The coordinator is the participant that completes the arrivals, or the first that runs out of patience. It may *probe*:
every responsive participant answers at once, so those that do not are lost. What it concludes is up to the caller
(``conclude``); who arrived, with what, and who is responsive is in the ``Arrivals`` that it is given.

A round has a name, and an epoch that the channel counts: the coordinator moves the name to its next epoch before it
announces the first outcome, so a retry never sees what an earlier attempt has left. Steps of a round share its epoch.

The last participant to leave deletes the keys. Keys of a round that not all have left, as one of them died, go with the
next one of the same name that ends well. A participant that serves the channel leaves last, as long as the others are
responsive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rankmesh.errors import AgreementError, ConnectError, StoreLost, first_line, in_words
from rankmesh.rendezvous.arrivals import POLL, Arrivals, Conclude, lost, twice
from rankmesh.rendezvous.channel import Channel, ChannelLost, foreign
from rankmesh.rendezvous.step import NOTHING, AlreadyConcluded, Outcome, Patience, Proposal, Step, parsed
from rankmesh.rendezvous.waiting import Worker, answered_within

__all__ = ["Round"]

_Result = TypeVar("_Result")

# Seconds between two looks at who is absent, once that has been asked for long; between the first two at who leaves.
_SELDOM, _SOON = 1.0, 0.001
# Seconds in which a responsive participant answers a probe or writes what it is about to write; one store serves all.
_MOMENT, _EACH = 2.0, 0.001
# Seconds that a store which stands still may take besides, before it counts as gone.
_PATIENCE = 5.0


@dataclass
class Round:
    """One round of ``participants`` (a range, or ranks in any order that all know), as ``rank`` sees it.

    ``serves`` is set in the process that serves the channel. ``identity`` names this process, where two of them may
    take one rank. ``epoch`` is asked of the channel where it is not given. ``patience`` is how many
    seconds a channel may stand still before it counts as gone.
    """

    channel: Channel
    name: str
    participants: Sequence[int]
    rank: int
    serves: bool = False
    identity: str = ""
    epoch: int = -1
    patience: float | None = None
    steps: list[Step] = field(default_factory=list, init=False)
    _twice: str | None = field(default=None, init=False)
    _owed: Future[Any] | None = field(default=None, init=False)
    _worker: Worker = field(default_factory=lambda: Worker("rankmesh-store"), init=False)

    def __post_init__(self) -> None:
        if self.epoch < 0:
            self.epoch = self.ask(lambda: self.channel.tick(self.epoch_key, 0))

    @property
    def moment(self) -> float:
        """Seconds that a responsive participant takes at most to answer."""
        return _MOMENT + _EACH * len(self.participants)

    @property
    def epoch_key(self) -> str:
        """Where the channel keeps the number of the next round of this name."""
        return f"{self.name}/epoch"

    @property
    def _failed(self) -> str:
        return f"{self.name}/failed"

    @property
    def _left(self) -> str:
        return f"{self.name}/{self.epoch}/left"

    def _progress(self, epoch: int) -> str:
        """What participants raise while they make progress, whichever step others wait for."""
        return f"{self.name}/{epoch}/progress"

    def identity_key(self, rank: int) -> str:
        """Where a rank names its process, as soon as it arrives."""
        return f"{self.name}/{self.epoch}/identity/{rank}"

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self, name: str, proposal: Proposal, conclude: Conclude, patience: Patience) -> Outcome:
        """Arrive, and wait for the outcome; a participant that is out of patience concludes without the others.

        Raises ``StoreLost`` when the channel does not answer in time, ``AgreementError`` for what no rank has written
        under the keys of the round. A participant whose wait ends in any other way withdraws, as the others learn.
        """
        step = self._begin(name)
        step.progress = patience.extends
        try:
            complete = self.arrive(name, proposal)
            if self._twice is not None:
                return self._coordinate(step, lambda _: twice(self.rank, self._twice, self.identity), complete=False)
            received = None if complete else self._await_outcome(step, patience)
            return received or self._coordinate(step, conclude, complete=complete)
        except StoreLost:
            raise
        except BaseException as error:
            self.withdraw(name, error)
            raise

    def arrive(self, name: str, proposal: Proposal = NOTHING) -> bool:
        """Arrive in a step without waiting for its outcome; whether all have arrived by that."""
        step = self._begin(name)
        step.proposal = proposal
        return self.ask(lambda: self._arrive(step))

    def publish(self, name: str, text: str) -> None:
        """Give the coordinator of a step a text, one line, whether this rank has arrived or not."""
        key = self._begin(name).key("texts")
        self.ask(lambda: self.channel.post(key, self.rank, text))

    def listen(self, name: str, seconds: float = 0.0) -> Outcome | None:
        """The outcome of a step, if there is one within so many seconds; a probe is answered, and not waited for."""
        step = self._begin(name)
        received = self._read(step, seconds) if step.prober is None else None
        return received if received or step.prober is None else self._after(step, seconds)

    def conclude(self, name: str, conclude: Conclude, *, complete: bool = False) -> Outcome:
        """End a step, if nobody else does; the outcome of it. ``complete``: all are known to have arrived."""
        return self._coordinate(self._begin(name), conclude, complete=complete)

    def reported(self, name: str, reporter: int, conclude: Conclude, seconds: float) -> Outcome:
        """The outcome of a step that ``reporter`` concludes, nobody having to arrive.

        Where it does not within ``seconds``, the first of the others does that finds it out.
        """
        received = None if self.rank == reporter else self.listen(name, seconds)
        return received or self.conclude(name, conclude)

    def arrivals(self, name: str) -> Arrivals:
        """A step as somebody sees it who has not arrived in it."""
        return Arrivals(self, self._begin(name))

    def _begin(self, name: str) -> Step:
        base = f"{self.name}/{self.epoch}/{name}"
        found = next((step for step in self.steps if step.base == base), None)
        if found is None:
            self.steps.append(found := Step(base))
        return found

    def introduce(self) -> None:
        """Name the process of this rank, before it arrives.

        Raises ``AgreementError`` where another process has this rank.
        """
        if not self.ask(self._introduce):
            raise AgreementError(twice(self.rank, self._twice, self.identity).message, rank=self.rank)

    def _introduce(self) -> bool:
        first = self.channel.first(self.identity_key(self.rank), self.identity)
        self._twice = None if first == self.identity else first
        return self._twice is None

    def seen(self, rank: int) -> bool:
        """Whether a rank has named its process, in this epoch."""
        return self.ask(lambda: self.channel.wait(self.identity_key(rank), 0))

    def _arrive(self, step: Step) -> bool:
        proposal = step.proposal
        if self.identity and not self._introduce():
            return False
        if proposal.digest:
            reference = self.channel.first(step.key("reference"), proposal.digest)
            step.odd = reference != proposal.digest
            if step.odd:
                self.channel.post(step.key("odd"), self.rank, proposal.digest)
        if proposal.text:
            self.channel.post(step.key("texts"), self.rank, proposal.text)
        return self.channel.arrive(step.key("arrived"), self.participants, self.rank)

    def advance(self) -> None:
        """Say that this rank makes progress, at the latest step for which others may wait."""
        self.ask(lambda: self.channel.tick(self._progress(self.epoch), 1))

    def _await_outcome(self, step: Step, patience: Patience) -> Outcome | None:
        seconds = min(patience.seconds, patience.if_odd) if step.odd and patience.if_odd else patience.seconds
        if patience.meanwhile is not None:
            early, call = patience.meanwhile
            if (received := self._receive(step, min(early, seconds))) is not None:
                return received
            call()
        if patience.enough is not None:
            return self._receive_or_enough(step, seconds, patience.enough)
        seen = -1
        while (received := self._receive(step, seconds)) is None and patience.extends:
            ticks = self.ask(lambda: self.channel.tick(self._progress(self.epoch), 0))
            if ticks == seen:
                return None
            seen = ticks
        return received

    def _receive_or_enough(self, step: Step, seconds: float, enough: Callable[[Arrivals], bool]) -> Outcome | None:
        end, pause = time.monotonic() + seconds, POLL
        while (received := self._receive(step, max(min(pause, end - time.monotonic()), 0.0))) is None:
            if enough(Arrivals(self, step)) or time.monotonic() >= end:
                return None
            pause = min(2 * pause, _SELDOM)
        return received

    def _receive(self, step: Step, seconds: float) -> Outcome | None:
        received = self._read(step, seconds) if step.prober is None else None
        return received if received or step.prober is None else self._answered(step)

    def _read(self, step: Step, seconds: float) -> Outcome | None:
        """The outcome of a step; nothing where there is none in time, or a probe, which is answered."""
        key = step.key("outcome")
        text = self._text(key, seconds)
        return None if text is None else self._understood(step, text, key)

    def _text(self, key: str, seconds: float) -> str | None:
        return self.ask(lambda: self.channel.read(key) if self.channel.wait(key, seconds) else None, seconds)

    def _understood(self, step: Step, text: str, key: str) -> Outcome | None:
        data = parsed(text, key)
        if "probe" not in data:
            return Outcome.read(text, key)
        prober, seconds = data["probe"], data.get("seconds")
        if not isinstance(prober, int) or not isinstance(seconds, int | float):
            raise foreign(key, f"a probe by {prober!r:.60} for {seconds!r:.60} seconds")
        self.ask(lambda: self.respond(step))
        step.prober, step.until = prober, time.monotonic() + min(float(seconds), 1e6) + self.moment
        return None

    def _answered(self, step: Step) -> Outcome:
        """What comes of a probe that this rank has answered."""
        while (received := self._after(step, max(0.0, step.until - time.monotonic()))) is None:
            pass
        return received

    def _after(self, step: Step, seconds: float) -> Outcome | None:
        """The same, if it comes within so many seconds; after its time, that the rank is lost that sent the probe."""
        key = step.key("after")
        text = self._text(key, seconds)
        if text is not None:
            return Outcome.read(text, key)
        if step.prober is None or time.monotonic() < step.until:
            return None
        return self.announce(step, lost([step.prober], "coordinated the round"))

    def respond(self, step: Step) -> None:
        """Answer a probe of a step."""
        step.probed = True
        document = step.key(f"document/{step.proposal.digest}")
        if step.proposal.digest and not self.channel.wait(document, 0):
            self.channel.write(document, step.proposal.document())
        if self.rank in self.participants:
            self.channel.arrive(step.key("responsive"), self.participants, self.rank)

    # -- the coordinator ----------------------------------------------------------------------------------------

    def _coordinate(self, step: Step, conclude: Conclude, *, complete: bool) -> Outcome:
        coordinator = self.coordinator(step)
        if coordinator != self.rank:
            received = self._receive(step, self.moment)
            return received or self.announce(step, lost([coordinator], "coordinated the round"))
        try:
            return self.announce(step, conclude(Arrivals(self, step, complete=complete)))
        except AlreadyConcluded as given:
            return given.outcome

    def coordinator(self, step: Step) -> int:
        """The rank that concludes: the first that asked."""
        key = step.key("coordinator")
        text = self.ask(lambda: self.channel.first(key, str(self.rank)))
        if not text.isdecimal() or len(text) > 9:
            raise foreign(key, f"{text[:60]!r}, which is no rank")
        return int(text)

    def announce(self, step: Step, outcome: Outcome) -> Outcome:
        """Give the outcome of a step, if none is given; the one that all get."""
        key = step.key("after" if step.probed else "outcome")

        def announce() -> str:
            if step is self.steps[0]:
                self.channel.advance(self.epoch_key, self.epoch)
            if not outcome.agreed:
                self.channel.post(self._failed, self.rank, str(self.epoch))
            return self.channel.announce(key, outcome.text)

        text = self.ask(announce)
        # Where it is a probe, its coordinator was only slow.
        return self._understood(step, text, key) or self._answered(step)

    def withdraw(self, name: str, error: BaseException) -> None:
        """End a step in which this rank stops waiting, unless another coordinates; as far as the channel answers."""
        step = self._begin(name)
        why = f"{in_words([self.rank])} stopped waiting ({first_line(error) or type(error).__name__})"
        with suppress(ConnectError):
            if self.coordinator(step) == self.rank:
                outcome = self.announce(step, Outcome("withdrawn", (self.rank,), message=why))
                self.leave(outcome)

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self, outcome: Outcome, *, stay: bool = False, readers: Iterable[int] | None = None) -> bool:
        """Leave the round: the last participant deletes its keys, and those of failed rounds before it.

        After a failure the participant that serves the channel waits until the others have its outcome; with ``stay``
        after any outcome. The others are the ``readers``, by default those that arrived in the last step. As far as
        the channel answers. Whether this rank was the last.
        """
        if self._twice is not None:
            return False
        try:
            if self.ask(self._is_last):
                self.ask(lambda: self._forget(outcome))
                return True
            if self.serves and self.channel.remote and (stay or not outcome.agreed):
                self.ask(lambda: self._stay(outcome, readers), self.moment)
        except (ConnectError, AgreementError):
            pass
        finally:
            self._worker.close()
        return False

    def forget(self, names: Iterable[str]) -> None:
        """Delete what is left of the round with steps of these names: nobody takes part in it any more."""
        for name in names:
            self._begin(name).probed = True
        self.ask(lambda: self._delete(self.epoch))
        self.ask(lambda: self.channel.delete([self.epoch_key, self._failed]))

    def _is_last(self) -> bool:
        if self.identity:
            self.channel.delete([self.identity_key(self.rank)])
        return self.channel.arrive(self._left, self.participants, self.rank)

    def _stay(self, outcome: Outcome, readers: Iterable[int] | None) -> None:
        if readers is None:
            away = {*outcome.missing, *self.channel.absent(self.steps[-1].key("arrived"), self.participants)}
        else:
            away = set(self.participants).difference(readers)
        end, pause = time.monotonic() + self.moment, _SOON
        while time.monotonic() < end:
            staying = set(self.channel.absent(self._left, self.participants))
            # Without this rank the set is that of nobody: the last to leave has deleted it.
            if self.rank in staying or staying <= away:
                return
            self.channel.wait(f"{self._left}/never", pause)
            pause = min(2 * pause, POLL)

    def _forget(self, outcome: Outcome) -> None:
        self._delete(self.epoch)
        if outcome.agreed:
            failed = {int(epoch) for listed in self.channel.posted(self._failed).values() for epoch in listed}
            # Not those that came since, as this rank was slow to leave: somebody may be in them.
            old = {epoch for epoch in failed if epoch < self.epoch}
            # Between two rounds that ended well all are failed ones: so this is every epoch that may have left keys.
            before = {epoch - 1 for epoch in (self.epoch, *old)} - old - {-1}
            old |= {epoch for epoch in before if self._is_open(epoch)}
            for step in self.steps:
                step.probed = step.probed or bool(old)
            for epoch in old:
                self._delete(epoch)
            if failed and failed <= old:
                self.channel.delete([self._failed])

    def _is_open(self, epoch: int) -> bool:
        """Whether an epoch may have keys, as somebody died before all had left it."""
        first = self.steps[0].base.rpartition("/")[2]
        absent = self.channel.absent(f"{self.name}/{epoch}/{first}/arrived", self.participants)
        return len(absent) < len(self.participants)

    def _delete(self, epoch: int) -> None:
        progress = any(step.progress for step in self.steps)
        keys, sets = [self._progress(epoch)] if progress else [], [f"{self.name}/{epoch}/left"]
        # The first step's arrivals go last: as long as they are there, the epoch may have keys.
        for step in reversed(self.steps):
            step = replace(step, base=f"{self.name}/{epoch}/{step.base.rpartition('/')[2]}")
            keys += step.keys(self._digests(step) if step.probed else ())
            sets += step.sets
        self.channel.delete(keys, sets=sets, participants=self.participants)

    def _digests(self, step: Step) -> set[str]:
        """The digests of a step for which a document may have been written."""
        odd = {digest for listed in self.channel.posted(step.key("odd")).values() for digest in listed}
        return {step.proposal.digest, self.channel.read(step.key("reference")) or "", *odd} - {""}

    # -- calls of the channel -----------------------------------------------------------------------------------

    def ask(self, call: Callable[[], _Result], seconds: float = 0.0) -> _Result:
        """What a call of the channel gives; ``StoreLost`` where it fails, or is not back in time."""
        try:
            if not self.channel.remote:
                return call()
            return self._bounded(call, seconds + self.moment + (self.patience or _PATIENCE))
        except ChannelLost as error:
            self._worker.close()  # what its last call raises has this round, which would have the thread
            raise StoreLost(
                f"rank {self.rank}: the store of the world does not answer ({error}); the process that serves it is "
                "gone or unreachable; look at the log of the rank that serves it (usually rank 0) and restart",
                rank=self.rank,
            ) from error

    def _bounded(self, call: Callable[[], _Result], seconds: float) -> _Result:
        """The same on a thread, which is left behind when it does not come back: a connection may be cut."""
        if self._owed is not None and not self._owed.done():
            self._owed = None
            self._worker.close()
            self.channel = self._bounded(self.channel.again, self.moment + _PATIENCE)
        self._owed = owed = self._worker.submit(call)
        return answered_within(owed, seconds)
