"""The variables that a launcher sets for each rank of a cluster that is not there.

>>> from rankmesh.core.clusters.cluster import Cluster
>>> cluster = Cluster.parse("host=2,leaf=2", hosts="node[9-10]")
>>> environment(cluster, 3)["LOCAL_RANK"], environment(cluster, 3)["MASTER_ADDR"]
('1', 'node9')
"""

from __future__ import annotations

import numpy as np

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.errors import LayoutError, quoted
from rankmesh.launch.table import srun_variables, torchrun_variables

__all__ = ["environment"]


def environment(cluster: Cluster, rank: int, launcher: str = "torchrun") -> dict[str, str]:
    """Return the variables that ``torchrun`` or ``srun`` sets for a rank of a cluster."""
    host, first = cluster.host_of(rank), cluster.host_of(0)
    node = int(cluster.hosts_of(rank))
    local = int(np.flatnonzero(cluster.ranks[cluster.hosts_of(cluster.ranks) == node] == rank)[0])
    if launcher == "torchrun":
        place = {"local_rank": local, "local_world_size": host.devices, "node": node}
        return torchrun_variables(rank, cluster.size, **place, address=first.name)
    if launcher == "srun":
        tasks = [other.devices for other in cluster.hosts]
        hosts = ",".join(other.name for other in cluster.hosts)
        return srun_variables(rank, local_rank=local, node=node, tasks=tasks, hosts=hosts)
    raise LayoutError(f"launcher {quoted(launcher)} is unknown; give 'torchrun' or 'srun'", launcher=launcher)
