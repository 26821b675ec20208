"""Tables of nvidia-smi topo -m: which devices share which link, as levels inside each host."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.links import is_links, read_links
from rankmesh.errors import ClusterError

NEAR = ("NV4", "PIX", "PXB", "PHB", "NODE", "SYS")
LEVELS = {"NV4": "nvlink", "PIX": "pix", "PXB": "pxb", "PHB": "phb", "NODE": "numa"}


def _table(cells):
    """The text of a table as the driver prints it: underlined head, tabs, network cards and affinities beside."""
    names = [f"GPU{number}" for number in range(len(cells))]
    head = "\x1b[4m\t" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    rows = ["\t".join([name, *(f" {cell} " for cell in row), "SYS", "0-47", "0", "N/A"])
            for name, row in zip(names, cells, strict=True)]  # fmt: skip
    card = "\t".join(["NIC0", *["SYS"] * len(cells), " X "])
    legend = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    return "\n".join([head, *rows, card, legend])


@st.composite
def trees(draw):
    """Devices in nested units, in any order, and the kinds of link that join them, nearest first."""
    kinds = sorted(draw(st.sets(st.sampled_from(NEAR), min_size=1, max_size=4)), key=NEAR.index)
    units = [tuple(draw(st.integers(0, 1)) for _ in kinds[1:]) for _ in range(draw(st.integers(1, 8)))]
    return kinds, units


@given(trees())
def test_units_are_the_devices_that_share_a_link(tree):
    """Of two devices, the innermost level that holds both is of the kind of their link; the outermost is the host."""
    kinds, units = tree

    def kind(one, other):
        return next(kind for kind, above in zip(reversed(kinds), zip(one, other, strict=True), strict=False)
                    if above[0] != above[1]) if one != other else kinds[0]  # fmt: skip

    cells = [["X" if here == there else kind(units[here], units[there]) for there in range(len(units))]
             for here in range(len(units))]  # fmt: skip
    text = _table(cells)
    assert is_links(text)
    cluster = read_links(Cluster, text, ["a", "b"], None)
    stripped = "\n".join(line.replace("\x1b[4m", "").replace("\t", " ").strip() for line in text.splitlines())
    assert is_links(stripped)
    assert read_links(Cluster, stripped, ["a", "b"], None) == cluster
    present = sorted({cell for row in cells for cell in row} - {"X"}, key=NEAR.index)
    names = [level.name for level in cluster.levels]
    assert names == [*(LEVELS[kind] for kind in present[:-1]), "host", "network"]
    assert [host.devices for host in cluster.hosts] == [len(units)] * 2
    for here in range(len(units)):
        for there in range(here):
            level = int(cluster.level_of(here, there))
            assert level == present.index(cells[here][there])
    assert (cluster.level_of(0, np.arange(len(units), 2 * len(units))) == len(names) - 1).all()
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("link", "bandwidth"),
    [("NV18", 450e9), ("NV12", 300e9), ("PIX", 64e9), ("PHB", 64e9), ("NODE", 64e9), ("SYS", 22e9)],
)
def test_a_host_has_the_bandwidth_of_its_links(link, bandwidth):
    """Where all devices have one kind of link there is no level inside the host; NVLinks count."""
    cluster = read_links(Cluster, _table([["X", link], [link, "X"]]), None, None)
    assert [(level.name, level.bandwidth) for level in cluster.levels] == [("host", bandwidth)]
    assert "one host" in cluster.notes[0]


def test_links_that_join_through_others_are_one_unit():
    """Of a ring of NVLinks every device is in one unit, the outermost."""
    ring = [["X", "NV2", "SYS", "NV2"], ["NV2", "X", "NV2", "SYS"], ["SYS", "NV2", "X", "NV2"],
            ["NV2", "SYS", "NV2", "X"]]  # fmt: skip
    levels = read_links(Cluster, _table(ring), None, None).levels
    assert [(level.name, level.bandwidth) for level in levels] == [("host", 50e9)]
    pairs = [["X", "NV4", "NV2", "NV2"], ["NV4", "X", "NV2", "NV2"], ["NV2", "NV2", "X", "NV4"],
             ["NV2", "NV2", "NV4", "X"]]  # fmt: skip
    levels = read_links(Cluster, _table(pairs), None, None).levels
    assert [(level.name, level.bandwidth) for level in levels] == [("nv4", 100e9), ("host", 50e9)]


@pytest.mark.parametrize(
    ("text", "gpus_per_node", "line"),
    [
        ("GPU0 X NV18\nGPU1 NV18 X\n", 4, None),
        ("GPU0 X NV18\nGPU1 XYZ X\n", None, 2),
        ("GPU0 X NV18\nGPU1 NV18\n", None, 2),
        ("\n".join(f"GPU{number}" + " X" * 65 for number in range(65)), None, None),
        ("GPU0 X NV9999\nGPU1 NV9999 X\n", None, 1),
    ],
)
def test_tables_that_cannot_be(text, gpus_per_node, line):
    """Another number of devices, an unknown link, a row that was cut: the line is in the error."""
    with pytest.raises(ClusterError) as error:
        read_links(Cluster, text, None, gpus_per_node)
    assert error.value.values.get("line") == line


def test_a_table_is_read_as_a_file(tmp_path):
    """The hosts of the job are all alike; one with another number of devices is refused with the path."""
    path = tmp_path / "topo.txt"
    path.write_text(_table([["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]))
    cluster = Cluster.read(path, hosts="node[10,9]")
    assert str(cluster) == "6 devices, 2 hosts of 3, levels pix host network"
    assert cluster.filled == ("node10", "node9")
    with pytest.raises(ClusterError) as error:
        Cluster.read(path, gpus_per_node=8)
    assert error.value.path == str(path)
