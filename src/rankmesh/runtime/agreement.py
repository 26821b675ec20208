"""Agreement: ranks make sure that they hold the same plans before anything is made, and go on together after it.

```
                    agree                            make groups           make
rank 0  ── arrive ────────────────────┐ wait    ──────────────────  ── arrive ────────┐ wait
rank 1  ── arrive ────────────────────┤ wait    ──────────────────  ── arrive ────────┤ wait
rank 2  ── arrive, all one digest ── agreed     ──────────────────  ── arrive ── agreed
```

Two steps of one round of the ranks that the plans concern, which is a fixed number of store operations a rank. Where
ranks differ, are missing or are lost, the coordinator finds out which, and every rank raises that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.core.rank_range import RankRange
from rankmesh.errors import AgreementError, ConnectError, cut, in_words
from rankmesh.rendezvous import Arrivals, Outcome, Proposal, Round, StoreChannel, WaitPolicy
from rankmesh.rendezvous.channel import LARGEST

__all__ = ["Agreement", "PlanProposal", "agree", "differences"]

_SHOWN = 8


@dataclass(frozen=True)
class PlanProposal:
    """One rank's proposal: its fields as plain data, or a function that returns them, and the ranks that must agree.

    ``stands`` is a text that is equal exactly where the fields are: with it the fields are only read to tell proposals
    apart.

    >>> one, other = (PlanProposal(rank, RankRange(0, 8), {"plan": "same"}) for rank in (0, 5))
    >>> one.digest == other.digest, one.name, PlanProposal(4, RankRange(4, 4), {}).name
    (True, '0-8', '4-8')
    """

    rank: int
    ranks: RankRange
    fields: Mapping[str, object] | Callable[[], Mapping[str, object]]
    stands: str = ""

    @cached_property
    def digest(self) -> str:
        """The hash of the fields: equal proposals have equal digests."""
        return hashlib.sha256((self.stands or self._document).encode()).hexdigest()[:32]

    @property
    def document(self) -> str:
        """The fields as JSON; none where the store would not take them: the digest is what must be equal."""
        return self._document if len(self._document) < LARGEST else "{}"

    @cached_property
    def _document(self) -> str:
        fields = self.fields() if callable(self.fields) else self.fields
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def name(self) -> str:
        """The ranks that agree, as the name of their round: ``4-8`` for 4 to 7, whatever each takes for the world."""
        return f"{self.ranks.offset}-{self.ranks.stop}"


def agree(store: Store, proposal: PlanProposal, seconds: float, *, serves: bool = False) -> Agreement:
    """Wait until every rank of the proposal's range has made the same proposal; the agreement, which goes on.

    ``serves`` is set where the store lives in this process. Raises ``AgreementError`` on every waiting rank when the
    ranks differ, when one has not arrived within ``seconds``, and when one that has arrived is lost.
    """
    agreement = Agreement(StoreChannel(store), proposal, serves=serves)
    agreement.agree(seconds)
    return agreement


class Agreement:
    """The agreement of the ranks of one range, for the ``epoch``-th time that these ranks agree."""

    def __init__(self, channel: StoreChannel, proposal: PlanProposal, *, serves: bool = False) -> None:
        self._proposal = proposal
        ranks = range(proposal.ranks.offset, proposal.ranks.stop)
        self._round = Round(channel, proposal.name, ranks, proposal.rank, serves)
        self._failed = False

    @property
    def epoch(self) -> int:
        """Number of earlier agreements of these ranks, failed ones included."""
        return self._round.epoch

    # -- agree --------------------------------------------------------------------------------------------------

    def agree(self, seconds: float) -> None:
        """Wait for the others; ``AgreementError`` when their proposals differ, or one does not arrive."""

        def conclude(arrivals: Arrivals) -> Outcome:
            return self._conclude(arrivals, seconds)

        proposal, rank = self._proposal, self._proposal.rank
        proposed = Proposal(proposal.digest, lambda: proposal.document)
        outcome = self._round.step("agree", proposed, conclude, WaitPolicy(seconds))
        if not outcome.agreed:
            self._round.leave(outcome)
            ranks, missing, fields = list(outcome.ranks), list(outcome.missing), list(outcome.fields)
            raise AgreementError(outcome.message, rank=rank, ranks=ranks, missing=missing, fields=fields)

    def _conclude(self, arrivals: Arrivals, seconds: float) -> Outcome:
        """Agreed where all arrived with one digest; else who is missing, who differs, or who was lost."""
        settled = arrivals.settled(lambda absent: self._missing(absent, seconds))
        if settled is not None:
            return settled
        outcome, absent = _differ(arrivals), arrivals.absent
        missing = self._missing(absent, seconds) if absent else Outcome()
        words = "; ".join(message for message in (outcome.message, missing.message) if message)
        return Outcome("different", outcome.ranks, missing.missing, outcome.fields, words)

    def _missing(self, absent: Sequence[int], seconds: float) -> Outcome:
        size = self._proposal.ranks.size
        message = (
            f"waited {seconds:g} s for {in_words(absent)}, which did not arrive ({size - len(absent)} of {size} did); "
            "look at the logs of the missing ranks and at the ranks of their plans, or give connect() a longer timeout"
        )
        return Outcome("missing", tuple(absent), tuple(absent), message=message)

    # -- make ---------------------------------------------------------------------------------------------------

    def complete(self, seconds: float, within: float) -> None:
        """Wait until every rank has made its groups; ``seconds`` are left of the ``within`` that each rank had.

        Raises ``ConnectError`` on every rank when one of them gave up, was lost, or is not through in time.
        """

        def conclude(arrivals: Arrivals) -> Outcome:
            return Outcome() if arrivals.complete else self._not_through(arrivals, within, 0.0, None)

        outcome = self._round.step("make", Proposal(), conclude, WaitPolicy(seconds))
        self._failed = not outcome.agreed
        self._round.leave(outcome, all_read=True)
        self._raise_unless_agreed(outcome)

    def give_up(self, error: BaseException, seconds: float, within: float) -> None:
        """Tell the others that this rank could not make its groups; as far as the store answers.

        ``seconds`` are left for ranks that are still making theirs. Raises ``ConnectError`` where others are the cause:
        members did not join in time, and the others know which rank was lost, or gave up before it, or the store is
        lost with the rank that serves it.
        """
        if self._failed:  # every rank has that outcome already
            return
        rank, not_joined = self._proposal.rank, bool(getattr(error, "not_joined", False))

        def conclude(arrivals: Arrivals) -> Outcome:
            if not_joined:
                return self._not_through(arrivals, within, max(seconds, 0.0), error)
            message = f"{in_words([rank])} could not make its own groups: {str(error) or type(error).__name__}"
            return Outcome("failed", (rank,), message=message)

        try:
            outcome = self._round.conclude("make", conclude)
        except ConnectError as lost:
            if not_joined:
                raise lost from error
            return
        self._round.leave(outcome, all_read=True)
        if not_joined and outcome.ranks != (rank,):
            self._raise_unless_agreed(outcome, error)

    def _not_through(self, arrivals: Arrivals, within: float, seconds: float, error: BaseException | None) -> Outcome:
        arrivals.probe(seconds)
        unresponsive = arrivals.unresponsive(seconds)  # those that still make groups answer when they are through
        if unresponsive or error is None:
            behind = tuple(unresponsive or arrivals.absent)
            message = f"{in_words(behind)} did not finish creating their groups within {within:g} s; check their logs"
            if len(behind) == 1:
                message = f"{in_words(behind)} did not finish creating its groups within {within:g} s; check its log"
            return Outcome("failed", behind, tuple(unresponsive), message=message)
        rank = self._proposal.rank
        return Outcome("failed", (rank,), message=f"rank {rank} could not make its own groups: {error}")

    def _raise_unless_agreed(self, outcome: Outcome, cause: BaseException | None = None) -> None:
        if not outcome.agreed:
            rank = self._proposal.rank
            raise ConnectError(
                f"rank {rank}: the groups were destroyed again, as {outcome.message}",
                rank=rank,
                ranks=list(outcome.ranks),
                missing=list(outcome.missing),
            ) from cause

    def leave(self) -> None:
        """Go away where nothing is to be made: all ranks refuse alike."""
        self._round.leave(Outcome())


def _differ(arrivals: Arrivals) -> Outcome:
    """Name the ranks that differ from the majority, and the fields with both values."""
    ranks = arrivals.proposals
    documents = {digest: arrivals.document(digest) for digest in ranks}
    majority = max(ranks, key=lambda digest: (len(ranks[digest]), -min(ranks[digest])))
    lines: list[str] = []
    fields: list[str] = []
    for digest in (digest for digest in ranks if digest != majority):
        changes = differences(documents[majority], documents[digest])
        # A rank that cannot serve its plan proposes the reason alone.
        changes = [change for change in changes if change[0] == "refused"] or changes
        fields += [field for field, _, _ in changes if field not in fields]
        shown = "; ".join(f"{field} is {theirs}, not {ours}" for field, ours, theirs in changes[:_SHOWN])
        lines.append(f"{in_words(ranks[digest])}: {shown or 'a plan too large to be shown'}")
    message = (
        f"the ranks do not hold the same plan, so no group was created; {' | '.join(lines)} "
        f"(as on {in_words(ranks[majority])}); give every rank the same plan"
    )
    odd = sorted(rank for digest in ranks if digest != majority for rank in ranks[digest])
    return Outcome("different", tuple(odd), fields=tuple(fields), message=message)


def differences(ours: object, theirs: object, path: str = "") -> list[tuple[str, str, str]]:
    """Return the fields in which two plain documents differ: (path, ours, theirs).

    >>> differences({"mesh": {"axes": [["tp", 2]]}}, {"mesh": {"axes": [["tp", 4]]}})
    [('mesh.axes.tp', '2', '4')]
    >>> differences({"mesh": {"axes": [["tp", 2], ["dp", 4]]}}, {"mesh": {"axes": [["dp", 4], ["tp", 2]]}})
    [('mesh.axes', 'tp=2,dp=4', 'dp=4,tp=2')]
    """
    if ours == theirs:
        return []
    left, right = _mapping(ours), _mapping(theirs)
    if left is None or right is None or (list(left) != list(right) and set(left) == set(right)):
        return [(path or "plan", _short(ours), _short(theirs))]
    found = []
    for key in dict.fromkeys([*left, *right]):
        here = f"{path}.{key}" if path else str(key)
        found += differences(left.get(key), right.get(key), here)
    return found


def _mapping(value: object) -> dict[str, object] | None:
    """Return a mapping as it is; lists of named things (axes, groups) by their names; else None."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return dict(value)
    return None


def _short(value: object) -> str:
    """Return a value for a message: axes as a SPEC has them, named things by their names, anything else as JSON."""
    if value is None:
        return "absent"
    if isinstance(value, dict) and "name" not in value and _mapping(value.get("axes")):
        return _short(value["axes"])  # of a mesh or a view
    if isinstance(value, dict) and "name" in value:
        return "there"  # a group, which the others do not have
    named = _mapping(value) if isinstance(value, list) else None
    if named is None:
        return cut(json.dumps(value))
    if any(isinstance(item, dict) for item in named.values()):
        return cut(", ".join(named))
    return cut(",".join(f"{axis}={size}" for axis, size in named.items()))
