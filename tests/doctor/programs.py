"""Programs of ranks and groups, run by a model of blocking collectives until nothing moves; and what they record.

All ranks make the same calls, step by step; those of the last stage may make more of them in their own groups. One rank
makes a mistake: it leaves out a call, makes two in the other order, or makes one with another size.
"""

from dataclasses import dataclass

from tests.doctor.making import call, document, recordings

import rankmesh as rm

# Seconds of a call, and those after which it fails; calls that a rank makes after one that failed.
SECONDS, LIMIT, MORE = 0.01, 5, 3


@dataclass(frozen=True)
class Program:
    """A layout, the calls of a step as (kind, size), those that the last stage adds, and how often a step is made."""

    mesh: rm.Mesh
    step: tuple[tuple[str, int], ...]
    last: tuple[tuple[str, int], ...]
    steps: int

    @property
    def kinds(self):
        """The kinds of groups."""
        return "world", *self.mesh.axes

    def members(self, kind, rank):
        """The group of a kind of a rank."""
        return tuple(range(self.mesh.size)) if kind == "world" else tuple(self.mesh.groups(kind).of(rank))

    def calls(self, rank):
        """What a rank calls, in order."""
        stages = self.mesh.axes.get("pp", 1)
        is_last = stages > 1 and self.mesh.coordinate(rank)["pp"] == stages - 1
        return [*self.step, *(self.last if is_last else ())] * self.steps


def mistaken(calls, mistake, place):
    """These calls with one mistake."""
    calls = list(calls)
    if mistake == "skip":
        del calls[place]
    elif mistake == "swap":
        calls[place : place + 2] = reversed(calls[place : place + 2])
    else:
        calls[place] = calls[place][0], calls[place][1] + 1
    return calls


class Run:
    """A run in which one rank makes a mistake, until each rank has ended or waits.

    ``made`` are the calls of each rank as (kind, number, size, seconds), ``blocked`` the ranks that do not leave their
    last. With ``goes_on`` calls fail after the limit, for all that are inside, and their ranks make a few others.
    """

    def __init__(self, program, culprit, mistake, place, *, goes_on=False):
        self.program = program
        self.todo = {rank: program.calls(rank) for rank in range(program.mesh.size)}
        self.todo[culprit] = mistaken(self.todo[culprit], mistake, place)
        self.made = {rank: [] for rank in self.todo}
        self.inside, self.arrived, self.broken = {}, {}, set()
        self.clock = dict.fromkeys(self.todo, 0.0)
        while self._enter() or (goes_on and self._fail()):
            pass
        self.blocked = frozenset(self.inside) | frozenset(
            rank for rank in self.todo if any(key in self.broken for key in self._keys(rank))
        )

    def _keys(self, rank):
        return [(self.program.members(kind, rank), kind) for kind, *_ in self.made[rank]]

    def _enter(self):
        moved = False
        for rank, calls in self.todo.items():
            if rank in self.inside or len(self.made[rank]) == len(calls):
                continue
            (kind, size), moved = calls[len(self.made[rank])], True
            number = 1 + sum(made[0] == kind for made in self.made[rank])
            self.made[rank].append((kind, number, size, self.clock[rank]))
            group = self.program.members(kind, rank), kind
            if group in self.broken:
                self.clock[rank] += SECONDS
                continue
            self.inside[rank] = *group, number
            arrived = self.arrived.setdefault(self.inside[rank], {})
            arrived[rank] = size
            if len(arrived) == len(group[0]) and len(set(arrived.values())) == 1:
                self._leave(group[0], max(self.clock[member] for member in group[0]) + SECONDS)
        return moved

    def _leave(self, ranks, now):
        for rank in ranks:
            self.clock[rank] = now
            del self.inside[rank]

    def _fail(self):
        """End the call that is the first to last too long; its group's later calls fail at once."""
        if not self.inside:
            return False
        first = min(self.inside, key=lambda rank: self.clock[rank])
        key = self.inside[first]
        ranks = [rank for rank, other in self.inside.items() if other == key]
        self._leave(ranks, self.clock[first] + LIMIT + SECONDS)
        for rank in ranks:
            if not any(group in self.broken for group in self._keys(rank)[:-1]):
                del self.todo[rank][len(self.made[rank]) + MORE :]
        self.broken.add(key[:2])
        return True

    def recorded(self, *, live):
        """The recordings of this run: by a watch while ranks wait, or by torch after the calls have timed out."""
        documents = {}
        for rank, made in self.made.items():
            members = {kind: self.program.members(kind, rank) for kind in self.program.kinds}
            names = {kind: (f"{kind}/{ranks[0]}", f"{kind}@{ranks[0]}") for kind, ranks in members.items()}
            entries = [
                call(
                    names[kind],
                    number,
                    sizes=(size,),
                    backend="gloo",
                    done=not (live and rank in self.inside and place == len(made) - 1),
                    time_created_ns=10**18 + int(seconds * 10**9),
                    timeout_ms=LIMIT * 1000,
                )
                for place, (kind, number, size, seconds) in enumerate(made)
            ]
            about = {"rank": rank, "world_size": len(self.made), "ended": rank not in self.inside} if live else {}
            documents[rank] = document(entries, {names[kind]: ranks for kind, ranks in members.items()}, **about)
        return recordings(documents)
