"""The hooks by which torch.distributed answers ranks that are threads: in place while a simulation needs them.

A thread that was given up and lives on keeps them in place: whatever it calls of torch.distributed raises, and nothing
that it does reaches the process's own world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankmesh.backend import torch_threads
from rankmesh.sim.simulation import current_context

__all__ = ["Hooks", "hooks"]


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
                self._back = torch_threads.answer_threads(current_context)
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
