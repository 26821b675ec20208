"""Random programs of 4 to 8 ranks in which one rank makes a call more, less or another one, of the size of all others.

Ranks are run by a model of blocking collectives: members meet under the number of a call, whatever line it is at. A
second thread of each rank may make calls on a group of its own, as one that gathers metrics does, at any speed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.doctor.making import call, document, recordings

import rankmesh as rm

MESHES = (
    {"dp": 4},
    {"tp": 2, "dp": 2},
    {"dp": 6},
    {"tp": 2, "dp": 3},
    {"dp": 8},
    {"tp": 2, "dp": 4},
    {"tp": 4, "dp": 2},
)
OPERATIONS = ("all_reduce", "barrier", "all_gather")
MAIN, METRICS = "main", "metrics"


@dataclass(frozen=True)
class Made:
    """A call of a program: the kind of group, the operation, and the line of the program."""

    kind: str
    operation: str
    line: int


class Planted:
    """A job with a mistake of the rank ``culprit``, run until nothing moves; ``hangs``: ranks wait then."""

    def __init__(self, seed: int, mistake: str) -> None:
        chosen = random.Random(f"{seed} {mistake}")  # noqa: S311  - programs, no secrets
        self.mesh = rm.Mesh(**chosen.choice(MESHES))
        self.culprit, self.mistake = chosen.randrange(self.mesh.size), mistake
        self.has_metrics, self.ends, self.lines = chosen.random() < 0.5, chosen.random() < 0.5, chosen.random() < 0.9
        kinds = [*self.mesh.axes, "world"]
        step = [Made(chosen.choice(kinds), chosen.choice(OPERATIONS), 10 + n) for n in range(chosen.randint(2, 4))]
        calls = [*step * chosen.randint(2, 5), Made("world", "barrier", 30), Made("world", "all_reduce", 31)]
        self.todo = {(rank, MAIN): list(calls) for rank in range(self.mesh.size)}
        if self.has_metrics:
            for rank in range(self.mesh.size):
                self.todo[rank, METRICS] = [Made(METRICS, "all_gather", 50)] * 40
        self._plant(self.todo[self.culprit, MAIN], chosen)
        self.random = chosen
        self.made = {rank: [] for rank in range(self.mesh.size)}  # (thread, call, number), as they were made
        self.place, self.inside, self.arrived = dict.fromkeys(self.todo, 0), {}, {}
        self._run()
        self.hangs = any(thread == MAIN for _, thread in self.inside)

    def _plant(self, calls: list[Made], chosen: random.Random) -> None:
        place = chosen.randrange(len(calls) - 1)
        one = calls[place]
        if self.mistake in ("extra", "repeated"):
            calls.insert(place, Made(one.kind, one.operation, 40 if self.mistake == "extra" else one.line))
        elif self.mistake == "missing":
            del calls[place]
        elif self.mistake == "different":
            others = [operation for operation in OPERATIONS if operation != one.operation]
            calls[place] = Made(one.kind, chosen.choice(others), 41)
        else:
            kinds = [kind for kind in (*self.mesh.axes, "world") if kind != one.kind]
            calls[place] = Made(chosen.choice(kinds), one.operation, 42)

    def members(self, kind: str, rank: int) -> tuple[int, ...]:
        """The group of a kind of a rank."""
        every = kind in ("world", METRICS)
        return tuple(range(self.mesh.size)) if every else tuple(self.mesh.groups(kind).of(rank))

    def _run(self) -> None:
        while actors := [a for a in self.todo if a not in self.inside and self.place[a] < len(self.todo[a])]:
            # The thread of metrics goes on at its own pace, and is somewhere when the job hangs.
            if all(thread == METRICS for _, thread in actors) and self.random.random() < 0.05:
                break
            self._enter(self.random.choice(actors))

    def _enter(self, actor: tuple[int, str]) -> None:
        rank, thread = actor
        made = self.todo[actor][self.place[actor]]
        number = 1 + sum(each.kind == made.kind for _, each, _ in self.made[rank])
        self.made[rank].append((thread, made, number))
        self.place[actor] += 1
        key = made.kind, self.members(made.kind, rank), number
        self.inside[actor] = key
        arrived = self.arrived.setdefault(key, {})
        arrived[actor] = made.operation
        if len(arrived) == len(key[1]) and len(set(arrived.values())) == 1:
            for each in arrived:
                del self.inside[each]

    def recorded(self, *, stacks: bool = True):
        """The recordings of this job, as a watch writes them; without ``stacks`` torch numbers the threads."""
        documents = {}
        for rank, made in self.made.items():
            kinds = [*self.mesh.axes, "world", *([METRICS] if self.has_metrics else [])]
            members = {kind: self.members(kind, rank) for kind in kinds}
            names = {kind: (f"{kind}/{ranks[0]}", f"{kind}@{ranks[0]}") for kind, ranks in members.items()}
            open_calls = {(kind, number) for (r, _), (kind, _, number) in self.inside.items() if r == rank}
            entries = [
                call(
                    names[each.kind],
                    number,
                    each.operation,
                    backend="gloo",
                    done=(each.kind, number) not in open_calls,
                    frames=self._frames(thread, each.line) if self.lines and stacks else [],
                    **({} if stacks and self.lines else {"thread_id": thread}),
                )
                for thread, each, number in made
            ]
            about = {"rank": rank, "world_size": self.mesh.size, **self._about(rank, names)}
            documents[rank] = document(entries, {names[kind]: ranks for kind, ranks in members.items()}, **about)
        return recordings(documents)

    @staticmethod
    def _frames(thread: str, line: int) -> list[dict[str, object]]:
        frames = [("torch/distributed/distributed_c10d.py", 3245, "all_reduce"), ("train.py", line, "step")]
        outer = [("train.py", 99, "<module>")]
        if thread == METRICS:
            outer = [
                ("/usr/lib/python3.11/threading.py", 1, name) for name in ("run", "_bootstrap_inner", "_bootstrap")
            ]
        return [{"filename": file, "line": line, "name": name} for file, line, name in (*frames, *outer)]

    def _about(self, rank: int, names) -> dict[str, object]:
        if (rank, MAIN) in self.inside:
            kind = self.inside[rank, MAIN][0]
            _, made, _ = next(each for each in reversed(self.made[rank]) if each[0] == MAIN)
            site = f"train.py:{made.line} in step"
            return {"in_call": {"operation": made.operation, "group": names[kind][0], "site": site}}
        return {"ended": True} if self.ends else {"in_call": {"site": "train.py:90 in after", "running": True}}
