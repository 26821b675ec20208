import json

import pytest

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.discovered import slurm_job
from rankmesh.errors import ClusterError

TREE = """\
# two racks
SwitchName=s1 Nodes=node[1-2]   LinkSpeed=100
SwitchName=s2 \\
    Nodes=node[3,10]
SwitchName=top Switches=s[1-2]
"""
BLOCK = "BlockName=b1 Nodes=node[1-2]\nBlockName=b2 Nodes=node[3-4]\nblockname=b3 nodes=node5\nBlockSizes=2,4\n"
YAML = """\
- topology: flat
  flat: true
- topology: racks
  cluster_default: true
  tree:
    switches:
      - switch: top
        children: s[1-2]
      - switch: s1
        nodes: node[1-2]
      - switch: s2
        nodes: node[3,10]
"""


@pytest.fixture
def read(tmp_path):
    """Write a file and read it as a cluster."""

    def read(text, name="file", **arguments):
        path = tmp_path / name
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return Cluster.read(path, **arguments)

    return read


def _units(cluster, level):
    names = [other.name for other in cluster.levels]
    return [host.places[names.index(level) - 1] for host in cluster.hosts]


@pytest.mark.parametrize("text", [TREE, YAML])
def test_slurm_trees(read, text):
    """topology.conf and topology.yaml say one thing; the job's hosts are taken in the launcher's order."""
    cluster = read(text)
    assert [host.name for host in cluster.hosts] == ["node1", "node2", "node3", "node10"]
    assert [level.name for level in cluster.levels] == ["host", "leaf", "spine"]
    assert _units(cluster, "leaf") == ["s1", "s1", "s2", "s2"]
    assert cluster.size == 32
    assert "do not say how many devices" in cluster.notes[0]
    some = read(text, hosts=["node10", "node[1-2]"], gpus_per_node=2)
    assert ([host.name for host in some.hosts], some.rank_map) == (["node1", "node2", "node10"], (2, 3, 4, 5, 0, 1))
    assert not any("devices" in note for note in some.notes)


def test_slurm_blocks(read):
    """Blocks are NVLink domains, joined in order to the next larger block size."""
    cluster = read(BLOCK, gpus_per_node=4)
    assert [level.name for level in cluster.levels] == ["host", "nvlink", "leaf", "network"]
    assert _units(cluster, "nvlink") == ["b1", "b1", "b2", "b2", "b3"]
    assert _units(cluster, "leaf") == ["4x0", "4x0", "4x0", "4x0", "4x1"]


def test_switches_of_uneven_height(read):
    """A rack that hangs on the core itself is alone at the level that it has not."""
    cluster = read("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=m Switches=a\nSwitchName=c Switches=m,b\n")
    assert [host.places for host in cluster.hosts] == [("a", "m", "c"), ("b", "b", "c")]


# What `scontrol show topology` of Slurm 22.05 prints for TREE.
SHOWN = """\
SwitchName=s1 Level=0 LinkSpeed=100 Nodes=node[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=node[3,10]
SwitchName=top Level=1 LinkSpeed=1 Nodes=node[1-3,10] Switches=s[1-2]
"""


def test_what_scontrol_prints(read):
    """`scontrol show topology` is read as the file is, although it lists the nodes of a switch over switches too."""
    assert read(SHOWN) == read(TREE)
    blocks = (
        "BlockName=b1 BlockIndex=0 Nodes=node[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=node[3-4] BlockSize=2\n"
    )
    assert _units(read(blocks), "nvlink") == ["b1", "b1", "b2", "b2"]
    joined = read(blocks + "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[1-4] BlockSize=4\n")
    assert _units(joined, "leaf") == ["b[1-2]"] * 4


def test_switches_with_the_same_below_them(read):
    """Two spines over the same leaves, and the leaves of a host with two rails, are one unit, and a note says so."""
    text = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\n"
    spines = text + "SwitchName=s1 Switches=l[1-2]\nSwitchName=s2 Switches=l[1-2]\n"
    cluster = read(spines)
    assert [host.places for host in cluster.hosts] == [("l1", "s1+s2")] * 2 + [("l2", "s1+s2")] * 2
    assert "s1+s2: 2 switches with the same below them are read as one" in cluster.notes
    rails = "".join(f"SwitchName=r{rail} Nodes=n[1-2]\n" for rail in range(8)) + "SwitchName=other Nodes=n[3-4]\n"
    assert _units(read(rails), "leaf") == ["r0+r1+r2+r3+4 more"] * 2 + ["other"] * 2
    # The cores of two planes: each is over one spine of every pod, and all of them are over the same pods.
    pods = text + "SwitchName=l3 Nodes=n5\nSwitchName=l4 Nodes=n6\n"
    pods += "".join(
        f"SwitchName=p{pod}s{plane} Switches=l[{2 * pod - 1}-{2 * pod}]\n" for pod in (1, 2) for plane in (1, 2)
    )
    pods += "".join(f"SwitchName=c{plane} Switches=p[1-2]s{plane}\n" for plane in (1, 2))
    assert read(pods).hosts[4].places == ("l3", "p2s1+p2s2", "c1+c2")
    planes = text + "SwitchName=l3 Nodes=n5\nSwitchName=s1 Switches=l[1-2]\nSwitchName=s2 Switches=l[2-3]\n"
    with pytest.raises(
        ClusterError, match="line 5: switch 'l2' is under 's2', and under 's1' on line 4, and the two do"
    ):
        read(planes)


def test_link_speeds_are_ignored_with_a_note(read):
    """LinkSpeed has a unit of each site: it is no bandwidth, and the note says what to give instead."""
    assert any(note.startswith("LinkSpeed is ignored") for note in read(TREE).notes)
    assert not any("LinkSpeed" in note for note in read(SHOWN.replace("100", "1")).notes)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("# a ring\nRingName=r1 Nodes=node[1-8]\n", "no levels to read", 2),
        ("TorusName=r1 Dims=2x2x2 Nodes=node[1-8]\n  Placement Dims=2x2x1\n", "no levels to read", 1),
        ("- topology: a\n  ring:\n    rings:\n      - ring: r1\n        nodes: n1\n", "no levels to read", None),
        ("- topology: a\n  flat: true\n", "topology 'a' is neither a tree nor blocks", None),
    ],
)
def test_topologies_without_levels_are_refused(read, text, words, line):
    """Rings and tori, networks of hops, have no units that hosts share; a flat one has none either."""
    with pytest.raises(ClusterError, match=words) as error:
        read(text)
    assert error.value.values.get("line") == line


def test_a_level_that_no_host_names(read):
    """An outermost level without names is one unit, with a note; one that some hosts name is named by all."""
    text = "levels: [{name: host}, {name: leaf}, {name: spine}]\nhosts:\n"
    whole = text + "- {name: n1, devices: 2, leaf: a}\n- {name: n2, devices: 2, leaf: b}\n"
    cluster = read(whole)
    assert [level.name for level in cluster.levels] == ["host", "leaf", "spine"]
    assert _units(cluster, "spine") == ["all"] * 2
    assert cluster.notes == ("no host names its spine: all hosts are in one",)
    assert read(whole, hosts="n2,n1").notes == cluster.notes
    assert read(text + "- {name: 'n[1-2]', devices: 2}\n").hosts[0].places == ("all", "all")
    with pytest.raises(ClusterError, match=r"line 4: host 'n2' does not say its leaf; add leaf: a name"):
        read(text + "- {name: n1, devices: 2, leaf: a}\n- {name: n2, devices: 2}\n")
    with pytest.raises(ClusterError, match=r"host 'n1' does not say its leaf"):
        read(text + "- {name: n1, devices: 2, spine: a}\n- {name: n2, devices: 2, spine: b}\n")


@pytest.mark.parametrize(
    ("text", "line", "host"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=b Nods=n2\n", 2, None),
        (TREE + "SwitchName=s3 Nodes=node2\n", 6, "node2"),
        (TREE + "SwitchName=s1 Nodes=node9\n", 6, None),
        (TREE + "SwitchName=x Switches=s1\n", 6, "s1"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, None),
        ("SwitchName=a Switches=b\n", 1, None),
        ("SwitchName=a Nodes=n1\nNodeName=b\n", 2, None),
        ("SwitchName=a Nodes=n1\n\nSwitchName=b nonsense\n", 3, None),
        (BLOCK + "BlockName=b4 Nodes=node1\n", 5, "node1"),
        (BLOCK + "SwitchName=s Nodes=node1\n", 1, None),
        (YAML + "      - switch: s3\n        nodes: node1\n", 13, "node1"),
    ],
)
def test_contradictions_have_their_line(read, text, line, host):
    """A file of Slurm that contradicts itself is refused with the path and the line."""
    with pytest.raises(ClusterError) as error:
        read(text)
    assert (error.value.line, error.value.values.get("host")) == (line, host)
    assert f"file, line {line}: " in str(error.value)
    assert str(error.value).endswith("; fix the file")


def test_our_own_document(read):
    """What the command prints is read back; by hand names are lists, numbers may be absent; a slip has its line."""
    cluster = Cluster.parse("host=2,leaf=2,spine=2", hosts="b[1-2],a[1-2]")
    assert read(cluster.to_dict()) == cluster
    assert read(cluster.to_dict(), hosts="a2,b1").rank_map is None
    text = "levels:\n- {name: host}\n- {name: leaf, uplink: 1.0e+9}\n- {name: spine}\nhosts:\n"
    text += '- {name: "n[1-2]", devices: 4, leaf: a, spine: x}\n- {name: n3, devices: 2, leaf: b, spine: x}\n'
    assert [host.devices for host in read(text).hosts] == [4, 4, 2]
    assert read(text).levels[1].uplink == 1e9
    with pytest.raises(ClusterError, match="line 8: leaf 'a' is in spine"):
        read(text + "- {name: n4, devices: 2, leaf: a, spine: y}\n")
    with pytest.raises(ClusterError, match=r"line 8: host 'n3' is named twice"):
        read(text + "- {name: n3, devices: 2, leaf: b, spine: x}\n")
    with pytest.raises(ClusterError, match=r"^the host list has 'n9', which is none of the cluster's 3 hosts"):
        read(text, hosts="n9")


@pytest.mark.parametrize(
    ("hosts", "output"),
    [
        ("node[1-", "its brackets do not match"),
        ("node[3-1]", "runs backwards"),
        ("node[1,1]", "the host list has 'node1' twice; list each host once"),
        ("node[1-5]", "the host list has 'node5', which is none of the cluster's 4 hosts"),
    ],
)
def test_a_mistake_in_the_host_list_is_not_the_files(tmp_path, hosts, output):
    """The error is about the list; the topology file, which is right, is not named, and no line of it."""
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=s1 Nodes=node[1-2]\nSwitchName=s2 Nodes=node[3-4]\nSwitchName=top Switches=s[1-2]\n")
    with pytest.raises(ClusterError) as refused:
        Cluster.read(file, hosts=hosts)
    assert output in str(refused.value)
    assert "topology.conf" not in str(refused.value)
    assert "line" not in str(refused.value)


def test_kubernetes(read):
    """Labels of nodes are levels; a node without devices is no host, one without a label is alone."""

    def node(name, gpus, **labels):
        keys = {"leaf": "network.topology.nvidia.com/leaf", "clique": "nvidia.com/gpu.clique",
                "zone": "topology.kubernetes.io/zone"}  # fmt: skip
        return {
            "kind": "Node",
            "metadata": {"name": name, "labels": {keys[key]: value for key, value in labels.items()}},
            "status": {"allocatable": {"cpu": "96", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}},
        }

    nodes = [node("gpu-10", 8, leaf="l1", zone="z"), node("gpu-9", 4, leaf="l1", clique="c.1", zone="z"), node("cp", 0)]
    cluster = read({"kind": "List", "items": nodes})
    assert [level.name for level in cluster.levels] == ["host", "nvlink", "leaf", "zone"]
    assert [(host.name, host.devices, host.places) for host in cluster.hosts] == [
        ("gpu-9", 4, ("c.1", "l1", "z")), ("gpu-10", 8, ("gpu-10", "l1", "z"))
    ]  # fmt: skip
    assert cluster.rank_map is None


def test_aws(read):
    """Network nodes are listed from the top; the instance type says the devices, the capacity block the domain."""
    rows = [
        {"InstanceId": f"i-{number}", "InstanceType": kind, "NetworkNodes": ["nn-top", "nn-mid", f"nn-{number // 2}"]}
        for number, kind in enumerate(["p5.48xlarge", "p5.48xlarge", "x.large"])
    ]
    cluster = read({"Instances": rows}, gpus_per_node=1)
    assert [level.name for level in cluster.levels] == ["host", "leaf", "spine", "core"]
    assert ([host.devices for host in cluster.hosts], _units(cluster, "leaf")) == ([8, 8, 1], ["nn-0", "nn-0", "nn-1"])
    rows[0]["CapacityBlockId"] = rows[1]["CapacityBlockId"] = "cr-1"
    assert _units(read({"Instances": rows}), "nvlink") == ["cr-1", "cr-1", "i-2"]
    with pytest.raises(ClusterError, match="3 instances and a NextToken: more follow"):
        read({"Instances": rows, "NextToken": "x"})
    rows[0]["NetworkNodes"] = []
    with pytest.raises(ClusterError, match="line 1: levels of switches above i-0: 0, above other hosts: 3"):
        read({"Instances": rows})


def test_hosts_and_their_switches(read):
    """{host: switch}, or the switches of each host, innermost first; addresses are names."""
    cluster = read({"10.0.0.10": "s1", "10.0.0.9": "s0"}, gpus_per_node=2)
    assert [host.name for host in cluster.hosts] == ["10.0.0.9", "10.0.0.10"]
    assert [level.name for level in cluster.levels] == ["host", "leaf", "network"]
    assert [level.name for level in read({"a": ["s1", "t"], "b": ["s2", "t"]}).levels] == ["host", "leaf", "spine"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", "a: [", "{}", '{"tp": [{"collective": "all-reduce"}]}', '{"items": []}', '{"Instances": [{}]}',
     "- topology: x\n"],
)  # fmt: skip
def test_files_that_are_none(read, text):
    """Whatever else a file holds is refused, with the path and what to give instead."""
    with pytest.raises(ClusterError, match=r"file\b.*; (give|describe|fix the file)"):
        read(text)


def test_a_path_that_is_not_there(tmp_path):
    """A path that cannot be read says so, and that a string would do."""
    with pytest.raises(ClusterError, match=r"cannot be read .* axis string of the machine"):
        Cluster.read(tmp_path / "none.yaml")


def test_a_text_of_levels_is_no_path():
    """A text of levels that is given as a path is answered with the call that reads it."""
    with pytest.raises(ClusterError, match=r"a text of levels is read by Cluster\.parse\('host=8,leaf=4'\)"):
        Cluster.read("host=8,leaf=4")


def test_the_environment_of_a_job(tmp_path):
    """Hosts and tasks of a Slurm job, dealt by host or in turn, with and without the topology file."""
    job = {"SLURM_JOB_NODELIST": "node[2,10]", "SLURM_TASKS_PER_NODE": "2,1"}
    assert [(host.name, host.devices) for host in slurm_job(job).hosts] == [("node2", 2), ("node10", 1)]
    assert slurm_job({**job, "SLURM_DISTRIBUTION": "cyclic"}).rank_map == (0, 2, 1)
    assert slurm_job({**job, "SLURM_DISTRIBUTION": "block:cyclic"}).rank_map is None
    for bad in ({"SLURM_DISTRIBUTION": "plane=2"}, {"SLURM_TASKS_PER_NODE": "4"}, {"SLURM_TASKS_PER_NODE": "x"}):
        with pytest.raises(
            ClusterError, match=r"SLURM_DISTRIBUTION is 'plane=2'|1 counts of tasks|tasks per node are 'x'"
        ):
            slurm_job({**job, **bad})
    with pytest.raises(ClusterError, match="SLURM_JOB_NODELIST is not set"):
        slurm_job({})
    (tmp_path / "topology.conf").write_text("SwitchName=a Nodes=node2\nSwitchName=b Nodes=node10\n")
    from rankmesh.core.clusters.read import machine_of

    placed = slurm_job(job, machine_of(tmp_path / "topology.conf"))
    assert [(host.devices, host.places[0]) for host in placed.hosts] == [(2, "a"), (1, "b")]


LONG = "s" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"SwitchName={LONG} Nodes=n1\nSwitchName={LONG} Nodes=n2\n",
        f"SwitchName=a Switches={LONG}\n",
        f"SwitchName={LONG} Switches={LONG}\n",
        f"SwitchName={LONG} Nodes=n1,n2\nSwitchName=b Nodes=n1\n",
        f"SwitchName=a Nodes={LONG},n2\nSwitchName=b Nodes={LONG}\n",
        f"SwitchName=a {LONG}=1 Nodes=n1\n",
        f"BlockName=a Nodes={LONG}\nBlockName=b Nodes={LONG}\n",
        f"RingName={LONG} Nodes=n1\n",
        {"levels": [{"name": "host"}], "hosts": [{"name": LONG, "devices": 1}, {"name": LONG, "devices": 1}]},
        {"levels": [{"name": "host"}, {"name": "leaf", LONG: 1}], "hosts": [{"name": "a", "devices": 1, "leaf": "b"}]},
        {
            "levels": [{"name": "host"}, {"name": "leaf"}, {"name": "spine"}],
            "hosts": [{"name": LONG + end, "devices": 1, "leaf": LONG, "spine": LONG + end} for end in "ab"],
        },
    ],
)
def test_messages_quote_80_characters(read, text):
    """A name of 5,000 characters is cut, in every message that quotes it."""
    with pytest.raises(ClusterError) as error:
        read(text)
    assert len(str(error.value)) < 900


@pytest.mark.parametrize("hosts", [LONG, f"{LONG},{LONG}", f"n[{LONG}]"])
def test_a_list_of_hosts_with_a_long_name(read, hosts):
    """A host that is unknown, and one that is listed twice, are cut alike."""
    with pytest.raises(ClusterError) as error:
        read(TREE, hosts=hosts)
    assert len(str(error.value)) < 900
