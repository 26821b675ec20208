"""Clusters that are not there: hosts, racks and NVLink domains, and what a launcher tells each rank of them.

```
Cluster(hosts=4, gpus_per_host=2, hosts_per_rack=2)

rank        0 1 | 2 3 | 4 5 | 6 7
host        node8 node9 node10 node11          by number: as strings, node10 would come before node8
rack        0           1
```

>>> cluster = Cluster(hosts=4, gpus_per_host=2, hosts_per_rack=2, first=8)
>>> cluster.size, cluster.host_of(4), cluster.rack_of(4), cluster.hostnames
(8, 'node10', 1, ('node8', 'node9', 'node10', 'node11'))
>>> cluster.environment(5)["LOCAL_RANK"], cluster.crossings([0, 2, 4, 6])
('1', 3)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from rankmesh.errors import LayoutError
from rankmesh.launch.table import srun_variables, torchrun_variables
from rankmesh.layout.axes import integer

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal size, ranks laid over them host by host.

    ``hosts_per_rack`` and ``hosts_per_domain`` (an NVLink domain; default: each host its own) divide ``hosts``;
    ``first`` is the number of the first host's name. Raises ``LayoutError`` for sizes that do not fit together.
    """

    hosts: int
    gpus_per_host: int = 8
    hosts_per_rack: int | None = None
    hosts_per_domain: int = 1
    first: int = 0

    def __post_init__(self) -> None:
        integer(self.hosts, "hosts", least=1)
        integer(self.gpus_per_host, "gpus_per_host", least=1)
        integer(self.first, "first", least=0)
        for name in ("hosts_per_rack", "hosts_per_domain"):
            part = getattr(self, name)
            if part is not None and self.hosts % integer(part, name, least=1):
                raise LayoutError(
                    f"received {name}={part} for {self.hosts} hosts; it must divide the number of hosts; "
                    "change one of them",
                    hosts=self.hosts,
                    part=part,
                )

    @property
    def size(self) -> int:
        """How many ranks there are: one for each GPU."""
        return self.hosts * self.gpus_per_host

    @property
    def hostnames(self) -> tuple[str, ...]:
        """The hosts in the order of their numbers."""
        return tuple(f"node{self.first + host}" for host in range(self.hosts))

    def host_number(self, rank: int) -> int:
        """The place of a rank's host among the hosts."""
        if integer(rank, "rank", least=0) >= self.size:
            raise LayoutError(
                f"received rank {rank} of a cluster of {self.size}; the last is {self.size - 1}", rank=rank
            )
        return rank // self.gpus_per_host

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self.hostnames[self.host_number(rank)]

    def rack_of(self, rank: int) -> int:
        """The number of a rank's rack; all hosts are in one where nothing else was said."""
        return self.host_number(rank) // (self.hosts_per_rack or self.hosts)

    def domain_of(self, rank: int) -> int:
        """The number of a rank's NVLink domain."""
        return self.host_number(rank) // self.hosts_per_domain

    def environment(self, rank: int, launcher: str = "torchrun") -> dict[str, str]:
        """The variables by which ``torchrun`` or ``srun`` tells a rank who it is."""
        self.host_number(rank)  # refuses a rank that is not there
        if launcher == "torchrun":
            return torchrun_variables(rank, self.size, self.gpus_per_host, self.hostnames[0])
        if launcher == "srun":
            return srun_variables(rank, self.size, self.gpus_per_host, ",".join(self.hostnames))
        raise LayoutError(f"received launcher {launcher!r}; it is 'torchrun' or 'srun'", launcher=launcher)

    def crossings(self, ranks: Iterable[int]) -> int:
        """How many steps from one rank to the next of this group leave a host; the ring is not closed."""
        hosts = [self.host_number(rank) for rank in ranks]
        return sum(here != there for here, there in pairwise(hosts))
