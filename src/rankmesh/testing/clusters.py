"""What a launcher tells each rank of a cluster that is not there.

>>> from rankmesh.topology import Cluster
>>> cluster = Cluster.parse("host=2,leaf=2", hosts="node[9-10]")
>>> environment(cluster, 3)["LOCAL_RANK"], environment(cluster, 3)["MASTER_ADDR"]
('1', 'node9')
"""

from __future__ import annotations

import numpy as np

from rankmesh.errors import LayoutError
from rankmesh.topology import Cluster

__all__ = ["environment"]


def environment(cluster: Cluster, rank: int, launcher: str = "torchrun") -> dict[str, str]:
    """The variables by which ``torchrun`` or ``srun`` tells a rank of a cluster who it is."""
    host, first = cluster.host_of(rank), cluster.host_of(0)
    node = int(cluster.hosts_of(rank))
    local = int(np.flatnonzero(cluster.ranks[cluster.hosts_of(cluster.ranks) == node] == rank)[0])
    if launcher == "torchrun":
        values: dict[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": cluster.size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": host.devices,
            "GROUP_RANK": node,
        }
    elif launcher == "srun":
        values = {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": cluster.size,
            "SLURM_LOCALID": local,
            "SLURM_TASKS_PER_NODE": ",".join(str(other.devices) for other in cluster.hosts),
            "SLURM_NODEID": node,
            "SLURM_NNODES": len(cluster.hosts),
        }
    else:
        raise LayoutError(f"received launcher {launcher!r}; it is 'torchrun' or 'srun'", launcher=launcher)
    meeting = {"MASTER_ADDR": first.name, "MASTER_PORT": "29500"}
    return meeting | {name: str(value) for name, value in values.items()}
