"""The watch: a thread that records its rank when its program cannot.

```
every tick   a call under way for longer than the timeout? a dump request of another rank? SIGUSR1?
then         all responsive ranks write their recordings, and one of them diagnoses (``requests``)
```
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankmesh.backend import recorder as calls
from rankmesh.backend.default import default_group
from rankmesh.core.options import time_limit
from rankmesh.debug.doctor.diagnosis import Diagnosis, summary
from rankmesh.debug.slow import SlowReport
from rankmesh.debug.watch.exchange import connected
from rankmesh.debug.watch.host import HostRanks
from rankmesh.debug.watch.metrics import Metrics, metrics_of, send_trace, write_prometheus
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.debug.watch.recordings import Recordings
from rankmesh.debug.watch.requests import SESSION, DumpRequests, Pace
from rankmesh.debug.watch.slow_watch import SlowWatch
from rankmesh.debug.watch.stacks import Mark
from rankmesh.rendezvous.waiting import await_at_exit
from rankmesh.runtime.world import World

__all__ = ["Watch", "slow", "start"]

_log = logging.getLogger("rankmesh.watch")
# Seconds that a rank waits at its beginning for its watch, and at its end for an idle one.
_MOMENT = 1.0
# Seconds between two readings of the recorder while a group makes no progress; a full one takes a while.
_READING = 10.0
# Seconds that a dump request may take, beside the reading of its recordings.
_REQUEST = 30.0
_sessions = count()


class Watch:
    """The watch of this rank: ``close`` it before the world is destroyed, or leave that to the end of the program.

    ``folder`` is where recordings go, None for nowhere but the store; ``verdict`` is the last diagnosis as a sentence,
    None before the first. ``diagnosed`` takes that and the ranks at fault, in place of the log. ``then`` is called on
    each responsive rank once a hang is diagnosed in which a call lasts too long. ``anew``: what was recorded until now
    is of another world. ``slow``: seconds between two lines on what makes the job slow, 0 for none.
    """

    def __init__(
        self,
        folder: Path | None,
        timeout: timedelta | None = None,
        *,
        diagnosed: Callable[[str, tuple[int, ...]], None] | None = None,
        then: Callable[[], None] | None = None,
        anew: bool = False,
        slow: float = 0.0,
    ) -> None:
        world = default_group()
        self.folder = folder
        self.verdict: str | None = None
        self._diagnosed, self._then = diagnosed, then
        patience = (timeout or world.timeout / 2).total_seconds()
        self._recorder = Recorder(anew=anew)
        self._slow_call = SlowCall(self._recorder, patience, limited=timeout is not None)
        if anew:
            self._slow_call.reported = time.monotonic()
        self._line_pause = slow
        self._slow: SlowWatch | None = None
        self._pace = Pace(patience, self._recorder.world_size)
        self._store = world.store
        self._process = os.getpid()
        self._number = next(_sessions)
        self._recordings: Recordings | None = None
        self._world = World.current()
        self._closed, self._started = False, threading.Event()
        # Held until the watch is closed.
        self._open = threading.Lock()
        self._open.acquire()
        self._requests_over = 0
        self._responding = self._hung = False
        self._responded = threading.Condition()
        self._wanted: str | None = None
        # Of a hang that this rank has diagnosed: its numbers, and the calls that this rank had made.
        self._published: tuple[Metrics, int] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-watch")
        self._thread.start()
        await_at_exit(self._thread)
        # A rank that stops soon is known to the others of its host by then.
        self._started.wait(_MOMENT)
        self._world.diagnosing.append(self.ask)
        atexit.register(self.close)

    # -- the session -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = connected(self._store, f"rankmesh/watch/{self._recorder.attempt}/{self._number}")
            token = os.urandom(8).hex()
            # The first rank of the session makes up its token.
            session = store.ask(lambda channel: channel.first(SESSION, token))
            host = HostRanks(session, self._recorder.rank)
        except (OSError, RuntimeError) as error:  # ChannelLost and torch's are among them
            _log.warning("rankmesh: no watch on rank %s: %s", self._recorder.rank, error)
            return
        self._recordings = recordings = Recordings(session, self.folder, store)
        requests = DumpRequests(store.channel, recordings, self._recorder, host, self._pace)
        if self.folder is not None:
            host.outlive_sigterm()
        if self._line_pause > 0:
            self._slow = SlowWatch(self._recorder, store, self._line_pause, self.folder)
        self._started.set()
        try:
            while not self._wait():
                self._look(host, requests)
                if host.terminated():
                    self._put(requests.number, "SIGTERM")
                    return
            last = requests.close()
            if self._slow is not None:
                self._slow.close(last=last)
        except (OSError, RuntimeError) as error:  # the program has closed what the watch had open
            _log.warning("rankmesh: no watch on rank %s any more: %s", self._recorder.rank, error)
        finally:
            host.close()

    def _wait(self) -> bool:
        """Wait until the next look, and see meanwhile how fast this rank is; return whether the watch is closed."""
        end, slow = time.monotonic() + self._pace.tick, self._slow
        if slow is None:
            return self._closes_within(self._pace.tick)
        if not slow.pause:  # the last look took until after the next sample
            slow.resume()
        while (left := end - time.monotonic()) > 0:
            if self._closes_within(min(left, slow.pause)):
                return True
            if not slow.pause:
                slow.look()
        return self._closed

    def _closes_within(self, seconds: float) -> bool:
        """Wait for the watch to be closed; return whether it is."""
        # An event would cost a third of a sample: its Python code is cold each time, a lock is one call.
        if self._open.acquire(timeout=seconds):
            self._open.release()
        return self._closed

    @property
    def slow(self) -> SlowReport | None:
        """The last report of the job's speed, None before the first; ranks that do not log read it from the folder."""
        if self._slow is not None and self._slow.report is not None:
            return self._slow.report
        return None if self.folder is None else SlowReport.read(self.folder)

    def close(self) -> None:
        """End the watch; the recording of a rank that has ended stays in the folder."""
        if self._closed or os.getpid() != self._process:
            # A process that was forked off is not a rank, whatever ends it.
            return
        if not self._hung and self._diagnosed is None and self._recorder.failure(RuntimeError):
            self.ask("a call failed")
        self._settle(ended=not self._recorder.failure())
        self._closed = True
        self._open.release()
        self._world.diagnosing.remove(self.ask)
        self._thread.join(_MOMENT)
        if self._responding:
            self._thread.join(2 * self._pace.grace + self._pace.reading)
        atexit.unregister(self.close)
        self._put(self._requests_over, "the end", ended=True)
        self._store = self._recordings = None

    def _put(self, request: int, reason: str, *, ended: bool = False) -> None:
        """Leave a recording as the program ends; the recording of a hang stays, also if the hang has ended."""
        if self._hung or self._diagnosed is not None or self._recordings is None:
            return
        try:
            document = self._recorder.document(reason, ended=ended)
            self._recordings.put(self._recorder.rank, request, document)
        except RuntimeError as error:
            _log.debug("rankmesh: rank %s ended without a recording: %s", self._recorder.rank, error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- when to respond -----------------------------------------------------------------------------------------

    def _look(self, host: HostRanks, requests: DumpRequests) -> None:
        self._recorder.look()
        self._settle()
        reason = self._wanted or ("SIGUSR1" if host.signalled() else "")
        if not reason and requests.requested():
            reason = "another rank asked"
        overdue = "" if reason else self._slow_call.reason()
        if not reason and not overdue:
            return
        self._wanted, self._responding = None, True
        mark = self._slow_call.mark
        # What the program is in by now is part of what is reported.
        self._slow_call.follow()
        began = time.monotonic()
        self.verdict = None
        requests.respond(reason or overdue, mark, self._report, hangs=bool(overdue))
        self._hung |= requests.hung or requests.store_lost
        if requests.hung:
            self._slow_call.reported = began
        self._responding = False
        with self._responded:
            # Who asked meanwhile has the answer of this request; another one would wait for ranks that have gone on.
            self._requests_over, self._wanted = requests.number, None
            self._responded.notify_all()
        # The rank that logs the diagnosis is ended by its launcher as soon as another one ends. A program that ends
        # meanwhile has a status of its own.
        if requests.overdue and self._then is not None and not self._closes_within(_MOMENT):
            self._then()

    def _report(self, message: str, at_fault: tuple[int, ...], diagnosis: Diagnosis | None) -> None:
        self.verdict = message
        if self._diagnosed is not None:
            self._diagnosed(message, at_fault)
        elif diagnosis is not None:
            lines, more = summary(diagnosis), f"rankmesh doctor {self.folder}"
            text = [*lines[:-1], f"{lines[-1]}; {more}"] if len(lines) > 1 else [*lines, more]
            # A program that configures its logging disables the loggers that it does not name.
            _log.disabled = False
            _log.warning("\n".join(f"rankmesh: {line}" for line in text))
        if diagnosis is not None:
            self._publish(diagnosis)

    def _publish(self, diagnosis: Diagnosis) -> None:
        """Give a diagnosis to what monitors the job."""
        try:
            found = metrics_of(diagnosis)
            if self.folder is not None:
                write_prometheus(self.folder, found, hangs=bool(diagnosis.causes))
                self._published = (found, calls.calls_made()) if diagnosis.causes else None
            send_trace(found)
        except Exception as error:  # noqa: BLE001 - OpenTelemetry's exporters are the program's
            _log.warning("rankmesh: monitoring is not told of the diagnosis: %s", error)

    def _settle(self, *, ended: bool = False) -> None:
        """Have the file of metrics say that a hang is over, if this rank has made another call or ends as it should."""
        if self._published is None or self.folder is None or not (ended or calls.calls_made() > self._published[1]):
            return
        found, self._published = self._published[0], None
        with suppress(OSError):
            write_prometheus(self.folder, found, hangs=False)

    def ask(self, reason: str) -> str | None:
        """Ask all ranks for their recordings now; the diagnosis in one sentence, None if there was none in time."""
        if not self._started.is_set():
            return None
        within = _REQUEST + self._pace.reading
        with self._responded:
            over, self._wanted = self._requests_over, reason
            if not self._responded.wait_for(lambda: self._requests_over > over or not self._thread.is_alive(), within):
                return None
        return self.verdict


# -- which call lasts too long ----------------------------------------------------------------------------------------


class SlowCall:
    """The call that this rank has under way, and whether that is for longer than ``patience`` (seconds).

    ``limited``: that holds for every call; else a call may take half of its own timeout. ``mark`` is where the program
    stands, ``reported`` the time until which calls have been reported.
    """

    def __init__(self, recorder: Recorder, patience: float, *, limited: bool) -> None:
        self.mark: Mark | None = None
        self.reported = 0.0
        self._recorder, self._patience, self._limited = recorder, patience, limited
        self._since = self._read_at = time.monotonic()
        self._unfinished: dict[tuple[int, str], int] = {}

    def follow(self) -> dict[str, Any]:
        """Return the call that the program is in, and from now on since when."""
        call, mark = self._recorder.in_call(self.mark)
        if mark != self.mark:
            self.mark, self._since = mark, time.monotonic()
        return call

    def reason(self) -> str:
        """Return which call lasts too long, of those that no rank has reported; empty where none does."""
        call = self.follow()
        if call.get("operation") and self._lasts(self._since, self._patience):
            # NCCL does not count what two members exchange, but the recorder has it.
            self._since = max(self._since, _clock(calls.last_call()))
            if self._lasts(self._since, self._patience):
                return f"{call['operation']} is under way for {time.monotonic() - self._since:.0f} s"
        return self._by_record()

    def _by_record(self) -> str:
        """Return which call lasts too long although no thread waits for it, by the recorder."""
        # Groups without progress are found at no cost, but for what two members exchange on NCCL.
        pause = min(_READING, self._patience / 10) if self._stands_still() else self._patience / 3
        if time.monotonic() - self._read_at < pause:
            return ""
        self._read_at = time.monotonic()
        for entry in calls.under_way():
            group_timeout = 0.0 if self._limited else float(entry.get("timeout_ms") or 0) / 2000
            made = _clock(int(entry["time_created_ns"]))
            if self._lasts(made, group_timeout or self._patience) and not entry.get("retired"):
                return f"{entry['profiling_name']} is under way for {time.monotonic() - made:.0f} s"
        return ""

    def _stands_still(self) -> bool:
        """Return whether a group has collectives under way and none has ended since the last look."""
        unfinished = {group: done for group, (done, enqueued) in calls.collectives().items() if done != enqueued}
        before, self._unfinished = self._unfinished, unfinished
        return any(before.get(group) == last for group, last in unfinished.items())

    def _lasts(self, since: float, limit: float) -> bool:
        """Return whether what is under way since then lasts too long, and began after all that was reported."""
        return since > self.reported and time.monotonic() - since > limit


def _clock(epoch: int) -> float:
    """Return a time in nanoseconds since the epoch on the clock of the watch."""
    return time.monotonic() - (time.time() - epoch / 1e9)


# -- from a program ---------------------------------------------------------------------------------------------------


def start(
    folder: str | os.PathLike[str] | None = None, *, timeout: float | timedelta | None = None, slow: float = 60.0
) -> Watch:
    """Watch over this rank, in a world that is initialised; called by every rank, in one order of watches.

    ``folder`` takes the recordings (else the environment's ``RANKMESH_RECORD``, else ``recordings``). A call may take
    ``timeout`` seconds before every responsive rank writes its recording: by default half of its group's timeout.
    While the job is slow, one rank logs what makes it so every ``slow`` seconds, never where that is 0.
    """
    place = Path(folder or os.environ.get("RANKMESH_RECORD") or "recordings")
    return Watch(place.absolute(), None if timeout is None else time_limit(timeout), slow=slow)


def slow() -> SlowReport | None:
    """Return the last finding of this process's watch on the job's speed; None if no watch runs."""
    if not dist.is_initialized():
        return None
    running = (getattr(ask, "__self__", None) for ask in World.current().diagnosing)
    return next((watch.slow for watch in running if isinstance(watch, Watch)), None)
