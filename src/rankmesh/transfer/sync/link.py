"""Link: one rank of a sync, whose weights a link changes, and its rounds with the other ranks of its side.

```
trainer   publish   stored.Publisher (files)   direct.Publisher (messages)
engine    take      stored.Reader              direct.Requester
```
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.default import default_group
from rankmesh.errors import AgreementError, ConnectError, PlanError, TransferError
from rankmesh.rendezvous import Outcome
from rankmesh.runtime.world import World
from rankmesh.transfer.live.agreement import TransferAgreement, in_one_line
from rankmesh.transfer.live.shards import local, problem_of, shards_of
from rankmesh.transfer.sync.delta import Delta, History
from rankmesh.transfer.sync.layouts import Layouts

__all__ = ["Announced", "Given", "Side", "Weights", "other_layouts"]

# Returns the version to publish and what it changes, None for everything; raises if a user's arguments do not fit.
Given = Callable[[], tuple[int, Delta | None]]
# Ranks of an engine may see different versions while they are published faster than they are read: so often they look.
_LOOKS = 100
# What the ranks of an engine agree on if they see no newer version.
_NO_VERSION: Mapping[str, object] = {"version": -1, "of": ""}


class Weights:
    """The ``tensors`` in use on one rank, of ``version``; ``lock`` is held while they change."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.version: int | None = None
        self.lock = threading.RLock()

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors, or the current GPU if it has none."""
        known = next((local(tensor).device for tensor in self.tensors.values()), None)
        if known is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return known or torch.device("cpu")

    @contextmanager
    def changed(self, version: int) -> Iterator[None]:
        """Write into the tensors, under the lock: they are of this version at the end of the block."""
        with self.lock:
            yield
            self.version = version
        if any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()


@dataclass(eq=False)
class Announced:
    """A version that this rank can receive; all ranks of an engine must find the same ``version`` and ``of``.

    ``of`` is the trainer's ``run``, of which the ``files`` are locked, or the group that carries the messages.
    """

    run: str
    version: int
    of: str
    delta: Delta | None
    budget: int = 0
    files: Mapping[int, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Let the trainer write its files again."""
        for file in self.files.values():
            file.unlock()


def other_layouts(digest: str, where: str = "") -> AgreementError:
    """Return the error of an engine whose trainer has other layouts, by their digest."""
    problem = f"the trainer{where} publishes another pair of layouts (digest {digest[:12]})"
    return AgreementError(f"{problem}; give both sides the same two layouts", digest=digest)


class Side:
    """This rank of a trainer or an engine, and its rounds with the other ranks of it; ``at`` is the folder, if any.

    ``rank`` is its number in ``layouts.direct``; ``id`` names this trainer or engine.
    """

    def __init__(
        self, name: str, layouts: Layouts, weights: Weights, timeout: timedelta, budget: int, at: str = ""
    ) -> None:
        self.layouts, self.weights, self.timeout, self.budget, self._name = layouts, weights, timeout, budget, name
        trains = name == "trainer"
        self.ranks = layouts.trainer_ranks if trains else layouts.engine_ranks
        self._call = "publish()" if trains else "receive()"
        self.store: Store
        if len(self.ranks) == 1 and not dist.is_initialized():
            self._local, self.store, self._serves = self.ranks[0], HashStore(), False
        else:
            world = default_group()
            self._local, self.store, self._serves = world.rank, world.store, World.current().serves
        if self._local not in self.ranks:
            raise PlanError(
                f"rank {self._local} is not in the {name}'s layout, which has {len(self.ranks)} ranks; call "
                f"{self._call} on these alone",
                rank=self._local,
            )
        self.rank, self.is_first = self._local + (0 if trains else layouts.shift), self._local == self.ranks[0]
        self._key = hashlib.sha256(f"{at} {layouts.direct.digest}".encode()).hexdigest()[:12]
        shardings = layouts.trainer if trains else layouts.engine
        shards = shards_of(shardings, self._local)
        problem = problem_of(weights.tensors, shardings, shards, name)
        weights.tensors = {name: weights.tensors[name] for name in shards if name in weights.tensors}
        what = {"layouts": layouts.direct.digest, "budget": budget}
        self.id = str(self._round("begin").start(what, problem, value=lambda _: uuid.uuid4().hex[:12], last=True).value)

    def _round(self, step: str) -> TransferAgreement:
        name = f"sync/{self._key}/{self._name}/{step}"
        store, timeout = self.store, self.timeout
        return TransferAgreement(store, name, self._local, self.ranks, timeout, serves=self._serves, call=self._call)

    def agreed(
        self,
        step: str,
        work: Callable[[], tuple[Mapping[str, object], str]],
        value: Callable[[dict[int, str]], object] | None = None,
        *,
        more: float = 0.0,
        last: bool = True,
    ) -> tuple[Outcome, TransferAgreement]:
        """Agree on what ``work`` returns. If it fails on a rank, all raise: that rank its own error, if it is ours."""
        agreement = self._round(step)
        what: Mapping[str, object] = {}
        text, problem, refused = "", "", None
        try:
            what, text = work()
        except Exception as error:  # noqa: BLE001  - whatever it is, the other ranks must know
            problem, refused = in_one_line(error), error
        try:
            return agreement.start(what, problem, text, value, more, last=last or what is _NO_VERSION), agreement
        except TransferError as error:
            if isinstance(refused, AgreementError | ConnectError):
                raise refused from error
            raise

    def published(
        self, given: Given, history: History, write: Callable[[], str], announce: Callable[[dict[int, str]], str]
    ) -> str:
        """Add a version to the history, and ``write`` it; one rank announces it to engines once all ranks have it."""

        def written() -> tuple[Mapping[str, object], str]:
            version, delta = given()
            history.add(version, delta)
            changed = repr(None if delta is None else sorted(delta.items(), key=str))
            return {"version": version, "changed": hashlib.sha256(changed.encode()).hexdigest()[:16]}, write()

        return str(self.agreed("publish", written, announce, more=self.timeout.total_seconds())[0].value)

    def newest(
        self, await_version: Callable[[], Announced | None], *, last: bool
    ) -> tuple[Announced | None, TransferAgreement]:
        """Return the version that all ranks of this engine see, None if they see none, and the round of it.

        With ``last`` no call of the round's ``end`` follows.
        """
        for look in range(_LOOKS):
            found: list[Announced | None] = []

            def awaited(found: list[Announced | None] = found) -> tuple[Mapping[str, object], str]:
                found.append(seen := await_version())
                return _NO_VERSION if seen is None else {"version": seen.version, "of": seen.of}, ""

            try:
                agreement = self.agreed("receive", awaited, last=last)[1]
                return found[0], agreement
            except (AgreementError, TransferError) as error:
                if found and found[0] is not None:
                    found[0].release()
                differs = isinstance(error, AgreementError) and "version" in error.fields
                if look == _LOOKS - 1 or not differs:
                    raise
        raise AssertionError
