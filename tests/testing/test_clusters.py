import pytest
from hypothesis import given
from tests.topology.strategies import clusters

from rankmesh import LayoutError
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.launch import started_by
from rankmesh.testing import environment


@given(clusters())
def test_launchers_say_the_same(cluster):
    """What a launcher tells a rank is read back by the library as that rank of that host."""
    for launcher in ("torchrun", "srun"):
        local = {host.name: [] for host in cluster.hosts}
        for rank in range(cluster.size):
            job = started_by(environment(cluster, rank, launcher))
            assert (job.rank, job.world_size) == (rank, cluster.size)
            assert launcher == "srun" or job.address == cluster.host_of(0).name
            local[cluster.host_of(rank).name].append(job.local_rank)
        assert all(sorted(local[host.name]) == list(range(host.devices)) for host in cluster.hosts)


def test_a_launcher_that_nobody_knows():
    """A launcher without variables here is refused."""
    with pytest.raises(LayoutError, match="'torchrun' or 'srun'"):
        environment(Cluster.parse("host=1"), 0, "mpirun")
