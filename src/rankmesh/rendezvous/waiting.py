"""Waiting for keys of a torch store, and for calls that may never return, no longer than a limit.

```
0 ───────────── the store wakes this rank ───────────── 30 s before the end ── this rank asks ── end
```

When a wait of torch's ``TCPStore`` times out, it asks DNS for the names of both ends of its connection, to write
them in the log. Where DNS does not answer this takes longer than many a limit, and a rank that waits there answers no
probe. So the end of a wait is never left to it. A ``FileStore`` looks once a second, so a rank asks it all the time.

A call over a connection that is cut, or a collective of which a member is stopped, never returns. So a thread makes it,
which the caller leaves behind (``submit``); one thread is kept for the next call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.rendezvous.channel import ChannelLost

__all__ = ["Worker", "answered_within", "await_at_exit", "leave_behind", "submit", "underlying", "wait_for"]

_Result = TypeVar("_Result")

# Longer than a resolver takes that tries two servers twice, for 5 s each.
_LAST = 30.0
# Seconds between two questions: a twentieth of the time that they have been asked for, within these.
_SHARE, _LEAST, _MOST = 20, 0.001, 0.2
# Seconds that the process waits at its end for threads that call C++ and have not returned.
_EXIT = 5.0


class Worker:
    """A thread that makes calls in turn, from the first one until ``close``, or until nobody holds the worker.

    A call that returns from C++ while Python shuts down ends the process with SIGABRT. So the process waits for calls
    at its end, for 5 s at most; from then on only the main thread makes calls.
    """

    _workers: ClassVar[WeakSet[Worker]] = WeakSet()
    _threads: ClassVar[WeakSet[threading.Thread]] = WeakSet()
    _at_exit: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Make a call; its future has what it returns, or raises."""
        made: Future[_Result] = Future()
        if Worker._at_exit and threading.current_thread() is not threading.main_thread():
            made.set_exception(ChannelLost("this process ends"))
            return made
        if self._calls is None:
            self._calls = SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._calls,), daemon=True, name=self._name)
            thread.start()
            self._workers.add(self)
            await_at_exit(thread)
        self._calls.put(partial(_make, made, call))
        return made

    def close(self) -> None:
        """End the thread once it has made the calls so far; the next call starts another."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)

    __del__ = close

    @classmethod
    def end_all(cls, seconds: float = _EXIT) -> None:
        """Close every worker, and wait for the calls under way."""
        end = time.monotonic() + seconds
        for worker in list(cls._workers):
            worker.close()
        for thread in list(cls._threads):
            thread.join(max(0.0, end - time.monotonic()))


def await_at_exit(thread: threading.Thread) -> None:
    """Have the process wait at its end for a thread that calls C++, for 5 s at most."""
    Worker._threads.add(thread)


@atexit.register
def _end() -> None:
    Worker._at_exit = True
    Worker.end_all()


# Workers that wait for a call of `submit`, seldom more than one.
_idle: list[Worker] = []
os.register_at_fork(after_in_child=_idle.clear)


def submit(call: Callable[[], _Result], name: str) -> Future[_Result]:
    """Make one call on a thread that makes no other meanwhile: the thread of a call that has returned, or a new one."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = Worker(name)

    def make() -> _Result:
        thread = threading.current_thread()
        thread.name = name
        try:
            return call()
        finally:
            thread.name = "rankmesh-idle"
            worker.close() if _idle else _idle.append(worker)

    return worker.submit(make)


def answered_within(made: Future[_Result], seconds: float, *, unless: Future[Any] | None = None) -> _Result:
    """Wait for a submitted call; return its result, or raise its error, or ``ChannelLost`` after the limit."""
    # Not the time-out of `result`: the call may raise one of its own, or come back just after it.
    with suppress(TimedOut):
        made.exception(seconds) if unless is None else wait((made, unless), seconds, FIRST_COMPLETED)
    if not made.done():
        leave_behind(made)
        raise ChannelLost(f"no answer within {seconds:.3g} s")
    return made.result()


def leave_behind(made: Future[_Result]) -> None:
    """Have a call that nobody waits for any more free what it had, such as connections, if it fails later."""
    made.add_done_callback(_free)


def _free(made: Future[_Result]) -> None:
    error = made.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := calls.get()) is not None:
        task()
        # Who holds the worker may be held by the call.
        del task


def _make(made: Future[_Result], call: Callable[[], _Result]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
        made.set_exception(error)
    finally:
        # The traceback of the error has this frame.
        del made, call


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Wait at most ``seconds`` for keys of the store; return whether all are there."""
    end, asked = time.monotonic() + seconds, _asked_for(underlying(store), seconds)
    if asked < seconds:
        there = _woken(store, keys, seconds - asked)
        if there or not asked:
            return there
    return _asked(store, keys, end)


def underlying(store: Store) -> Store:
    """Return the store in which those that only add a prefix keep their keys."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _asked_for(store: Store, seconds: float) -> float:
    """Share of a wait that is spent on polling instead of waiting to be woken."""
    if isinstance(store, FileStore):
        return seconds
    return min(seconds, _LAST) if isinstance(store, TCPStore) else 0.0


def _woken(store: Store, keys: Sequence[str], seconds: float) -> bool:
    try:
        # A store takes no time at all for no limit.
        store.wait(list(keys), timedelta(seconds=max(seconds, _LEAST)))
    except RuntimeError:
        # Each kind of store has an error of its own for the end of the time; one that has failed fails again here.
        return store.check(list(keys))
    return True


def _asked(store: Store, keys: Sequence[str], end: float) -> bool:
    started = time.monotonic()
    while not store.check(list(keys)):
        now = time.monotonic()
        if now >= end:
            return False
        time.sleep(min(max((now - started) / _SHARE, _LEAST), _MOST, end - now))
    return True
