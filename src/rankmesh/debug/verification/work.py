"""The work of one rank in a check, on a thread of its own, and its report.

```
join the world ──> connect ──> verify each group ──> leave           the report: what was verified, or what failed
```
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.verify import verify
from rankmesh.debug.watch.watch import Watch
from rankmesh.errors import first_line
from rankmesh.launch.started import Launch
from rankmesh.runtime.connect import connect
from rankmesh.runtime.init import LiveRank, enter

__all__ = ["WORKER", "Report", "Work"]

WORKER = "rankmesh-check"


@dataclass
class Report:
    """The report of one rank: its backend, the seconds that it took to connect, and each group that it has verified.

    ``verified`` has the operations and the seconds by group. ``kind`` and ``message`` are of the error that ended it,
    empty where none did, ``group`` is the group that it was at then.
    """

    backend: str = ""
    connect: float = 0.0
    verified: dict[str, tuple[Sequence[str], float]] = field(default_factory=dict)
    kind: str = ""
    message: str = ""
    group: str | None = None


class Work:
    """The work of this rank: ``over`` is set at its end, or as soon as it has failed.

    ``moved`` is when it last made progress, ``diagnosis`` what the watch of this rank found.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        backend: str | None,
        timeout: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._plan, self._launch, self._backend, self._timeout = plan, launch, backend, timeout
        self._progress = progress
        self.report, self.over = Report(), threading.Event()
        self.moved, self.diagnosis = time.monotonic(), ""
        self._thread = threading.Thread(target=self.run, daemon=True, name=WORKER)
        self._thread.start()

    def run(self) -> None:
        """Check this rank; whatever ends it is in the report."""
        try:
            with enter(self._launch, self._backend, self._timeout) as me:
                if not me.launch.single_rank:  # recordings are left only where the environment asks for them
                    folder = os.environ.get("RANKMESH_RECORD")
                    watch = Watch(Path(folder).absolute() if folder else None, diagnosed=self._diagnosed)
                    me.before_leaving.append(watch.close)
                try:
                    self._verify(me)
                except Exception as error:
                    # At once: it takes a while to leave a world in which something hangs.
                    self._fail(error)
                    raise
        except Exception as error:  # noqa: BLE001  - the rank that reports has it
            self._fail(error)
        self.over.set()

    def _verify(self, me: LiveRank) -> None:
        import torch.distributed as dist

        self.report.backend, self.moved = me.backend, time.monotonic()
        with connect(self._plan, timeout=self._timeout) as groups:
            self.report.connect, names = groups.phases["all"], list(groups)
            self.report.group = next(iter(names), None)
            for number, group in enumerate(verify(groups, str(me.device)), 1):
                self.report.verified[group.name] = group.operations, round(group.seconds, 6)
                self.report.group, self.moved = next(iter(names[number:]), None), time.monotonic()
                if self._progress is not None:
                    self._progress(number, len(names))
            # A rank that leaves early would close connections on which a slower one still waits.
            dist.barrier(device_ids=[me.device.index] if me.backend == "nccl" else None)

    def _fail(self, error: Exception) -> None:
        if not self.report.kind:
            self.report.kind = type(error).__name__
            # Without the place in torch's sources that its network errors begin with.
            line = (str(error).strip().splitlines() or [first_line(error)])[0]
            self.report.message = re.sub(r"^\[/\S+:\d+\] ", "", line)[:500]
            self.over.set()

    def _diagnosed(self, diagnosis: str, _: object) -> None:
        self.diagnosis = diagnosis

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)
