"""Deaths of processes at moments that are named, or drawn by a seed; and what those that live leave behind."""

import gc
import os
import pkgutil
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.limits import until
from tests.sockets import kept, named

from rankmesh.survival import peers, rounds, session, state, world

# How many seeds a sweep has: in make test-all, in make test-sweeps, and with SWEEP=all.
SEEDS = {"": 1, "1": 10, "all": 100}[os.environ.get("RANKMESH_TEST_SWEEP", "")]
HOST = [4, 5, 6, 7]

# Where a member may die: what is called then, by the name that a test gives; in "gather" there is no job yet.
PLACES = {
    "gather": (peers, "gather"),
    "enter": (world.EpochWorld, "enter"),
    "leave": (world.EpochWorld, "close"),
    "agree": (rounds.Rounds, "agree"),
    "adopt": (session.Session, "_adopt"),
    "announce": (session.Session, "_announce"),
    "hold": (session.Session, "hold"),
    "follow": (session.Session, "_follow"),
    "commit": (session.Session, "commit"),
    "take": (state.EpochState, "_take"),
    "restore": (session, "restore"),
    "client": (peers.Peers, "client"),
    "returned": (session.Session, "_finished"),
}


def place(at):
    """The owner and the name of what ``at`` names: a module, and a qualified name in it."""
    module, _, qualified = at.partition(":")
    *owner, name = qualified.split(".")
    return pkgutil.resolve_name(f"{module}:{'.'.join(owner)}"), name


class Deaths:
    """Kills this process at the n-th call of what a place names, before or after it."""

    def __init__(self, member, deaths, folder):
        self.folder, self.member = Path(folder), member
        self.mine = [death for death in deaths if death["member"] == member]
        for death in self.mine:
            if death["at"] in PLACES:
                self._hook(*PLACES[death["at"]], death)
            elif ":" in death["at"]:  # of a module, by its qualified name
                self._hook(*place(death["at"]), death)
            elif death["at"] == "time":  # since the job has begun, which needs every member
                self._hook(world.EpochWorld, "enter", {**death, "n": 1, "seconds": death["n"]})

    def _hook(self, owner, name, death):
        call, times = getattr(owner, name), [0]

        def hooked(*args, **kwargs):
            times[0] += 1
            now = times[0] == death["n"]
            if now and death["at"] == "time":
                timer = threading.Timer(death["seconds"], self.die, (death,))
                timer.daemon = True
                timer.start()
                return call(*args, **kwargs)
            if now and not death.get("after"):
                self.die(death)
            result = call(*args, **kwargs)
            if now:
                self.die(death)
            return result

        setattr(owner, name, hooked)

    def step(self, step):
        """In a step of the program."""
        for death in self.mine:
            if death["at"] == "step" and death["n"] == step:
                self.mine.remove(death)
                self.die(death)

    def die(self, death):
        """Die now, as the test says."""
        if death.get("how") == "raise":
            raise ValueError(f"a bug at {death['at']} {death['n']}")
        if death.get("how") == "sleep":
            time.sleep(death["seconds"])
            return
        if death.get("how") == "hang":  # until the others have done without it
            until(lambda: list(self.folder.glob("trained-*")), 150)
            return
        if "again" in death:
            subprocess.Popen(["sh", "-c", f"sleep {death['again']}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        (self.folder / f"dead-{self.member}").write_text(f"{os.getpid()} {time.time()}", encoding="utf-8")
        os.kill(os.getpid(), getattr(signal, death.get("how", "SIGKILL")))
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
