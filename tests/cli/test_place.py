"""``rankmesh place``: by a model's step, on the launcher's hosts, and how its rank map is used."""

import json

import pytest

import rankmesh as rm
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.placement import crossings

BLOCKS = "".join(f"BlockName=block{n} Nodes=node[{18 * n + 1:03}-{18 * n + 18:03}]\n" for n in range(4))
CLUSTER = """\
levels: [{name: host, bandwidth: 2.0e+9}, {name: leaf, bandwidth: 25.0e+6}, {name: spine, bandwidth: 12.5e+6}]
hosts:
  - {name: "node[1-2]", devices: 2, leaf: rack0, spine: all}
  - {name: "node[10-11]", devices: 2, leaf: rack1, spine: all}
"""
BLOCKS += "BlockSizes=18\n"
MODEL = ("--model", "mixtral-8x7b", "--batch", 32, "--sequence", 4096)


def _data(rankmesh, *arguments):
    return json.loads(rankmesh(*arguments, "--json").out)


@pytest.mark.parametrize(
    ("spec", "cluster"),
    [("dp=4,ep=4", "host=4,leaf=4"), ("tp=2,dp=4,ep=2", "host=4,leaf=4"), ("dp=2,ep=8", "pix=2,host=4,leaf=2")],
)
def test_a_model_decides_and_its_step_is_no_slower(rankmesh, spec, cluster) -> None:
    """The step is shown before and after; experts stay inside a host; a fixed field is not chosen."""
    data = _data(rankmesh, "place", spec, "-c", cluster, *MODEL)
    assert data["step"]["seconds"] <= data["step"]["before"]
    assert data["cost"] <= data["before"]
    assert sum(data["step"]["seconds_by_part"].values()) == pytest.approx(data["step"]["seconds"])
    assert {kind["name"]: kind["level"] for kind in data["kinds"]}["ep"] == "host"
    ran = rankmesh("place", spec, "-c", cluster, *MODEL, "--microbatch", 2, "--zero", 0, "--memory", 500)
    assert "predicted step" in ran.out
    assert "chosen as search does: virtual stages 1, recompute none\n" in ran.err
    assert "this layout fits into a device with no" in rankmesh("place", spec, "-c", cluster, *MODEL, "--memory", 3).err


@pytest.mark.parametrize(
    ("model", "batch", "output"), [("llama3-8b", 32, "has no experts"), ("mixtral-8x7b", 30, "give a multiple of 16")]
)
def test_a_step_that_the_sizes_do_not_cut_is_refused(rankmesh, model, batch, output) -> None:
    """A model without the layers that an axis cuts, and a batch that its replicas do not divide."""
    step = ("--model", model, "--batch", batch, "--sequence", 4096)
    ran = rankmesh("place", "dp=4,ep=4", "-c", "host=4,leaf=4", *step)
    assert (ran.code, output in ran.err) == (3, True), ran.err


def test_a_saved_placement_knows_the_order_of_its_hosts(rankmesh, tmp_path) -> None:
    """show counts crossings where the ranks are, without being told the hosts again, and says so of other hosts."""
    cluster, saved = tmp_path / "cluster.yaml", tmp_path / "placed.json"
    cluster.write_text(CLUSTER)
    hosts = "node1,node10,node11,node2"
    ran = rankmesh("place", "tp=2,dp=2,pp=2", "-c", cluster, "--hosts", hosts, "--save", saved, "-b", "gloo")
    placed = {kind["name"]: kind["level"] for kind in
              _data(rankmesh, "place", saved, "-c", cluster, "-b", "gloo")["kinds"]}  # fmt: skip
    assert 'rm.connect("' in ran.out
    for more in ((), ("--hosts", hosts)):
        shown = {kind["name"]: kind for kind in _data(rankmesh, "show", saved, "--cluster", cluster, *more)["kinds"]}
        assert {name: shown[name]["level"] for name in placed} == placed
        assert shown["tp"]["crossings"]["crossing"] == 0
        assert shown["dp"]["crossing"] == {"leaf": 0}
    other = rankmesh("show", saved, "--cluster", cluster, "--hosts", "node[1-2,10-11]", "--json")
    assert {kind["name"]: kind["crossing"] for kind in json.loads(other.out)["kinds"]}["dp"] == {"leaf": 4}
    assert "its own order of hosts" in rankmesh("show", saved, "--cluster", "host=2,leaf=8").err
    assert rankmesh("show", saved, "--hosts", hosts).code == 2


def test_crossings_of_each_level(rankmesh, tmp_path) -> None:
    """Of 8 expert groups 3 are in two blocks; boards in a host are counted apart from hosts."""
    path = tmp_path / "topology.conf"
    path.write_text(BLOCKS)
    arguments = ("show", "ep=32,dp=8", "--cluster", path, "-g", 4, "--hosts", "node[001-064]")
    kinds = {kind["name"]: kind for kind in _data(rankmesh, *arguments)["kinds"]}
    assert (kinds["ep"]["crossings"]["crossing"], kinds["ep"]["crossing"]) == (8, {"nvlink": 3})
    assert "cross nvlink" in rankmesh(*arguments).out
    arguments = ("show", "tp=16,dp=2", "--cluster", "board=8,host=2,leaf=2")
    assert "32 ranks, 2 nodes of 16, board: 4 of 8" in rankmesh(*arguments).out
    kinds = {kind["name"]: kind for kind in _data(rankmesh, *arguments)["kinds"]}
    assert (kinds["tp"]["crossings"]["crossing"], kinds["tp"]["crossing"]) == (0, {"board": 2})


@pytest.mark.parametrize(
    ("hosts", "level", "size", "fit", "now", "segments"),
    [
        ("node[001-064]", "nvlink", 32, 7, 5, (4, 16)),
        ("node[001-064]", "block", 32, 7, 5, (4, 16)),
        ("node[001-063]", "nvlink", 28, 7, 6, (9, 7)),
        ("node[001-064]", "nvlink", 64, 3, 1, (4, 16)),
        ("node[001-064]", "nvlink", 128, 0, 0, None),
    ],
)
def test_a_constraint_that_does_not_fit(tmp_path, hosts, level, size, fit, now, segments) -> None:
    """How many groups fit whole, and how many segments of how many hosts hold all; none if no block holds one."""
    path = tmp_path / "topology.conf"
    path.write_text(BLOCKS)
    cluster = Cluster.read(path, hosts=hosts, gpus_per_node=4)
    plan = rm.read(f"ep={size},dp={cluster.size // size}")
    with pytest.raises(rm.errors.PlacementError) as error:
        rm.place(plan, cluster, within={"ep": level})
    assert (error.value.fit, error.value.now, error.value.segments) == (fit, now, segments)
    assert error.value.groups == cluster.size // size
    assert (f"--segment={segments[1]}" if segments else "sizes of ep") in str(error.value)


def test_an_allocation_in_segments_fits(rankmesh, tmp_path) -> None:
    """With the hosts that the error asks for the constraint is met, and the output says how Slurm gives them."""
    path = tmp_path / "topology.conf"
    path.write_text(BLOCKS)
    hosts = "node[001-016,019-034,037-052,055-070]"
    ran = rankmesh("place", "ep=32,dp=8", "-c", path, "-g", 4, "--hosts", hosts, "--within", "ep=nvlink")
    assert "start the ranks as now" in ran.out
    assert "sbatch --nodes=64 --segment=8" in ran.out


def test_how_a_placement_is_used(rankmesh, tmp_path) -> None:
    """A hostfile has the host of each rank, so that ranks in its order need no map: groups are on the same hosts."""
    saved, listed = tmp_path / "placed.json", tmp_path / "placed.hosts"
    ran = rankmesh("place", "dp=4,ep=2", "-c", "host=2,leaf=4", "--save", saved, "--hostfile", listed)
    assert f"SLURM_HOSTFILE={listed} srun --distribution=arbitrary" in ran.out.replace("\n", "")
    hosts = listed.read_text().split()
    plan, cluster = rm.read(str(saved)), Cluster.parse("host=2,leaf=4")
    assert hosts == [cluster.host_of(rank).name for rank in plan.mesh.rank_range.ranks(range(8))]
    assert crossings(plan.groups("ep"), cluster).crossing == 0
    assert "--save placed.json" in rankmesh("place", "dp=4,ep=2", "-c", "host=2,leaf=4").out
    assert "as now; the launcher" in rankmesh("place", "ep=2,dp=4", "-c", "host=2,leaf=4").out
