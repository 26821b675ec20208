"""Every call of every rank of a simulation, with the bytes that it gives."""

from collections import Counter
from contextlib import contextmanager

from rankmesh.sim.group import SimulatedGroup

COLLECTIVE = {
    "all_reduce": "all-reduce",
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "send": "send/recv",
}


@contextmanager
def counted(monkeypatch):
    """A counter of (rank, members, collective, bytes), and the set of ranks whose calls count now."""
    calls, counting = Counter(), set()
    original = SimulatedGroup._call

    def call(self, operation, given, *rest, **more):
        if self.owner in counting and self.size() > 1 and operation in COLLECTIVE:
            size = sum(tensor.numel() * tensor.element_size() for tensor in given)
            calls[self.owner, self.channel.ranks, COLLECTIVE[operation], size] += 1
        return original(self, operation, given, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedGroup, "_call", call)
        yield calls, counting


def predicted(plan, traffic_of):
    """The same counter from the traffic of each rank's stage."""
    calls = Counter()
    for rank in range(plan.world_size):
        local = plan.of(rank)
        for name, messages in traffic_of(rank).items():
            for message in messages if name in local else ():
                name_of = "send/recv" if message.collective == "ring" else message.collective
                calls[rank, local[name].ranks, name_of, message.bytes] += message.times
    return calls


def totals(plan, calls):
    """Bytes in the whole world by the kinds that have these members, and the collective."""
    found = Counter()
    for (rank, members, collective, size), times in calls.items():
        kinds = frozenset(name for name, local in plan.of(rank).items() if local.ranks == members)
        found[kinds, collective] += size * times
    return found
