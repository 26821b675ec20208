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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rankmesh.errors import AgreementError, ConnectError, StoreLost, first_line, in_words
from rankmesh.rendezvous.arrivals import Arrivals, Conclude, lost, twice
from rankmesh.rendezvous.channel import PATIENCE, ChannelLost, foreign
from rankmesh.rendezvous.step import (
    JSON,
    NOTHING,
    POLL,
    AlreadyConcluded,
    Codec,
    Outcome,
    Proposal,
    Step,
    WaitPolicy,
    read_message,
)
from rankmesh.rendezvous.stores import StoreChannel
from rankmesh.rendezvous.waiting import answered_within, submit

__all__ = ["Round"]

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

# Seconds between the first two looks at who leaves.
_SOON = 0.001
# Seconds in which a responsive participant answers a probe or writes what it is about to write; one store serves all.
_MOMENT, _EACH = 2.0, 0.001


@dataclass
class Round:
    """One round of ``participants`` (a range, or ranks in any order that all know), as ``rank`` sees it.

    ``serves`` is set in the process that serves the channel. ``identity`` names this process, where two of them may
    take one rank. ``epoch`` is asked of the channel where it is not given. ``patience`` is how many
    seconds a channel may stand still before it counts as gone.
    """

    channel: StoreChannel
    name: str
    participants: Sequence[int]
    rank: int
    serves: bool = False
    identity: str = ""
    epoch: int = -1
    patience: float | None = None
    steps: list[Step] = field(default_factory=list, init=False)
    _twice: str | None = field(default=None, init=False)
    _is_answered: Callable[[], bool] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.epoch < 0:
            self.epoch = self.ask(lambda: self.channel.tick(self.epoch_key, 0))

    @property
    def moment(self) -> float:
        """Seconds that a responsive participant takes at most to answer."""
        return _MOMENT + _EACH * len(self.participants)

    @property
    def epoch_key(self) -> str:
        """Key of the number of the next round of this name."""
        return f"{self.name}/epoch"

    @property
    def _failed(self) -> str:
        return f"{self.name}/failed"

    @property
    def _left(self) -> str:
        return f"{self.name}/{self.epoch}/left"

    def _progress(self, epoch: int) -> str:
        """Return the key of the counter that participants raise while they make progress, in any step."""
        return f"{self.name}/{epoch}/progress"

    def identity_key(self, rank: int) -> str:
        """Return the key under which a rank names its process, as soon as it arrives."""
        return f"{self.name}/{self.epoch}/identity/{rank}"

    # -- one step -----------------------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        proposal: Proposal,
        conclude: Callable[[Arrivals], Outcome[_Value]],
        policy: WaitPolicy,
        codec: Codec[_Value] = JSON,
    ) -> Outcome[_Value]:
        """Arrive, and wait for the outcome; a participant whose policy ends the wait concludes without the others.

        Raises ``StoreLost`` when the channel does not answer in time, ``AgreementError`` for what no rank has written
        under the keys of the round. A participant whose wait ends in any other way withdraws, as the others learn.
        """
        step = self._begin(name)
        step.codec = codec
        try:
            complete = self.arrive(name, proposal)
            if self._twice is not None:
                return self._coordinate(step, lambda _: twice(self.rank, self._twice, self.identity), complete=False)
            received = None if complete else policy.wait(self, step)
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

    def listen(self, name: str, seconds: float = 0.0) -> Outcome | None:
        """Return the outcome of a step if there is one by then; answer a probe, and do not wait for it."""
        return self.receive(self._begin(name), seconds, await_prober=False)

    def conclude(self, name: str, conclude: Conclude, *, complete: bool = False) -> Outcome:
        """End a step if nobody else does, and return its outcome. ``complete``: all are known to have arrived."""
        return self._coordinate(self._begin(name), conclude, complete=complete)

    def reported(
        self,
        name: str,
        reporter: int,
        conclude: Callable[[Arrivals], Outcome[_Value]],
        seconds: float,
        codec: Codec[_Value] = JSON,
    ) -> Outcome[_Value]:
        """Return the outcome of a step that ``reporter`` concludes, where nobody has to arrive.

        Where it does not within ``seconds``, the first of the others does that finds it out.
        """
        self._begin(name).codec = codec
        received = None if self.rank == reporter else self.listen(name, seconds)
        return received or self.conclude(name, conclude)

    def arrivals(self, name: str) -> Arrivals:
        """Return a step as somebody sees it who has not arrived in it."""
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
        """Return whether a rank has named its process, in this epoch."""
        return self.ask(lambda: self.channel.wait(self.identity_key(rank), 0))

    def _arrive(self, step: Step) -> bool:
        proposal = step.proposal
        if self.identity and step is self.steps[0] and not self._introduce():
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
        """Report that this rank makes progress, at the latest step for which others may wait."""
        self.ask(lambda: self.channel.tick(self._progress(self.epoch), 1))

    def progress(self) -> int:
        """Return the number of times that participants have reported progress."""
        return self.ask(lambda: self.channel.tick(self._progress(self.epoch), 0))

    def receive(
        self, step: Step, seconds: float, proposed: Outcome | None = None, *, await_prober: bool = True
    ) -> Outcome | None:
        """Return the outcome of a step, None where there is none within so many seconds.

        What is ``proposed`` is announced first. A probe is answered, and then its coordinator is waited for, as long as
        it said.
        """
        while True:
            key = step.key("after" if step.probed else "outcome")
            left = max(0.0, step.until - time.monotonic())
            if proposed is not None:
                text: str | None = self._announced(step, key, proposed)
            else:
                text = self._text(key, left if step.prober is not None and await_prober else seconds)
            if text is not None:
                message = read_message(text, key, step.codec)
                if isinstance(message, Outcome):
                    return message
                self.ask(lambda: self.respond(step))
                step.prober, step.until = message.rank, time.monotonic() + message.seconds + self.moment
                proposed = None
            elif step.prober is None:
                return None
            elif time.monotonic() >= step.until:
                proposed = lost([step.prober], "coordinated the round")
            elif not await_prober:
                return None

    def _text(self, key: str, seconds: float) -> str | None:
        return self.ask(lambda: self.channel.read(key) if self.channel.wait(key, seconds) else None, seconds)

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
            received = self.receive(step, self.moment)
            return received or self.announce(step, lost([coordinator], "coordinated the round"))
        try:
            return self.announce(step, conclude(Arrivals(self, step, complete=complete)))
        except AlreadyConcluded as given:
            return given.outcome

    def coordinator(self, step: Step) -> int:
        """Return the rank that concludes: the first that asked."""
        key = step.key("coordinator")
        text = self.ask(lambda: self.channel.first(key, str(self.rank)))
        if not text.isdecimal() or len(text) > 9:
            raise foreign(key, f"{text[:60]!r}, which is not a rank")
        return int(text)

    def announce(self, step: Step, outcome: Outcome) -> Outcome:
        """Give the outcome of a step, if none is given; return the one that all get."""
        return self.receive(step, 0.0, outcome) or outcome  # what is proposed is answered in any case

    def _announced(self, step: Step, key: str, outcome: Outcome) -> str:
        """Write an outcome under a key; return what is there then, which is a probe where its coordinator was slow."""

        def announce() -> str:
            if step is self.steps[0]:
                self.channel.advance(self.epoch_key, self.epoch)
            if not outcome.agreed:
                self.channel.post(self._failed, self.rank, str(self.epoch))
            return self.channel.announce(key, outcome.written(step.codec))

        return self.ask(announce)

    def withdraw(self, name: str, error: BaseException) -> None:
        """End a step in which this rank stops waiting, unless another coordinates; as far as the channel answers."""
        step = self._begin(name)
        why = f"{in_words([self.rank])} stopped waiting ({first_line(error) or type(error).__name__})"
        with suppress(ConnectError):
            if self.coordinator(step) == self.rank:
                outcome = self.announce(step, Outcome("withdrawn", (self.rank,), message=why))
                self.leave(outcome)

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self, outcome: Outcome, *, stay: bool = False, all_read: bool = False) -> bool:
        """Leave the round: the last participant deletes its keys, and the keys of failed rounds before it.

        After a failure the participant that serves the channel waits until the others have its outcome; with ``stay``
        after any outcome. The others are those that arrived in the last step; with ``all_read`` also those that still
        work, but for the missing. As far as the channel answers. Return whether this rank was the last.
        """
        if self._twice is not None:
            return False
        try:
            if self.ask(self._is_last):
                self.ask(lambda: self._forget(outcome))
                return True
            if self.serves and self.channel.remote and (stay or not outcome.agreed):
                self.ask(lambda: self._stay(outcome, all_read=all_read), self.moment)
        except (ConnectError, AgreementError):
            pass
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

    def _stay(self, outcome: Outcome, *, all_read: bool) -> None:
        away = set(outcome.missing)
        if not all_read:
            away.update(self.channel.absent(self.steps[-1].key("arrived"), self.participants))
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
        """Return whether an epoch may have keys, as a participant died before all had left it."""
        absent = self.channel.absent(f"{self.name}/{epoch}/{self.steps[0].name}/arrived", self.participants)
        return len(absent) < len(self.participants)

    def _delete(self, epoch: int) -> None:
        keys, sets = [self._progress(epoch)], [f"{self.name}/{epoch}/left"]
        # The first step's arrivals go last: as long as they are there, the epoch may have keys.
        for step in reversed(self.steps):
            step = replace(step, base=f"{self.name}/{epoch}/{step.name}")
            keys += step.keys(self._digests(step) if step.probed else ())
            sets += step.sets
        self.channel.delete(keys, sets=sets, participants=self.participants)

    def _digests(self, step: Step) -> set[str]:
        """Return the digests of a step for which a document may have been written."""
        odd = {digest for listed in self.channel.posted(step.key("odd")).values() for digest in listed}
        return {step.proposal.digest, self.channel.read(step.key("reference")) or "", *odd} - {""}

    # -- calls of the channel -----------------------------------------------------------------------------------

    def ask(self, call: Callable[[], _Result], seconds: float = 0.0) -> _Result:
        """Call the channel and return its result; raise ``StoreLost`` if it fails or does not return in time."""
        try:
            if not self.channel.remote:
                return call()
            return self._bounded(call, seconds + self.moment + (self.patience or PATIENCE))
        except ChannelLost as error:
            raise StoreLost(
                f"rank {self.rank}: the store of the world does not answer ({error}); the process that serves it is "
                "gone or unreachable; look at the log of the rank that serves it (usually rank 0) and restart",
                rank=self.rank,
            ) from error

    def _bounded(self, call: Callable[[], _Result], seconds: float) -> _Result:
        """Make a call on a thread, which is abandoned if the call does not return: a connection may be cut."""
        if self._is_answered is not None and not self._is_answered():
            self._is_answered = None
            self.channel = self._bounded(self.channel.again, self.moment + PATIENCE)
        owed = submit(call, "rankmesh-store")
        self._is_answered = owed.done
        return answered_within(owed, seconds)
