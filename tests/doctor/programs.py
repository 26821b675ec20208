"""Random programs of 2 to 9 ranks, one of which makes a mistake; a model of blocking collectives; what ranks record.

All ranks make the same calls, step by step; those of the last stage may make more in their own groups. Members meet
under the number of a call, whatever line it is at. A second thread of each rank may make calls on a group of its own,
as one that gathers metrics does, at any speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.doctor.making import call, document, recordings

import rankmesh as rm

MESHES = [
    *({"tp": 2, "dp": 2}, {"tp": 2, "dp": 3}, {"tp": 4, "dp": 2}, {"tp": 3, "dp": 3}, {"dp": 4}, {"tp": 2}),
    *({"tp": 2, "dp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"tp": 1, "dp": 2, "pp": 2}),
]
LARGER = [
    *({"dp": 4}, {"tp": 2, "dp": 2}, {"dp": 6}, {"tp": 2, "dp": 3}),
    *({"dp": 8}, {"tp": 2, "dp": 4}, {"tp": 4, "dp": 2}),
]
OPERATIONS = ("all_reduce", "barrier", "all_gather")
MAIN, METRICS = "main", "metrics"
# Seconds of a call, and those after which it fails; calls that a rank makes after one that failed.
SECONDS, LIMIT, MORE = 0.01, 5, 3


@dataclass(frozen=True)
class Made:
    """A call of a program: the kind of group, the operation, its size, and the line of the program, 0 for none."""

    kind: str
    operation: str = "all_reduce"
    size: int = 4
    line: int = 0


def mistaken(calls, mistake, place, chosen, kinds):
    """These calls with one mistake at a place."""
    calls, one = list(calls), calls[place]
    if mistake in ("skip", "missing"):
        del calls[place]
    elif mistake == "swap":
        calls[place : place + 2] = reversed(calls[place : place + 2])
    elif mistake in ("extra", "repeated"):
        calls.insert(place, replace(one, line=40 if mistake == "extra" else one.line))
    elif mistake == "size":
        calls[place] = replace(one, size=one.size + 1)
    elif mistake == "different":
        calls[place] = replace(one, operation=chosen.choice([o for o in OPERATIONS if o != one.operation]), line=41)
    else:
        calls[place] = replace(one, kind=chosen.choice([kind for kind in kinds if kind != one.kind]), line=42)
    return calls


def sized(chosen, mistake, *, goes_on=False):
    """1 to 5 steps of 1 to 4 reductions of two sizes, without lines; the last stage may make one or two more."""
    mesh = rm.Mesh(**chosen.choice(MESHES))
    kinds = [*(axis for axis, size in mesh.axes.items() if size > 1), "world"]
    inner = [kind for kind in kinds if kind not in ("world", "pp")]
    step = [Made(chosen.choice(kinds), size=chosen.choice([4, 4, 8])) for _ in range(chosen.randint(1, 4))]
    stages, steps = mesh.axes.get("pp", 1), chosen.randint(1, 5)
    more = [Made(chosen.choice(inner), size=16) for _ in range(chosen.randint(0, 2) if stages > 1 else 0)]
    todo = {
        (rank, MAIN): [*step, *(more if stages > 1 and mesh.coordinate(rank)["pp"] == stages - 1 else [])] * steps
        for rank in range(mesh.size)
    }
    culprit = chosen.randrange(mesh.size)
    calls = todo[culprit, MAIN]
    place = chosen.randrange(len(calls) - (mistake == "swap" and len(calls) > 1))
    todo[culprit, MAIN] = mistaken(calls, mistake, place, chosen, kinds)
    return Job(mesh, todo, culprit, chosen, goes_on=goes_on)


def planted(seed, mistake):
    """Equal calls on 4 to 8 ranks, of one or two threads, with lines or without; all ranks meet at the end."""
    chosen = Random(f"{seed} {mistake}")  # noqa: S311  - programs, no secrets
    mesh = rm.Mesh(**chosen.choice(LARGER))
    kinds = [*mesh.axes, "world"]
    step = [Made(chosen.choice(kinds), chosen.choice(OPERATIONS), line=10 + n) for n in range(chosen.randint(2, 4))]
    calls = [*step * chosen.randint(2, 5), Made("world", "barrier", line=30), Made("world", line=31)]
    todo = {(rank, MAIN): calls for rank in range(mesh.size)}
    if chosen.random() < 0.5:
        todo |= {(rank, METRICS): [Made(METRICS, "all_gather", line=50)] * 40 for rank in range(mesh.size)}
    culprit = chosen.randrange(mesh.size)
    todo[culprit, MAIN] = mistaken(calls, mistake, chosen.randrange(len(calls) - 1), chosen, kinds)
    return Job(mesh, todo, culprit, chosen, ends=chosen.random() < 0.5, has_lines=chosen.random() < 0.9)


class Job:
    """A job run until each rank has ended or waits, with a mistake of the rank ``culprit``; ``hangs``: ranks wait.

    ``todo`` are calls by rank and thread. With ``goes_on`` calls fail after the limit, for all that are inside, and
    their ranks make a few others. ``ends`` of None: no watch has seen where the ranks are.
    """

    def __init__(self, mesh, todo, culprit, chosen, *, goes_on=False, ends=None, has_lines=False):
        self.mesh, self.culprit, self.random = mesh, culprit, chosen
        self.todo = {each: [*calls] for each, calls in todo.items()}
        self.ends, self.has_lines = ends, has_lines
        self.kinds = ["world", *mesh.axes, *([METRICS] if (0, METRICS) in todo else [])]
        self.made = {rank: [] for rank in range(mesh.size)}  # (thread, call, number, seconds), as they were made
        self.place, self.clock = dict.fromkeys(todo, 0), dict.fromkeys(todo, 0.0)
        self.inside, self.arrived, self.broken = {}, {}, set()
        while self._enter() or (goes_on and self._fail()):
            pass
        self.hangs = any(thread == MAIN for _, thread in self.inside) or bool(self.broken)

    def members(self, kind, rank):
        """The group of a kind of a rank."""
        every = kind in ("world", METRICS)
        return tuple(range(self.mesh.size)) if every else tuple(self.mesh.groups(kind).of(rank))

    def _enter(self):
        ready = [each for each in self.todo if each not in self.inside and self.place[each] < len(self.todo[each])]
        # The thread of metrics goes on at its own pace, and is somewhere when the job hangs.
        if not ready or (all(thread == METRICS for _, thread in ready) and self.random.random() < 0.05):
            return False
        actor = self.random.choice(ready)
        rank, thread = actor
        made = self.todo[actor][self.place[actor]]
        number = 1 + sum(each.kind == made.kind for _, each, *_ in self.made[rank])
        self.made[rank].append((thread, made, number, self.clock[actor]))
        self.place[actor] += 1
        group = made.kind, self.members(made.kind, rank)
        if group in self.broken:
            self.clock[actor] += SECONDS
            return True
        self.inside[actor] = *group, number
        arrived = self.arrived.setdefault(self.inside[actor], {})
        arrived[actor] = made.operation, made.size
        if len(arrived) == len(group[1]) and len(set(arrived.values())) == 1:
            self._leave(arrived, max(map(self.clock.get, arrived)) + SECONDS)
        return True

    def _leave(self, actors, now):
        for actor in actors:
            self.clock[actor] = now
            del self.inside[actor]

    def _fail(self):
        """End the call that is the first to last too long; its group's later calls fail at once."""
        if not self.inside:
            return False
        first = min(self.inside, key=lambda actor: self.clock[actor])
        key = self.inside[first]
        actors = [actor for actor, other in self.inside.items() if other == key]
        self._leave(actors, self.clock[first] + LIMIT + SECONDS)
        for actor in actors:
            groups = [(made.kind, self.members(made.kind, actor[0])) for _, made, *_ in self.made[actor[0]][:-1]]
            if not self.broken.intersection(groups):
                del self.todo[actor][self.place[actor] + MORE :]
        self.broken.add(key[:2])
        return True

    def recorded(self, *, live=True, stacks=True):
        """The recordings: by a watch while ranks wait, or by torch after the calls have timed out.

        Without ``stacks`` torch numbers the threads.
        """
        documents = {}
        for rank, made in self.made.items():
            members = {kind: self.members(kind, rank) for kind in self.kinds}
            names = {kind: (f"{kind}/{ranks[0]}", f"{kind}@{ranks[0]}") for kind, ranks in members.items()}
            waits = {(kind, number) for (r, _), (kind, _, number) in self.inside.items() if r == rank and live}
            has_frames = stacks and self.has_lines
            entries = [
                call(
                    names[each.kind],
                    number,
                    each.operation,
                    (each.size,),
                    backend="gloo",
                    done=(each.kind, number) not in waits,
                    frames=self._frames(thread, each.line) if has_frames else [],
                    time_created_ns=10**18 + int(seconds * 10**9),
                    timeout_ms=LIMIT * 1000,
                    **({} if has_frames or self.ends is None else {"thread_id": thread}),
                )
                for thread, each, number, seconds in made
            ]
            about = {"rank": rank, "world_size": self.mesh.size, **self._about(rank, names)} if live else {}
            documents[rank] = document(entries, {names[kind]: ranks for kind, ranks in members.items()}, **about)
        return recordings(documents)

    @staticmethod
    def _frames(thread, line):
        frames = [("torch/distributed/distributed_c10d.py", 3245, "all_reduce"), ("train.py", line, "step")]
        file = "/usr/lib/python3.11/threading.py"
        metrics = [(file, 1, name) for name in ("run", "_bootstrap_inner", "_bootstrap")]
        frames += metrics if thread == METRICS else [("train.py", 99, "<module>")]
        return [{"filename": file, "line": line, "name": name} for file, line, name in frames]

    def _about(self, rank, names):
        if self.ends is None:
            return {"ended": (rank, MAIN) not in self.inside}
        if (rank, MAIN) in self.inside:
            made = next(each for thread, each, *_ in reversed(self.made[rank]) if thread == MAIN)
            site = f"train.py:{made.line} in step"
            return {"in_call": {"operation": made.operation, "group": names[made.kind][0], "site": site}}
        return {"ended": True} if self.ends else {"in_call": {"site": "train.py:90 in after", "running": True}}
