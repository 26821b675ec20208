"""What a divergence looks like in words: the group, and a line for each rank with its call and its line of code.

```
group tp@pp0,dp1 of ranks [2, 3]: reductions differ
  rank 2  all_reduce tensors float32[4], reduction SUM    train.py:31 in step
  rank 3  all_reduce tensors float32[4], reduction MAX    train.py:33 in step
the members of a group make the same calls in the same order; ...
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankmesh.errors import in_words, listed
from rankmesh.sim.failures import DivergenceError
from rankmesh.sim.rooms import Collective, Complaint, Ticket

__all__ = ["divergence", "mismatch", "stuck", "unmatched"]

# Lines of one report.
_SHOWN = 16

_REMEDIES = {
    "mismatch": "the members of a group make the same calls in the same order; compare the lines above",
    "deadlock": "every member of a group makes each of its calls, and two groups are entered in one order by all; "
    "compare the lines above",
    "unmatched": "every member of a group makes each of its calls; make it on all members, or on none",
    "refused": "give tensors that have this operation",
    "race": "a tensor belongs to the call until wait() returns; wait first, or give a copy",
}


def divergence(complaint: Complaint, rank: int, *, again: bool = False) -> DivergenceError:
    """The error of one rank."""
    calls = complaint.calls
    head = f"group {complaint.room} has failed before: " if again else ""
    return DivergenceError(
        f"rank {rank}: {head}{_body(complaint)}\n{_REMEDIES[complaint.kind]}",
        kind=complaint.kind,
        group=complaint.room.label,
        ranks=complaint.room.ranks,
        rank=rank,
        calls={other: str(call) for other, call in calls.items()},
        sites={other: call.site.place for other, call in calls.items()},
    )


def _body(complaint: Complaint) -> str:
    if "\n" in complaint.text:
        return complaint.text
    lines = {rank: f"{call}    {call.site}" for rank, call in complaint.calls.items()}
    return f"group {complaint.room}: {complaint.text}\n{_table(lines)}"


def mismatch(collective: Collective, difference: str, doing: Callable[[int], str]) -> str:
    """Calls that differ, while some members have not come."""
    lines = {call.rank: f"{call}    {call.site}" for call in collective.calls}
    lines |= {rank: doing(rank) for rank in collective.absent}
    return f"group {collective.room}: {difference}\n{_table(lines)}"


def stuck(tickets: Mapping[int, Ticket], doing: Callable[[int], str]) -> str:
    """Nobody can run: who waits for whom."""
    lines = {}
    for rank, ticket in tickets.items():
        lines[rank] = f"{doing(rank)}{_for_whom(ticket.awaited)}"
        lines |= {other: doing(other) for other in ticket.awaited if other not in tickets and other not in lines}
    hint = _same_members(tickets)
    return f"no rank can go on, each waits for a call that another does not make\n{_table(lines)}{hint}"


def _for_whom(ranks: list[int]) -> str:
    if not ranks:
        return ", for anybody"
    return f", for {in_words(ranks)}"


def _same_members(tickets: Mapping[int, Ticket]) -> str:
    """Ranks that made one group under two names, as torch's own counters and hashes do."""
    names: dict[tuple[int, ...], set[str]] = {}
    for ticket in tickets.values():
        if ticket.call.operation == "new_group":
            names.setdefault(ticket.room.ranks, set()).add(ticket.room.name)
    for ranks, several in names.items():
        if len(several) > 1:
            called = " and ".join(sorted(map(repr, several))[:4])
            return (
                f"\nthe ranks {listed(ranks)} have one group under the names {called}: "
                "the order in which groups are made differs between ranks"
            )
    return ""


def unmatched(ticket: Ticket) -> str:
    """A call that was still open when all ranks had ended."""
    return f"a call was never joined by {_for_whom(ticket.awaited).removeprefix(', for ')}, and all ranks have ended"


def _table(lines: Mapping[int, str]) -> str:
    shown = [f"  rank {rank}  {lines[rank]}" for rank in sorted(lines)]
    more = [f"  and {len(shown) - _SHOWN} more ranks"] if len(shown) > _SHOWN else []
    return "\n".join(shown[:_SHOWN] + more)
