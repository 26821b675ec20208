"""Faults of processes at moments that are named, or drawn by a seed; and what those that live leave behind."""

import gc
import importlib
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FunctionType

from tests.limits import until
from tests.sockets import connected, kept, named

# How many seeds a sweep has: in make test-all, in make test-sweeps, and with SWEEP=all.
SEEDS = {"": 1, "1": 10, "all": 100}[os.environ.get("RANKMESH_TEST_SWEEP", "")]
HOST = [4, 5, 6, 7]

# Where a fault may be, besides any function: at its n-th call.
PLACES = {
    "gather": "rankmesh.rendezvous:gather",  # there is no job yet
    "enter": "rankmesh.survival.world:EpochWorld.enter",
    "leave": "rankmesh.survival.world:EpochWorld.close",
    "agree": "rankmesh.survival.rounds:Rounds.agree",
    "adopt": "rankmesh.survival.driver:Driver.adopt",
    "announce": "rankmesh.survival.driver:Driver.announce",
    "hold": "rankmesh.survival.member_state:MemberState.hold",
    "follow": "rankmesh.survival.member_state:MemberState.follow",
    "commit": "rankmesh.survival.member_state:MemberState.commit",
    "take": "rankmesh.survival.redundancy:Snapshot.copy",
    "restore": "rankmesh.survival.state:restore",
    "client": "rankmesh.survival.peers:Peers.client",
    "returned": "rankmesh.survival.session:Session._finished",
}
MODULES = """
    survival.session survival.driver survival.member_state survival.machine survival.rounds survival.agreement
    survival.world survival.peers survival.state survival.redundancy survival.heartbeat survival.listener survival.epoch
    rendezvous.round runtime.connection runtime.world backend.world_group backend.cut
    transfer.live.run transfer.live.exchange
"""


def points():
    """The names of all functions of these modules, with those of their classes."""
    found = []
    for name in MODULES.split():
        module = importlib.import_module(f"rankmesh.{name}")
        for owner in [module, *vars(module).values()]:
            if getattr(owner, "__module__", module.__name__) == module.__name__ and (
                owner is module or isinstance(owner, type)
            ):
                of = "" if owner is module else f"{owner.__name__}."
                found += [
                    f"{module.__name__}:{of}{one.__name__}"
                    for one in vars(owner).values()
                    if isinstance(one, FunctionType) and one.__module__ == module.__name__
                ]
    return found


class Faults:
    """The fault of this process, at the n-th call of a function, in a step of the program, or after some seconds.

    Calls are seen as a profiler sees them, so nothing is patched; those count that follow the return of ``since``.
    ``fault-N`` says that the fault of member N has come, ``flips`` that the next step is to give a wrong number.
    """

    def __init__(self, member, faults, folder, *, since=None):
        self.folder, self.member, self.flips = Path(folder), member, False
        self.mine = [fault for fault in faults if fault["member"] == member]
        self._counts, self._due = Counter(), {}
        self._since = None if since is None else since.__code__
        self._codes = {}
        for fault in self.mine:
            if fault["at"] != "step":  # a time is counted since the job has begun, which needs every member
                at = PLACES.get("enter" if fault["at"] == "time" else fault["at"], fault["at"])
                self._codes.setdefault(pkgutil.resolve_name(at).__code__, []).append(fault)
        if self._codes:
            threading.setprofile(self._called)
            sys.setprofile(self._called)

    def _called(self, frame, event, _):
        """See each call of a function, and each return from one."""
        code = frame.f_code
        if code is self._since and event == "return":
            self._since = None
        elif code in self._codes and self._since is None:
            if event == "return" and (fault := self._due.pop(frame, None)):
                self.die(fault)
            elif event == "call":
                self._counts[code] += 1
                for fault in self._codes[code]:
                    self._called_now(fault, frame, self._counts[code])

    def _called_now(self, fault, frame, times):
        if fault["at"] == "time" and times == 1:
            timer = threading.Timer(fault["n"], self.die, (fault,))
            timer.daemon = True
            timer.start()
        elif times == fault["n"] and fault.get("after"):
            self._due[frame] = fault
        elif times == fault["n"]:
            self.die(fault)

    def step(self, step):
        """In a step of the program: the fault comes there at the latest."""
        for fault in self.mine:
            if step == (fault["n"] if fault["at"] == "step" else fault.get("latest")):
                self.die(fault)

    def die(self, fault):
        """Have the fault, if none has come yet."""
        if fault not in self.mine:
            return
        self.mine, how = [], fault.get("how", "SIGKILL")
        (self.folder / f"fault-{self.member}").write_text(how, encoding="utf-8")
        if how == "flip":
            self.flips = True
        elif how == "raise":
            raise ValueError(fault.get("error", f"a bug at {fault['at']} {fault['n']}"))
        elif how == "sleep":
            time.sleep(fault["seconds"])
        elif how == "hang":  # until the others have done without it
            until(lambda: list(self.folder.glob("trained-*")), 150)
        elif how == "cut":
            with connected(apart_from=fault["launcher"]) as found:
                if found:
                    with suppress(OSError):
                        random.Random(fault["n"]).choice(found).shutdown(socket.SHUT_RDWR)  # noqa: S311  - no secret
        elif "again" in fault:
            subprocess.Popen(["sh", "-c", f"sleep {fault['again']}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            (self.folder / f"dead-{self.member}").write_text(f"{os.getpid()} {time.time()}", encoding="utf-8")
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(0.5)  # a stopped process that goes on


def moment(pick, member, steps):
    """A moment of a member's life, by chance."""
    how = "SIGSTOP" if pick.random() < 0.2 else "SIGKILL"
    if pick.random() < 0.3:
        return {"member": member, "at": "time", "n": pick.uniform(0.0, 1.5), "how": how}
    if pick.random() < 0.4:
        return {"member": member, "at": "step", "n": pick.randrange(steps), "how": how}
    most = steps if (place := pick.choice(sorted(PLACES.keys() - {"gather"}))) in ("commit", "take") else 2
    return {"member": member, "at": place, "n": pick.randint(1, most), "how": how, "after": pick.random() < 0.3}


def moments(seed, steps, members=20):
    """Who dies when: one or two members, or a whole host of four."""
    pick = random.Random(seed)  # noqa: S311  - moments, no secrets
    if pick.random() < 0.1:
        first = moment(pick, 0, steps)
        return [{**first, "member": member} for member in HOST]
    return [moment(pick, member, steps) for member in pick.sample([0, *range(members)], k=pick.choice([1, 1, 2]))]


def left_behind(folder, before):
    """What this process has more than ``before``, after the stopped members were ended.

    ``left``: how many descriptors and threads; ``still``: their names, where there are any.
    """
    for path in Path(folder).glob("dead-*"):  # those that are only stopped would outlive the test
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text(encoding="utf-8").split()[0]), signal.SIGKILL)
    gc.collect()
    end = time.monotonic() + 15
    while max(left := _left(before)) > 0 and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()  # of a call that has ended meanwhile
    return {"left": left, "still": named() if max(left) > 0 else []}


def _left(before):
    """Descriptors and threads that are left, but for those of a group whose connections gloo still waits for."""
    waiting = sum(thread.name == "rankmesh-gloo" for thread in threading.enumerate())
    opened, threads = (now - then for now, then in zip(kept(), before, strict=True))
    return [0 if waiting else opened, threads - 4 * waiting]
