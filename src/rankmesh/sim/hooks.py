"""The hooks by which torch.distributed answers ranks that are threads: in place while a simulation needs them.

A thread that was given up and lives on keeps them in place: whatever it calls of torch.distributed raises, and nothing
that it does reaches the process's own world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rankmesh.backend import torch_threads
from rankmesh.sim.members import SimulatedPeers
from rankmesh.sim.simulation import RankContext, current_context
from rankmesh.survival.heartbeat import Message

__all__ = ["Hooks", "hooks"]


class _Answers:
    """Answers to torch on the thread of a rank; refuses other threads."""

    def world(self) -> torch_threads.RankWorld | None:
        context = current_context()
        return None if context is None else context.world

    def identity(self) -> object:
        context = self._context()
        return id(context.simulation), context.rank

    def make(self, name: str, ranks: Sequence[int], desc: str, *, meet: bool) -> Any:
        context = self._context()
        return context.simulation.make(context, name, ranks, desc, meet=meet)

    def rendezvous(self) -> tuple[Any, int, int]:
        context = self._context()
        return context.simulation.store, context.rank, context.simulation.size

    def refuse(self, operation: str) -> None:
        context = self._context()
        raise context.simulation.not_a_member(context, operation)

    def observed(self) -> bool:
        return self._context().simulation.observer is not None

    def peers(self, reply: Callable[..., Message]) -> SimulatedPeers:
        context = self._context()
        return context.simulation.members.join(context, reply)

    def _context(self) -> RankContext:
        context = current_context()
        if context is None:
            raise RuntimeError("this thread is no rank of a simulation; call it on the rank's own thread")
        return context


class Hooks:
    """Counts the simulations and threads that need the hooks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._survivors: list[threading.Thread] = []
        self._back: Callable[[], None] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the hooks in place."""
        with self._lock:
            self._users += 1
            if self._back is None:
                self._back = torch_threads.answer_threads(_Answers())
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            self._survivors = [thread for thread in self._survivors if thread.is_alive()]
            if self._back is not None and not self._users and not self._survivors:
                self._back()
                self._back = None

    def keep_for(self, thread: threading.Thread) -> None:
        """Keep the hooks for a thread that could not be ended."""
        with self._lock:
            self._survivors.append(thread)


hooks = Hooks()
