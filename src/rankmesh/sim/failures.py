"""What goes wrong in a simulation, as errors that name ranks, groups and call sites.

```
RankmeshError
├── DivergenceError(RuntimeError)   the members of a group do not make the same calls; ``kind`` says how
├── HungRank(TimeoutError)          a rank that runs and does not come back
└── RanksFailed(RuntimeError)       what ``run`` raises: which ranks failed, the first failure is its cause
```
"""

from __future__ import annotations

from collections.abc import Mapping

from rankmesh.errors import RankmeshError

__all__ = ["DivergenceError", "HungRank", "RanksFailed"]


class DivergenceError(RankmeshError, RuntimeError):
    """Ranks that do not make the same calls; raised on each of them.

    ``kind``    ``mismatch`` (different calls), ``deadlock`` (calls that others never make), ``unmatched`` (a call that
                nobody had joined when the ranks ended), ``race`` (a tensor changed in flight), ``refused`` (tensors
                that do not have the operation), ``foreign`` (the process group of another rank), ``destroyed``,
                ``outside`` (a group that this rank is not in)
    ``group``   the group's kind and coordinate, such as ``tp@pp0,dp1``; ``ranks`` are its members
    ``calls``   what each rank called, by rank; ``sites`` where, as ``file:line``
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    calls: Mapping[int, str]
    sites: Mapping[int, str]


class HungRank(RankmeshError, TimeoutError):
    """A rank that ran for too long without a call to torch.distributed; ``hung`` is the rank."""

    hung: int


class RanksFailed(RankmeshError, RuntimeError):
    """Ranks that raised; ``failures`` holds the error of each, in the order in which they failed.

    ``values`` of the others are in ``returned``. The first failure is the cause (``__cause__``).
    """

    failures: Mapping[int, BaseException]
    returned: Mapping[int, object]
