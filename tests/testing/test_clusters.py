import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import LayoutError, Mesh
from rankmesh.launch import started_by
from rankmesh.testing import Cluster
from rankmesh.topology import crossings

CLUSTERS = st.builds(
    lambda per_rack, racks, gpus, first: Cluster(per_rack * racks, gpus, per_rack, per_rack, first),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 12),
)  # fmt: skip


@given(CLUSTERS)
def test_every_rank_has_one_place(cluster):
    """Hosts, racks and domains cut the ranks into equal, contiguous parts, hosts in the order of their numbers."""
    ranks = range(cluster.size)
    for place, parts in (
        (cluster.host_number, cluster.hosts),
        (cluster.rack_of, cluster.hosts // cluster.hosts_per_rack),
        (cluster.domain_of, cluster.hosts // cluster.hosts_per_domain),
    ):
        found = [place(rank) for rank in ranks]
        assert found == sorted(found)
        assert [found.count(part) for part in range(parts)] == [cluster.size // parts] * parts
    assert [int(name.removeprefix("node")) for name in cluster.hostnames] == list(
        range(cluster.first, cluster.first + cluster.hosts)
    )


@given(CLUSTERS, st.sampled_from(["torchrun", "srun"]))
def test_launchers_say_the_same(cluster, launcher):
    """What a launcher tells a rank is read back by the library as that rank of that host."""
    for rank in range(cluster.size):
        job = started_by(cluster.environment(rank, launcher))
        assert (job.rank, job.world_size, job.address) == (rank, cluster.size, cluster.hostnames[0])
        assert (job.local_rank, job.local_world_size) == (rank % cluster.gpus_per_host, cluster.gpus_per_host)


@given(CLUSTERS)
def test_crossings_agree_with_the_topology(cluster):
    """Steps between hosts, counted one by one, are those that the topology layer counts in closed form."""
    mesh = Mesh(tp=cluster.gpus_per_host, dp=cluster.hosts)
    for name in mesh.axes:
        groups = mesh.groups(name)
        closing = [cluster.crossings([group[-1], group[0]]) if len(group) > 1 else 0 for group in groups]
        rings = [cluster.crossings(group) + close for group, close in zip(groups, closing, strict=True)]
        assert crossings(groups, cluster.gpus_per_host).hops == max(rings) or sum(rings)


def test_sizes_that_do_not_fit():
    """Parts that do not divide the hosts, ranks and launchers that are not there are refused."""
    for bad in (lambda: Cluster(4, hosts_per_rack=3), lambda: Cluster(0), lambda: Cluster(2).host_of(16)):
        with pytest.raises(LayoutError, match="received"):
            bad()
    with pytest.raises(LayoutError, match="'torchrun' or 'srun'"):
        Cluster(1).environment(0, "mpirun")
