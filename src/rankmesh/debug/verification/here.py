"""Check here: ranks that are started on this machine, and who of them is to blame.

```
gone without a last word                                                lost, at once
a rank failed, or no rank has done anything for the timeout             roll call: who does not beat is lost
```
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.diary import Diary, ended, line, run_rank
from rankmesh.debug.verification.lifelines import BEAT, Lifelines, ended_by
from rankmesh.debug.verification.ranks import POLL, Ranks, begin, check_size
from rankmesh.debug.verification.results import CheckResult, collect

__all__ = ["check_here"]

# How long a rank may take to answer the roll, and how much longer than they may wait ranks are let wait.
_ROLL, _MORE = 3.0, 1.0
# Where a rank writes the verdict on what hangs.
_VERDICT = "verdict"


def check_here(
    plan: Plan,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    since: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckResult:
    """Check a plan on ranks of this machine; ``progress`` is told how many of how many proofs are done.

    Raises ``PlanError`` for a world that is too large for one machine. Ranks that fail or die are in the result.
    """
    size = check_size(plan)
    started = time.perf_counter() if since is None else since
    lifelines = Lifelines(size)
    with tempfile.TemporaryDirectory(prefix="rankmesh-check-") as folder:
        place = Path(folder)
        proofs = sum(len(kind) * kind.size for kind in plan.kinds.values())
        judge = _Judge(place, lifelines, timeout, proofs, progress)
        unseen = judge.run(lambda rank: _rank(plan, rank, place, backend, timeout, lifelines))
        diaries = {rank: _diary(place, rank) for rank in range(size)}
        verdict = (place / _VERDICT).read_text("utf-8") if (place / _VERDICT).exists() else ""
    # Where nobody is lost and all stand still, what was seen is what the judge did: it killed them.
    lost = judge.lost if judge.lost or judge.stuck else unseen
    return collect(plan, diaries, time.perf_counter() - started, lost, verdict)


# -- in a rank ------------------------------------------------------------------------------------------------------


def _rank(plan: Plan, rank: int, place: Path, backend: str | None, timeout: float, lifelines: Lifelines) -> None:
    """What each started rank does."""
    lifelines.hold(rank)
    launch = begin(place, rank, plan.world_size)
    with (place / f"diary-{rank}").open("a", encoding="utf-8", buffering=1) as diary:
        well = run_rank(
            plan,
            launch,
            backend,
            timeout,
            lambda event: _write(diary, event),
            lambda verdict: _hear(place, rank, verdict),
            place,
        )
    if not well:
        _linger(place, rank, plan.world_size, timeout)
        raise SystemExit(1)


def _write(diary: Any, event: dict[str, Any]) -> None:
    diary.write(line(event))


def _hear(place: Path, rank: int, verdict: str) -> None:
    """Keep the verdict on what hangs, which is the same on each rank that hears it."""
    draft = place / f"{_VERDICT}-{rank}"
    draft.write_text(verdict, encoding="utf-8")
    draft.replace(place / _VERDICT)


def _linger(place: Path, rank: int, size: int, timeout: float) -> None:
    """Let the others write what they saw: the launcher ends every rank soon after the first one that fails."""
    (place / f"ended-{rank}").touch()
    end = time.monotonic() + min(timeout, 2.0)
    while time.monotonic() < end and len(list(place.glob("ended-*"))) < size:
        time.sleep(POLL)


def _diary(place: Path, rank: int) -> Diary:
    try:
        lines = (place / f"diary-{rank}").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(text) for text in lines if text.endswith("}")]


def _is_done(diary: Diary) -> bool:
    return bool(diary) and diary[-1]["event"] == "done"


# -- in the parent --------------------------------------------------------------------------------------------------


# How ranks end that are told to, because one of them has failed.
_FOLLOWED = ended_by(-signal.SIGTERM)


class _Judge(Ranks):
    """Ranks of which it is found out who is lost."""

    def __init__(
        self,
        place: Path,
        lifelines: Lifelines,
        timeout: float,
        proofs: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(place, lifelines.size, self._tell)
        self._lifelines, self._timeout = lifelines, timeout
        self._proofs, self._progress = proofs, progress
        self._written, self._moved = 0, 0.0
        self.stuck = False
        self.lost: dict[int, str] = {}

    def run(self, work: Callable[[int], None]) -> dict[int, str]:
        """Run the ranks to their end, and hear their last."""
        try:
            unseen = super().run(work)
            if not (self.lost or self.stuck):
                self._lifelines.listen(0)
                self._judge_gone()
        finally:
            self._lifelines.close()
        return unseen

    def watch(self) -> None:
        """Look at the ranks until they have ended, or it is known who is to blame; then end them."""
        self._lifelines.forked(self.processes)
        self._moved, looked = time.monotonic(), 0.0
        while not (self.over.is_set() or self.lost or self.stuck):
            self._lifelines.listen(POLL)
            self._judge_gone()
            if time.monotonic() - looked > 2 * BEAT:
                looked = time.monotonic()
                self._look()
        if self.lost or self.stuck:
            self.end_all()

    def _look(self) -> None:
        """How far the ranks are; a roll call where one has failed, or all of them stand still."""
        diaries = self._diaries()
        self._tell()
        if sum(map(len, diaries.values())) != self._written:
            self._written, self._moved = sum(map(len, diaries.values())), time.monotonic()
        failed = any(diary and diary[-1]["event"] == "failed" for diary in diaries.values())
        still = time.monotonic() - self._moved > self._timeout + _MORE
        if failed or still:
            self._call_the_roll()
            self.stuck = still

    def _call_the_roll(self) -> None:
        self._lifelines.listen(0)  # what was written before is no answer
        called = time.monotonic()
        while time.monotonic() - called < _ROLL and not self.over.is_set():
            self._lifelines.listen(POLL)
        self._judge_gone()
        for rank in self._lifelines.silent_since(called):
            self.lost.setdefault(rank, "does not answer")

    def _judge_gone(self) -> None:
        """Who is gone without a last word is lost; but not who was ended because another one had ended."""
        diaries = {rank: _diary(self.place, rank) for rank in self._lifelines.gone}
        first = [rank for rank, how in self._lifelines.gone.items() if how != _FOLLOWED and not _is_done(diaries[rank])]
        for rank, how in self._lifelines.gone.items():
            if not ended(diaries[rank]) and (how != _FOLLOWED or not first):
                self.lost.setdefault(rank, how)

    def _diaries(self) -> dict[int, Diary]:
        return {rank: _diary(self.place, rank) for rank in range(self.size)}

    def _tell(self) -> None:
        if self._progress is not None:
            done = sum(event["event"] == "proved" for diary in self._diaries().values() for event in diary)
            self._progress(done, self._proofs)
