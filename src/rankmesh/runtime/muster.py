"""Muster: all ranks of a job come together once, through its store, before there is a world.

```
rank 0  ── offer, count 1 ─────────────┐ wait
rank 1  ── offer, count 2 ─────────────┤ wait          choice: the backend of all, or why nobody goes on
rank 2  ── offer, count 3 = all ── choice
```

A rank that waits in vain says who is missing. A rank number that comes twice is told with both processes. The keys are
gone when the last rank has read the choice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import AgreementError, ConnectError, first_line, in_words
from rankmesh.rendezvous.waiting import come
from rankmesh.runtime.devices import Choice, Offer, choose
from rankmesh.runtime.served_store import turn, turns

__all__ = ["StoreGone", "entrance", "muster"]

# How long a choice that was made takes to be written, and how long a rank that serves the store stays for the others.
# One store serves all ranks in turn.
_PATIENCE, _EACH = 5.0, 0.001
_LOOK = 0.02


class StoreGone(ConnectError):
    """The store went away before the choice was made: it was that of an earlier world, or its rank is gone."""


def entrance(store: Store, what: str, own: Offer) -> tuple[str, bool]:
    """Where this rank comes together with the others this time: what they tell each other there is of no other time.

    With it whether rank 0 has come there: then this is no store of an earlier world, which rank 0 is about to close. A
    second process of one rank comes to where the first one is, and is told there.
    """
    with _answering(own):
        times = turn(store, what, own.rank)
        if times and store.check([f"{what}/{times - 1}/claim/{own.rank}"]):
            times -= 1
        return f"{what}/{times}", turns(store, what, 0) > times


def muster(store: Store, prefix: str, own: Offer, timeout: timedelta, serves: bool) -> Choice:
    """What all ranks do, once all have come; ``serves`` is set where the store lives in this process.

    Raises ``ConnectError`` on every rank for offers that do not go together, ``AgreementError`` naming the ranks that
    do not come within ``timeout``.
    """
    keys = PrefixStore(prefix, store)
    with _answering(own):
        keys.add("came", 1)
        known = keys.add(f"claim/{own.rank}", 1)
        keys.set(f"offer/{own.rank}" + ("" if known == 1 else "/twice"), json.dumps(asdict(own)))
        if known > 1:
            _decide(keys, lambda: _twice(keys, own))
        elif keys.add("arrived", 1) == own.size:
            _decide(keys, lambda: choose(_offers(keys, range(own.size))))
        choice = _chosen(keys, own, timeout)
    _forget(keys, own, choice, serves)
    if choice.backend is None:
        kind = AgreementError if choice.why.startswith("waited") else ConnectError
        values = {"missing": choice.ranks} if kind is AgreementError else {}
        raise kind(f"rank {own.rank} of {own.size}: {choice.why}", rank=own.rank, ranks=choice.ranks, **values)
    return choice


@contextmanager
def _answering(own: Offer) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreGone(
            f"rank {own.rank} of {own.size}: the store of the job does not answer any more ({first_line(error)}); "
            "the process that serves it, usually rank 0, is gone or unreachable; look at its log",
            rank=own.rank,
            missing=(0,),
        ) from error


def _decide(keys: Store, decision: Callable[[], Choice]) -> None:
    """Make and write a choice, if it is the first: until it is written no rank goes on and takes back its offer."""
    if keys.add("decided", 1) == 1:
        keys.set("choice", json.dumps(asdict(decision())))


def _chosen(keys: Store, own: Offer, timeout: timedelta) -> Choice:
    if not come(keys, ["choice"], timeout.total_seconds()):
        _decide(keys, lambda: _missing(keys, own, timeout))
        keys.wait(["choice"], _patience(own))
    data = json.loads(keys.get("choice"))
    return Choice(data["backend"], data["why"], tuple(data["ranks"]))


def _patience(own: Offer) -> timedelta:
    return timedelta(seconds=_PATIENCE + _EACH * own.size)


def _offers(keys: Store, ranks: Iterable[int]) -> list[Offer]:
    return [Offer(**json.loads(text)) for text in keys.multi_get([f"offer/{rank}" for rank in ranks])]


def _missing(keys: Store, own: Offer, timeout: timedelta) -> Choice:
    here = [rank for rank in range(own.size) if keys.check([f"offer/{rank}"])]
    offers = _offers(keys, here)
    if len({one.size for one in offers}) > 1:
        return choose(offers)
    absent = tuple(sorted(set(range(own.size)) - set(here)))
    return Choice(
        None,
        f"waited {timeout.total_seconds():.3g} s for {in_words(absent)}, which did not come ({len(here)} of {own.size} "
        "did); look at the logs of the missing ranks, and whether they were started",
        absent,
    )


def _twice(keys: Store, own: Offer) -> Choice:
    with suppress(RuntimeError):
        keys.wait([f"offer/{own.rank}"], _patience(own))
    first = _offers(keys, [own.rank])[0]
    return Choice(
        None,
        f"rank {own.rank} came twice, as process {first.process} on {first.host} and as process {own.process} on "
        f"{own.host}; every process needs a rank of its own; start the ranks with one launcher",
        (own.rank,),
    )


def _forget(keys: Store, own: Offer, choice: Choice, serves: bool) -> None:
    """Delete what this rank wrote, the last one what is common; who serves the store stays until all have read it."""
    with suppress(RuntimeError):
        for key in (f"claim/{own.rank}", f"offer/{own.rank}"):
            keys.delete_key(key)
        if keys.add("read", 1) == own.size:
            for key in ("came", "arrived", "decided", "choice", "read"):
                keys.delete_key(key)
        elif serves and choice.backend is None:
            _await_readers(keys, own)


def _await_readers(keys: Store, own: Offer) -> None:
    end = time.monotonic() + _patience(own).total_seconds()
    while time.monotonic() < end and keys.check(["read"]) and keys.add("read", 0) < keys.add("came", 0):
        time.sleep(_LOOK)
