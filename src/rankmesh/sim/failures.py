"""Errors of a simulation, which name ranks, groups and call sites, and their messages.

```
RankmeshError
├── DivergenceError(RuntimeError)   the members of a group do not make the same calls; ``kind`` is how
├── HungRank(TimeoutError)          a rank that runs and makes no progress
└── RanksFailed(RuntimeError)       what ``run`` raises: which ranks failed, the first failure is its cause
```

A divergence names the group, and has a line for each rank with its call and its line of code:

```
group tp@pp0,dp1 of ranks [2, 3]: reductions differ
  rank 2  all_reduce tensors float32[4], reduction SUM    train.py:31 in step
  rank 3  all_reduce tensors float32[4], reduction MAX    train.py:33 in step
the members of a group make the same calls in the same order; ...
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rankmesh.errors import RankmeshError, in_words, listed
from rankmesh.sim.channel import Collective, Failure, PendingOperation

__all__ = ["DivergenceError", "HungRank", "RanksFailed", "divergence", "mismatch", "stuck", "unmatched"]

# Lines of one report.
_SHOWN = 16

_REMEDIES = {
    "mismatch": "the members of a group make the same calls in the same order; compare the lines above",
    "deadlock": "every member of a group makes each of its calls, and two groups are entered in one order by all; "
    "compare the lines above",
    "unmatched": "every member of a group makes each of its calls; make it on all members, or on none",
    "refused": "give tensors that have this operation",
    "aborted": "a member was lost, or the job goes on with others; leave the groups",
    "race": "a tensor belongs to the call until wait() returns; wait first, or give a copy",
}


class DivergenceError(RankmeshError, RuntimeError):
    """Ranks that do not make the same calls; raised on each of them.

    ``kind``    ``mismatch`` (different calls), ``deadlock`` (calls that others never make), ``unmatched`` (a call that
                nobody had joined when the ranks ended), ``race`` (a tensor changed in flight), ``refused`` (tensors
                that do not have the operation), ``aborted`` (a group of members of which one was lost), ``foreign``
                (the process group of another rank), ``destroyed``, ``outside`` (a group that this rank is not in)
    ``group``   the group's kind and coordinate, such as ``tp@pp0,dp1``; ``ranks`` are its members
    ``calls``   what each rank called, by rank; ``sites`` where, as ``file:line``
    """

    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    calls: Mapping[int, str] = MappingProxyType({})
    sites: Mapping[int, str] = MappingProxyType({})


class HungRank(RankmeshError, TimeoutError):
    """A rank that ran for too long without a call to torch.distributed; ``hung`` is the rank."""

    hung: int


class RanksFailed(RankmeshError, RuntimeError):
    """Ranks that raised; ``failures`` holds the error of each, in the order in which they failed.

    ``values`` of the others are in ``returned``. The first failure is the cause (``__cause__``).
    """

    failures: Mapping[int, BaseException]
    returned: Mapping[int, object]


def divergence(failure: Failure, rank: int, *, again: bool = False) -> DivergenceError:
    """Return the error of one rank."""
    calls = failure.calls
    head = f"group {failure.channel} has failed before: " if again else ""
    return DivergenceError(
        f"rank {rank}: {head}{_body(failure)}\n{_REMEDIES[failure.kind]}",
        kind=failure.kind,
        group=failure.channel.label,
        ranks=failure.channel.ranks,
        rank=rank,
        calls={other: str(call) for other, call in calls.items()},
        sites={other: call.site.place for other, call in calls.items()},
    )


def _body(failure: Failure) -> str:
    if "\n" in failure.text or not failure.calls:
        return failure.text
    lines = {rank: f"{call}    {call.site}" for rank, call in failure.calls.items()}
    return f"group {failure.channel}: {failure.text}\n{_table(lines)}"


def mismatch(collective: Collective, difference: str, doing: Callable[[int], str]) -> str:
    """Describe calls that differ, while some members have not joined."""
    lines = {call.rank: f"{call}    {call.site}" for call in collective.calls}
    lines |= {rank: doing(rank) for rank in collective.absent}
    return f"group {collective.channel}: {difference}\n{_table(lines)}"


def stuck(operations: Mapping[int, PendingOperation], doing: Callable[[int], str]) -> str:
    """Describe ranks of which none can run: which waits for which."""
    lines = {}
    for rank, pending in operations.items():
        lines[rank] = f"{doing(rank)}, for {_whom(pending.awaited)}"
        lines |= {other: doing(other) for other in pending.awaited if other not in operations and other not in lines}
    hint = _same_members(operations)
    return f"no rank can go on, each waits for a call that another does not make\n{_table(lines)}{hint}"


def _whom(ranks: list[int]) -> str:
    return in_words(ranks) if ranks else "anybody"


def _same_members(operations: Mapping[int, PendingOperation]) -> str:
    """Return a hint on ranks that made one group under two names, as torch's own counters and hashes do."""
    names: dict[tuple[int, ...], set[str]] = {}
    for pending in operations.values():
        if pending.call.operation == "new_group":
            names.setdefault(pending.channel.ranks, set()).add(pending.channel.name)
    for ranks, several in names.items():
        if len(several) > 1:
            called = " and ".join(sorted(map(repr, several))[:4])
            return (
                f"\nthe ranks {listed(ranks)} have one group under the names {called}: "
                "the order in which groups are made differs between ranks"
            )
    return ""


def unmatched(pending: PendingOperation) -> str:
    """Describe a call that was still open when all ranks had ended."""
    return f"a call was never joined by {_whom(pending.awaited)}, and all ranks have ended"


def _table(lines: Mapping[int, str]) -> str:
    shown = [f"  rank {rank}  {lines[rank]}" for rank in sorted(lines)]
    more = [f"  and {len(shown) - _SHOWN} more ranks"] if len(shown) > _SHOWN else []
    return "\n".join(shown[:_SHOWN] + more)
