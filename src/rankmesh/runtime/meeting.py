"""Meetings: ranks make sure that they hold the same plans before anything is made, and go on together after it.

```
                    agree                            make groups           complete
rank 0  ── came ──────────────────────┐ wait    ──────────────────  ── came ──────────┐ wait
rank 1  ── came ──────────────────────┤ wait    ──────────────────  ── came ──────────┤ wait
rank 2  ── came, all one claim ── verdict: go   ──────────────────  ── came ── verdict: go
```

That is a fixed number of store operations a rank. Where the ranks turn out to differ, to be missing or to be lost, one
of them finds out who (``disagreement``), and every rank raises that.

Keys of the meeting are deleted by the ranks that come last; those of one that failed go with the next that succeeds.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from rankmesh.errors import AgreementError, ConnectError, in_words
from rankmesh.rendezvous.store import JobStore, Store, answering
from rankmesh.runtime.claim import Claim
from rankmesh.runtime.disagreement import Disagreement
from rankmesh.runtime.phase import Phase
from rankmesh.runtime.verdicts import GO, Verdict, failed

__all__ = ["Meeting", "agree"]

_AT_ONCE = 0.2


def agree(store: Store, claim: Claim, timeout: timedelta) -> Meeting:
    """Wait until every rank of the claim's span has made the same claim; the meeting, which goes on.

    Raises ``AgreementError`` on every waiting rank when the ranks differ, when one has not arrived within ``timeout``,
    and when one that has arrived is lost.
    """
    with answering(claim.rank):
        keys = JobStore(store)
        meeting = Meeting(keys, claim, keys.count(f"{claim.circle}/turn", 0))
        meeting.agree(timeout.total_seconds())
        return meeting


class Meeting:
    """The meeting of the ranks of one circle, for the ``turn``-th time that these ranks meet."""

    def __init__(self, store: JobStore, claim: Claim, turn: int) -> None:
        self._store, self._claim, self.turn = store, claim, turn
        self._place = f"{claim.circle}/{turn}"
        self._disagreement = Disagreement(store, claim, turn)
        self._making = Phase(store, f"{self._place}/make", claim.span, claim.rank)
        self._heard = False

    # -- agree --------------------------------------------------------------------------------------------------

    def agree(self, seconds: float) -> None:
        """Wait for the others; ``AgreementError`` when they do not hold the same, or do not come."""
        verdict = self._come(seconds)
        if not verdict["go"]:
            self._leave_waiting()
            raise AgreementError(
                f"rank {self._claim.rank}: {verdict['message']}",
                rank=self._claim.rank,
                ranks=verdict["ranks"],
                missing=verdict["missing"],
                fields=verdict["fields"],
            )

    def _come(self, seconds: float) -> Verdict:
        claim, phase = self._claim, self._disagreement.phase
        if not claim.of_the_world and self.turn == 0:
            self._disagreement.make_known()
        alike = self._store.count(self._disagreement.alike, 1)
        waiting = self._store.count("waiting", 1)
        try:
            if phase.roll.come(claim.rank):
                if alike == claim.span.size or self._store.count(self._disagreement.alike, 0) == claim.span.size:
                    return self._go()
                return self._disagreement.told()
            if waiting >= claim.world_size:
                # The last to wait is not always the last on the roll; that one then gives the verdict at once.
                verdict = phase.hear(min(seconds, _AT_ONCE))
                if verdict is not None:
                    return verdict
                self._disagreement.end_what_waits_in_vain()
            return phase.hear(seconds) or self._disagreement.out_of_time(seconds)
        except BaseException:
            # Whatever ends the wait, this rank no longer takes part.
            with suppress(RuntimeError):
                phase.roll.go(claim.rank)
                self._leave_waiting()
            raise

    def _leave_waiting(self) -> None:
        self._store.count("waiting", -1)
        self._disagreement.withdraw()

    def _go(self) -> Verdict:
        """All came with one claim. The next meeting comes first: who hears the verdict may soon be there."""
        phase = self._disagreement.phase
        judge = phase.judge()
        if judge != self._claim.rank:
            return phase.hear_of(judge)
        self._store.advance(f"{self._claim.circle}/turn", self.turn)
        if self._claim.of_the_world:
            self._store.delete("waiting")
        else:
            self._store.count("waiting", -self._claim.span.size)
        return phase.announce(GO)

    # -- complete -----------------------------------------------------------------------------------------------

    def complete(self, seconds: float, within: float) -> None:
        """Wait until every rank has made its groups; ``seconds`` are left of the ``within`` that each rank had.

        Raises ``ConnectError`` on every rank when one of them gave up, was lost, or is not through in time.
        """
        with answering(self._claim.rank):
            last = self._making.roll.come(self._claim.rank)
            heard = None if last else self._making.hear(seconds)
            verdict = self._say(GO) if last else heard or self._not_through(within, 0.0, None)
            self._heard = True
            self._go_on_or_raise(verdict)
            if last:
                self._forget_what_was_agreed()
            if self._left():
                self._making.clear(called=False)  # after a call nobody goes on
                self._disagreement.forget()

    def give_up(self, error: BaseException, seconds: float, within: float) -> None:
        """Tell the others that this rank could not make its groups; as far as the store answers.

        ``seconds`` are left for ranks that are still making theirs. Raises ``ConnectError`` where others are the cause:
        this rank waited for members in vain, and the others know which rank was lost, or gave up before it.
        """
        verdict = None
        if self._heard:  # what ends this rank is what all ranks were told
            return
        with suppress(RuntimeError):
            if getattr(error, "in_vain", False):
                verdict = self._not_through(within, max(seconds, 0.0), error)
            else:
                message = f"{in_words([self._claim.rank])} could not make its own: {str(error) or type(error).__name__}"
                self._say(failed(message, [self._claim.rank]))
        if verdict is not None and verdict["ranks"] != [self._claim.rank]:
            self._go_on_or_raise(verdict, error)

    def _say(self, verdict: Verdict) -> Verdict:
        """Give a verdict on the making, if no other rank does; the one that is given."""
        judge = self._making.judge()
        if judge != self._claim.rank:
            return self._making.hear_of(judge)
        if not verdict["go"]:
            self._disagreement.remember()
        return self._making.announce(verdict)

    def _not_through(self, within: float, seconds: float, error: BaseException | None) -> Verdict:
        judge = self._making.judge()
        if judge != self._claim.rank:
            return self._making.hear_of(judge)
        self._disagreement.remember()
        seconds += self._making.moment
        self._making.wake(seconds)
        end = time.monotonic() + seconds
        gone = self._making.silent(end)  # those that still make groups answer when they are through
        if gone or error is None:
            late = gone or self._making.roll.absent()
            message = f"{in_words(late)} did not make its own within {within:g} s; look at its log"
            return self._making.conclude(failed(message, late, missing=gone))
        message = f"rank {self._claim.rank} could not make its own: {error}"
        return self._making.conclude(failed(message, [self._claim.rank]))

    def _go_on_or_raise(self, verdict: Verdict, cause: BaseException | None = None) -> None:
        if not verdict["go"]:
            raise ConnectError(
                f"rank {self._claim.rank}: the groups were destroyed again, as {verdict['message']}",
                rank=self._claim.rank,
                ranks=verdict["ranks"],
                missing=verdict["missing"],
            ) from cause

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Go away where nothing is to be made: all ranks refuse alike."""
        if self._left():
            self._forget_what_was_agreed()
            self._disagreement.forget()

    def _left(self) -> bool:
        """Whether this rank is the last to leave: it deletes what is left, and what failed meetings before it left."""
        left = f"{self._place}/left"
        if self._store.count(left, 1) < self._claim.span.size:
            return False
        self._store.delete(left)
        return True

    def _forget_what_was_agreed(self) -> None:
        """All have made their groups: the rank that came last deletes what they agreed with."""
        self._store.delete(self._disagreement.alike)
        agreed = self._disagreement.phase
        agreed.clear(called=agreed.was_called)
