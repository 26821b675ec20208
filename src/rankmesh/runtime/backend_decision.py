"""Before there is a world: all ranks of a job arrive with their capabilities; one decides the backend of all.

```
rank 0  ── capabilities ───────────────────┐ wait
rank 1  ── capabilities ───────────────────┤ wait       decision: the backend of all, or why nobody goes on
rank 2  ── capabilities: complete ── decide
```
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import AgreementError, ConnectError, StoreLost
from rankmesh.rendezvous import Arrivals, Outcome, Patience, Proposal, Round, StoreChannel
from rankmesh.rendezvous.gather import or_missing
from rankmesh.runtime.devices import BackendDecision, Capabilities, choose

__all__ = ["decide"]

# Seconds that ranks wait for others once two of them expect worlds of another size, or ask for another backend.
_ODD = 1.0
# Seconds after which a rank that waits looks whether rank 0, which mostly serves the store, is there.
_LOOK = 0.5


def decide(
    store: Store, prefix: str, local: Capabilities, seconds: float, *, serves: bool
) -> tuple[BackendDecision, str]:
    """What all ranks do, once all have arrived; and a prefix for the keys of what they do.

    Raises ``ConnectError`` on every rank where what they have does not go together, ``AgreementError`` naming the
    ranks that do not arrive in time, ``StoreLost`` when the store is gone; its ``met`` says whether rank 0 was seen in
    this round: otherwise it may be the store of an earlier world, which rank 0 was about to close.
    """
    met = False
    try:
        identity = f"process {local.process} on {local.host}"
        found = Round(StoreChannel(store, prefix), "init", range(local.size), local.rank, serves, identity)

        def look() -> None:
            nonlocal met
            met = met or found.seen(0)

        look()
        return _decided(found, local, seconds, look), f"{prefix}/{found.epoch}"
    except StoreLost as error:
        raise StoreLost(error.message, rank=local.rank, missing=(0,), met=met) from error


def _decided(found: Round, local: Capabilities, seconds: float, look: Callable[[], None]) -> BackendDecision:
    def conclude(arrivals: Arrivals) -> Outcome:
        gathered = [Capabilities(**json.loads(texts[-1])) for _, texts in sorted(arrivals.texts.items())]
        if len({each.size for each in gathered}) == 1 and not arrivals.complete:
            return or_missing(lambda _: _decision(gathered), seconds, "init()")(arrivals)
        return _decision(gathered)

    proposal = Proposal(f"{local.size} {local.asked}", text=json.dumps(asdict(local)))
    outcome = found.step("capabilities", proposal, conclude, Patience(seconds, if_odd=_ODD, meanwhile=(_LOOK, look)))
    found.leave(outcome)
    if not outcome.agreed:
        kind = AgreementError if outcome.missing else ConnectError
        values = {"missing": outcome.missing} if outcome.missing else {}
        raise kind(
            f"rank {local.rank} of {local.size}: {outcome.message}", rank=local.rank, ranks=outcome.ranks, **values
        )
    return BackendDecision(outcome.value["backend"], outcome.value["why"], tuple(outcome.value["ranks"]))


def _decision(gathered: list[Capabilities]) -> Outcome:
    decision = choose(gathered)
    if decision.backend is None:
        return Outcome("failed", decision.ranks, message=decision.why)
    return Outcome(value=asdict(decision))
