from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.clusters.discovered import Witness, discovered


def _output(*hosts):
    """Two ranks on each host, in the order of the list."""
    return [
        Witness(2 * number + slot, name, f"boot-{name}", slot) for number, name in enumerate(hosts) for slot in (0, 1)
    ]


@given(st.permutations(_output("node10", "node9", "node2")))
def test_whoever_speaks_first(output):
    """Hosts are in natural order, and each rank is where it says it is, whatever the order of the witnesses."""
    cluster = discovered(output)
    assert [host.name for host in cluster.hosts] == ["node2", "node9", "node10"]
    assert all(cluster.host_of(each.rank).name == each.host for each in output)
    assert (cluster.rank_map, cluster.notes) == ((4, 5, 2, 3, 0, 1), ())
    assert [level.name for level in cluster.levels] == ["host", "network"]


def test_two_hosts_with_one_name():
    """Hosts that call themselves alike are told apart by their boot, and a person is told."""
    output = _output("node", "other")
    output[2:] = [replace(each, host="node") for each in output[2:]]
    cluster = discovered(output)
    assert [(host.name, host.devices) for host in cluster.hosts] == [("node", 2), ("node#2", 2)]
    assert cluster.host_of(3).name == "node#2"
    assert "2 hosts call themselves node: node, node#2" in cluster.notes[0]


def test_two_containers_of_one_machine():
    """Containers with names of their own, or with one name, are hosts of their own; a person is told."""
    one_boot = [replace(each, boot="b") for each in _output("a", "b")]
    assert "a, b are containers of one machine" in discovered(one_boot).notes[0]
    one_name = [replace(each, host="a", boot="b", memory=str(each.rank // 2)) for each in one_boot]
    cluster = discovered(one_name)
    assert [host.name for host in cluster.hosts] == ["a", "a#2"]
    assert cluster.notes == ("a, a#2 are containers of one machine (one boot): they are hosts of their own here",)


def test_fabric_and_switches():
    """NVLink domains and Slurm's switches are levels; what the ranks do not agree on is left out, and said."""
    output = _output("n1", "n2", "n3")
    switched = [replace(each, switches=("top", "s1" if each.rank < 4 else "s2")) for each in output]
    cluster = discovered([replace(each, fabric="f" if each.rank < 4 else "") for each in switched])
    assert [level.name for level in cluster.levels] == ["host", "nvlink", "leaf", "spine"]
    assert [host.places for host in cluster.hosts] == [("f", "s1", "top"), ("f", "s1", "top"), ("alone-2", "s2", "top")]
    odd = discovered([*switched[:-1], replace(switched[-1], switches=())])
    assert [level.name for level in odd.levels] == ["host", "network"]
    assert "switches are left out" in odd.notes[0]


def test_slots_order_the_ranks_of_a_host():
    """Ranks of a host stand by their device, whatever their numbers."""
    output = [Witness(rank, "a", "b", slot) for rank, slot in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert discovered(output).rank_map == (1, 0, 3, 2)


def test_local_ranks_that_contradict_each_other():
    """Ranks of one host with one local rank are named, and the local world size that is too small."""
    six = [Witness(rank, "vm", "b", rank % 3, local_rank=rank % 3, local_world_size=3) for rank in range(6)]
    (note,) = discovered(six).notes
    assert note.startswith(
        "ranks 0 and 3, 1 and 4, 2 and 5 on vm have one local rank each, so they would share a GPU; "
    )
    assert "6 ranks of this job are on vm, but its local world size is 3" in note
    apart = [replace(each, host=f"vm{each.rank // 3}", boot=f"b{each.rank // 3}") for each in six]
    assert discovered(apart).notes == ()
    assert discovered([replace(each, visible=str(each.rank)) for each in six]).notes == ()
    assert discovered([replace(each, local_rank=each.rank) for each in six]).notes == ()
