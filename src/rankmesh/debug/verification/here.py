"""Check here: ranks that are started on this machine, and who of them is to blame.

```
its process is gone, and its log has no end                      lost, at once
a rank failed, or no rank has done anything for the timeout      probe: a rank without a heartbeat since is lost
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
from rankmesh.debug.verification.event_log import EventLog, ended, line, run_rank
from rankmesh.debug.verification.heartbeats import INTERVAL, Heartbeats, ended_by
from rankmesh.debug.verification.ranks import POLL, Ranks, begin, check_size
from rankmesh.debug.verification.results import CheckResult, collect

__all__ = ["check_here"]

# Seconds that a rank may take to respond to a probe, and beyond the timeout before all count as stuck.
_PROBE, _MORE = 3.0, 1.0
# Where a rank writes the diagnosis of what hangs.
_DIAGNOSIS = "diagnosis"


def check_here(
    plan: Plan,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    since: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckResult:
    """Check a plan on ranks of this machine; ``progress`` is given how many of how many verifications are done.

    Raises ``PlanError`` for a world that is too large for one machine. Ranks that fail or die are in the result.
    """
    size = check_size(plan)
    started = time.perf_counter() if since is None else since
    heartbeats = Heartbeats(size)
    with tempfile.TemporaryDirectory(prefix="rankmesh-check-") as folder:
        place = Path(folder)
        total = sum(len(kind) * kind.size for kind in plan.kinds.values())
        ranks = _CheckedRanks(place, heartbeats, timeout, total, progress)
        failed = ranks.run(lambda rank: _rank(plan, rank, place, backend, timeout, heartbeats))
        logs = {rank: _log(place, rank) for rank in range(size)}
        diagnosis = (place / _DIAGNOSIS).read_text("utf-8") if (place / _DIAGNOSIS).exists() else ""
    # Where nobody is lost and all stand still, they failed because this process killed them.
    lost = ranks.lost if ranks.lost or ranks.stuck else failed
    return collect(plan, logs, time.perf_counter() - started, lost, diagnosis)


# -- in a rank ------------------------------------------------------------------------------------------------------


def _rank(plan: Plan, rank: int, place: Path, backend: str | None, timeout: float, heartbeats: Heartbeats) -> None:
    """What each started rank does."""
    heartbeats.hold(rank)
    launch = begin(place, rank, plan.world_size)
    with (place / f"log-{rank}").open("a", encoding="utf-8", buffering=1) as log:
        well = run_rank(
            plan,
            launch,
            backend,
            timeout,
            lambda event: _write(log, event),
            lambda diagnosis: _keep(place, rank, diagnosis),
            place,
        )
    if not well:
        _linger(place, rank, plan.world_size, timeout)
        raise SystemExit(1)


def _write(log: Any, event: dict[str, Any]) -> None:
    log.write(f"{line(event)}\n")


def _keep(place: Path, rank: int, diagnosis: str) -> None:
    """Keep the diagnosis of what hangs, which is the same on each rank that gets it."""
    draft = place / f"{_DIAGNOSIS}-{rank}"
    draft.write_text(diagnosis, encoding="utf-8")
    draft.replace(place / _DIAGNOSIS)


def _linger(place: Path, rank: int, size: int, timeout: float) -> None:
    """Let the others write their last events: the launcher ends every rank soon after the first one that fails."""
    (place / f"ended-{rank}").touch()
    end = time.monotonic() + min(timeout, 2.0)
    while time.monotonic() < end and len(list(place.glob("ended-*"))) < size:
        time.sleep(POLL)


def _log(place: Path, rank: int) -> EventLog:
    try:
        lines = (place / f"log-{rank}").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(text) for text in lines if text.endswith("}")]


def _is_done(log: EventLog) -> bool:
    return bool(log) and log[-1]["event"] == "done"


# -- in the parent --------------------------------------------------------------------------------------------------


# How ranks end that the launcher ends, because one of them has failed.
_FOLLOWED = ended_by(-signal.SIGTERM)


class _CheckedRanks(Ranks):
    """Ranks that are watched: ``lost`` are those that are gone or unresponsive, ``stuck`` says that all stand still."""

    def __init__(
        self,
        place: Path,
        heartbeats: Heartbeats,
        timeout: float,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(place, heartbeats.size, self._update)
        self._heartbeats, self._timeout = heartbeats, timeout
        self._total, self._progress = total, progress
        self._written, self._moved = 0, 0.0
        self.stuck = False
        self.lost: dict[int, str] = {}

    def run(self, work: Callable[[int], None]) -> dict[int, str]:
        """Run the ranks to their end; the first that failed, and how."""
        try:
            failed = super().run(work)
            if not (self.lost or self.stuck):
                self._heartbeats.listen(0)
                self._find_lost()
        finally:
            self._heartbeats.close()
        return failed

    def watch(self) -> None:
        """Look at the ranks until they have ended, or it is known who is to blame; then end them."""
        self._heartbeats.forked(self.processes)
        self._moved, looked = time.monotonic(), 0.0
        while not (self.over.is_set() or self.lost or self.stuck):
            self._heartbeats.listen(POLL)
            self._find_lost()
            if time.monotonic() - looked > 2 * INTERVAL:
                looked = time.monotonic()
                self._look()
        if self.lost or self.stuck:
            self.end_all()

    def _look(self) -> None:
        """How far the ranks are; a probe where one has failed, or all of them stand still."""
        logs = self._logs()
        self._update()
        if sum(map(len, logs.values())) != self._written:
            self._written, self._moved = sum(map(len, logs.values())), time.monotonic()
        failed = any(log and log[-1]["event"] == "failed" for log in logs.values())
        still = time.monotonic() - self._moved > self._timeout + _MORE
        if failed or still:
            self._probe()
            self.stuck = still

    def _probe(self) -> None:
        self._heartbeats.listen(0)  # what was sent before is no response
        began = time.monotonic()
        while time.monotonic() - began < _PROBE and not self.over.is_set():
            self._heartbeats.listen(POLL)
        self._find_lost()
        for rank in self._heartbeats.unresponsive_since(began):
            self.lost.setdefault(rank, "does not answer")

    def _find_lost(self) -> None:
        """A rank that is gone and whose log has no end is lost; but not one that was ended after another one's end."""
        logs = {rank: _log(self.place, rank) for rank in self._heartbeats.gone}
        first = [rank for rank, how in self._heartbeats.gone.items() if how != _FOLLOWED and not _is_done(logs[rank])]
        for rank, how in self._heartbeats.gone.items():
            if not ended(logs[rank]) and (how != _FOLLOWED or not first):
                self.lost.setdefault(rank, how)

    def _logs(self) -> dict[int, EventLog]:
        return {rank: _log(self.place, rank) for rank in range(self.size)}

    def _update(self) -> None:
        if self._progress is not None:
            done = sum(event["event"] == "proved" for log in self._logs().values() for event in log)
            self._progress(done, self._total)
