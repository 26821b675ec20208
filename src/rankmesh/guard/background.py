"""Guard in the background: replicas of any program are found and compared, on a thread, over the job's store.

```
before a step     a digest of each tensor, on its device, in the thread that trains; the rest is on a thread of its own
windows           which ranks hold replicas (``discover``): the root of an exchange writes it, all ranks read it
every N steps     one digest for each kind of replicas of this rank; the root compares them
a difference      the wrong rank writes the digests of its tensors, a right one which differs first, with its sums, and
                  the wrong one where that is; the root logs it, and all ranks leave out what differs from then on
```

Nothing here is a collective of the job, nothing waits for a rank, and nothing raises into the program.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankmesh.backend.default import default_group
from rankmesh.debug.watch.exchange import Exchange, Form, connected
from rankmesh.debug.watch.metrics import export_difference
from rankmesh.errors import first_line, in_words
from rankmesh.guard.digest import digests_of, first_difference, summed
from rankmesh.guard.discover import (
    Merged,
    combined,
    differing,
    discovered,
    entry,
    items,
    merged,
    of_rank,
    parted,
    windows,
)
from rankmesh.guard.explain import minority, sentence
from rankmesh.guard.observe import Program, Steps
from rankmesh.rendezvous import ChannelLost
from rankmesh.rendezvous.waiting import await_at_exit

__all__ = ["BackgroundGuard"]

_log = logging.getLogger("rankmesh.guard")
_numbers = count()
_FORM = Form[Merged](merged, partial(json.dumps, separators=(",", ":")), json.loads)
# Seconds between two looks: soon after a check, else; and until when after it; that ranks have to explain a difference.
_SOON, _PAUSE, _RECENT, _EXPLAIN = 0.1, 1.0, 5.0, 20.0
# Looks that the store answers for all ranks in a second; checks whose sums are kept; names in a message.
_LOOKS, _KEPT, _NAMES = 4000, 2, 64


@dataclass
class _Check:
    """Sums and digests of the tensors before a step, after ``step`` other steps."""

    step: int
    about: dict[str, tuple[list[int], torch.dtype, str]]  # shapes, dtypes and kinds of devices: memory is not kept
    owners: dict[str, str]
    sums: dict[str, Tensor]
    digests: Tensor
    ready: Any

    def values(self) -> dict[str, int]:
        """Return the digests by name."""
        if self.ready is not None:
            self.ready.synchronize()
        return dict(zip(self.sums, self.digests.tolist(), strict=True))


class BackgroundGuard:
    """The guard of this rank in the world that is initialised, until ``close``.

    ``then`` is called on every rank after a difference; ``folder`` is where monitoring finds it.
    """

    def __init__(
        self,
        program: Program,
        every: int,
        then: Callable[[], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        world = default_group()
        self._rank, self._size, self._store = world.rank, world.size, world.store
        self._attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        self._program, self._every, self._then, self._folder = program, every, then, folder
        self._steps, self._process = Steps(), os.getpid()
        self._queue: SimpleQueue[_Check | None] = SimpleQueue()
        self._compared: frozenset[str] = frozenset()
        self._left_out: set[str] = set()
        self._kinds: dict[str, list[str]] = {}
        self._windows: dict[int, list[dict[str, int]]] = {}
        self._before: dict[str, int] = {}
        self._given: dict[int, dict[str, list[str]]] = {}  # windows whose result is awaited
        self._kept: deque[tuple[_Check, dict[str, int]]] = deque(maxlen=_KEPT)
        self._differences, self._asked, self._answered = 0, 0.0, set[str]()
        self._stop = threading.Event()
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-guard")
        self._thread.start()
        await_at_exit(self._thread)
        atexit.register(self.close)

    def close(self) -> None:
        """End the guard: the last digests are compared within a second, a difference is explained within 20 seconds."""
        if self._stop.is_set() or os.getpid() != self._process:
            return
        self._hook.remove()
        self._stop.set()
        self._queue.put(None)
        self._thread.join(_PAUSE if not self._asked else _EXPLAIN)
        atexit.unregister(self.close)

    def _end(self, error: Exception) -> None:
        self._hook.remove()
        # The store ends with the process that serves it.
        if not self._stop.is_set() and not isinstance(error, ChannelLost):
            sys.stderr.write(f"rankmesh: guard: rank {self._rank} compares nothing any more: {first_line(error)}\n")
        self._stop.set()

    # -- in the thread that trains ------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: object, _options: object) -> None:
        try:
            if not self._stop.is_set() and os.getpid() == self._process:
                self._observe(optimizer)
        except Exception as error:  # noqa: BLE001 - the program goes on without its guard
            self._end(error)

    @torch.no_grad()
    def _observe(self, optimizer: torch.optim.Optimizer) -> None:
        first = next((one for group in optimizer.param_groups for one in group["params"]), None)
        if not self._steps.begin((self._program.number(optimizer), id(first))):
            return
        step = self._steps.done
        learns = step == 0 or any(windows(step, self._every))
        if not learns and (step % self._every or not self._compared):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        tensors, owners = self._program.tensors()
        names = [name for name in tensors if learns or name in self._compared]
        if step == 0:  # zeros and ones are equal everywhere
            names = [name for name in names if not _is_constant(tensors[name])]
        sums = summed([tensors[name] for name in names])
        device = next((one.device for one in sums if one.device.type != "cpu"), torch.device("cpu"))
        digests, ready = digests_of(sums, device), None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        about = {name: (list(tensors[name].shape), tensors[name].dtype, tensors[name].device.type) for name in names}
        self._queue.put(_Check(step, about, owners, dict(zip(names, sums, strict=True)), digests, ready))

    # -- on the guard's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._channel = connected(self._store, f"rankmesh/guard/{self._attempt}").channel
            self._exchange = Exchange(self._channel, self._rank, self._size, _FORM)
            recent = 0.0
            while not self._stop.is_set() or self._asked:
                busy = time.monotonic() < recent or self._exchange.leads or self._asked
                pause = max(_SOON if busy else _PAUSE, self._size / _LOOKS)
                try:
                    check = self._queue.get(timeout=pause)
                except Empty:
                    check = None
                if check is not None:
                    recent = time.monotonic() + _RECENT
                    self._take(check)
                for name, given in self._exchange.look():
                    self._concluded(name, given)
                self._look()
        except Exception as error:  # noqa: BLE001 - the program goes on without its guard
            self._end(error)

    def _take(self, check: _Check) -> None:
        values, step = check.values(), check.step
        if step == 0:
            self._before = values
        for window, place in windows(step, self._every):
            kept = self._windows.setdefault(window, []) if place == 0 else self._windows.get(window, [])
            kept.append(values)
            if place == 2 and len(kept) == 3:
                self._give_window(window, check)
        if step and step % self._every == 0 and self._kinds:
            self._kept.append((check, values))
            kinds = {kind: names for kind, names in self._kinds.items() if all(name in values for name in names)}
            given = {kind: combined(names, [values[name] for name in names]) for kind, names in kinds.items()}
            self._exchange.give(f"check/{step}", of_rank(self._rank, given))

    def _give_window(self, window: int, check: _Check) -> None:
        open_names = check.sums.keys() - self._compared - self._left_out
        described = {name: str(check.about[name]) for name in open_names}
        digests = self._windows.pop(window)
        given, self._given[window] = entry(digests, items(described, self._size), check.owners, self._before)
        self._exchange.give(f"window/{window}", of_rank(self._rank, given))

    def _concluded(self, name: str, given: Merged) -> None:
        what, _, number = name.partition("/")
        if what == "check":
            self._compare(int(number), given)
            return
        kinds = discovered(given)
        self._channel.write(f"kinds/{number}", json.dumps(kinds, separators=(",", ":")))
        ranks, many = parted(given) if number == "0" else ((), 0)
        first = "kinds" if kinds else "parted" if ranks else "nothing"
        # Said once, by whichever rank is the root; and that there is nothing, not before the second window.
        if (number == "0" and first == "nothing") or self._channel.first("first", first) != first or kinds:
            return
        if ranks and number == "0":
            self._warn(
                f"{many} tensors were equal on {in_words(ranks)} before the first step, and differ on each rank since: "
                "experts, or a gradient that is not reduced; they are not compared"
            )
        elif number == "1":
            self._warn("no two ranks hold equal tensors that change: nothing to compare")

    def _look(self) -> None:
        """Read the messages of the roots."""
        for window, names in list(self._given.items()):
            if text := self._channel.read(f"kinds/{window}"):
                del self._given[window]
                for number, (ranges, same) in enumerate(json.loads(text)):
                    is_in = any(self._rank in range(*each) for each in ranges)
                    if is_in and (here := sorted({one for item in same for one in names.get(item, ())})):
                        self._kinds[f"{window}.{number}"] = here
                self._compared = frozenset(name for kind in self._kinds.values() for name in kind)
        if text := self._channel.read(f"difference/{self._differences}"):
            self._explain(json.loads(text))

    # -- a difference -------------------------------------------------------------------------------------------

    def _compare(self, step: int, given: Merged) -> None:
        differ = differing(given)
        if not differ:
            return
        # Of the most ranks, which show the minority best.
        kind = max(differ, key=lambda one: (len(differ[one]), one))
        odd, right, wrong = minority({rank: int(value, 16) for rank, value in differ[kind].items()})
        ranks = sorted(differ[kind])
        asked = {"kind": kind, "step": step, "odd": odd, "right": right, "wrong": wrong, "ranks": ranks}
        text = json.dumps(asked)
        if self._channel.first(f"difference/{self._differences}", text) == text:
            self._asked = time.monotonic() + _EXPLAIN

    def _explain(self, asked: dict[str, Any]) -> None:
        """Take part in the explanation of a difference, as far as the others have."""
        place = f"difference/{self._differences}"
        check, values = next((one for one in self._kept if one[0].step == asked["step"]), (None, {}))
        names = [name for name in self._kinds.get(asked["kind"], ()) if name in values]
        theirs = self._channel.read(f"{place}/{'right' if self._rank == asked['wrong'] else 'wrong'}")
        if check is not None and self._rank == asked["wrong"]:
            self._answer(f"{place}/wrong", lambda: [values[name] for name in names])
            if theirs:
                self._answer(f"{place}/where", lambda: _where(json.loads(theirs), check))
        elif check is not None and self._rank == asked["right"] and theirs:
            self._answer(f"{place}/right", lambda: _differ(json.loads(theirs), names, values, check))
        if self._asked and ((text := self._channel.read(f"{place}/where")) or time.monotonic() > self._asked):
            self._asked = 0.0
            self._report(asked, json.loads(text) if text else {})
        if text := self._channel.read(f"{place}/end"):
            self._leave_out(asked["kind"], *json.loads(text))

    def _answer(self, key: str, answer: Callable[[], object]) -> None:
        if key not in self._answered:
            self._answered.add(key)
            self._channel.write(key, json.dumps(answer()))

    def _report(self, asked: dict[str, Any], where: dict[str, Any]) -> None:
        names, step = where.get("names", []), asked["step"]
        tied = asked["right"] in asked["odd"]
        drifts = tied and len(names) > max(2, where["many"] // 2)
        if drifts:
            self._warn(
                f"{len(names)} of {where['many']} tensors that {in_words(asked['ranks'])} held alike differ at step "
                f"{step}, {names[0]!r} among them: the program has stopped keeping them equal, or one rank is wrong; "
                "they are not compared any more"
            )
        else:
            values = {"called": where.get("called", "a tensor"), "group": in_words(asked["ranks"]), "step": step}
            values |= {"since": step - self._every, "ranks": asked["odd"], "agree": "", "count": where.get("count", 0)}
            values |= {"box": where.get("box"), "bit": where.get("bit"), "tied": tied}
            sides = ([asked["wrong"]] if tied else asked["odd"], [asked["right"]])
            message = sentence(values, *sides, [repr(one) for one in names[1:]])
            self._warn(message)
            self._export({"tensor": names[0] if names else "", "ranks": asked["odd"], "step": step, "message": message})
        end = [names if 0 < len(names) <= _NAMES and not drifts else None, not drifts]
        self._channel.write(f"difference/{self._differences}/end", json.dumps(end))

    def _export(self, difference: dict[str, Any]) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", os.environ.get("SLURM_JOB_ID", ""))
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                export_difference(self._folder, difference, run)
        except Exception as error:  # noqa: BLE001 - OpenTelemetry's exporters are the program's, the disk is shared
            _log.debug("rankmesh: guard: the difference is not exported: %s", error)

    def _leave_out(self, kind: str, names: Sequence[str] | None, acts: bool) -> None:
        """Go on without the tensors that differ; without the whole kind if it is not known which do."""
        self._differences += 1
        before = self._kinds.pop(kind, [])
        self._left_out.update(before if names is None else names)
        if left := [name for name in before if name not in self._left_out]:
            self._kinds[f"{kind}'"] = left
        self._compared -= self._left_out
        if acts and self._then is not None:
            self._then()

    def _warn(self, message: str) -> None:
        # A program that configures its logging disables the loggers that it does not name.
        _log.disabled = False
        _log.warning("rankmesh: guard: %s", message)


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal; 8-bit numbers, which not all devices compare, count as constant."""
    return tensor.element_size() == 1 or bool((tensor == tensor.flatten()[0]).all())


def _differ(theirs: list[int], names: list[str], values: dict[str, int], check: _Check) -> dict[str, Any]:
    """Return which tensors differ, and the sums of the first one."""
    differ = [name for name, one in zip(names, theirs, strict=True) if values[name] != one]
    if not differ:
        return {}
    sums = check.sums[differ[0]].cpu().numpy().tobytes()
    return {"names": differ, "many": len(names), "sums": base64.b64encode(sums).decode() if len(sums) < 2**22 else ""}


def _where(right: dict[str, Any], check: _Check) -> dict[str, Any]:
    """Return where the first of these tensors differs."""
    if not right:
        return {}
    name, sums = right["names"][0], right.pop("sums")
    shape, dtype, device = check.about[name]
    right["called"] = repr(name) + (" (optimizer state)" if name in check.owners else "")
    if sums:
        theirs = torch.frombuffer(bytearray(base64.b64decode(sums)), dtype=torch.int64)
        byte, change, single = first_difference(check.sums[name].cpu(), theirs, prod(shape) * dtype.itemsize, device)
        right["count"] = int(single)
        right["box"] = [(int(low), int(low) + 1) for low in np.unravel_index(byte // dtype.itemsize, shape)]
        powers = [one.bit_length() - 1 for one in (change, 2**64 - change) if one & (one - 1) == 0]
        right["bit"] = powers[0] % (8 * dtype.itemsize) if single and powers else None
    return right
