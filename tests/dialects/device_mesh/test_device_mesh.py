import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry
from tests.torch_lacks import JOINS_APART
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.dialects.device_mesh import adopt, plan_of
from rankmesh.errors import ConnectError, LayoutError

NAMES = ("pp", "dp", "tp")


def _total(pg):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=pg)
    return total.item()


# -- live groups from a DeviceMesh -------------------------------------------------------------------------------


def _adopted(me):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    before, ranks = registries(), torch.arange(8).reshape(2, 2, 2)
    with adopt(mesh) as groups:
        assert registries() == before
        assert [groups[name].rank for name in NAMES] == list(mesh.get_coordinate())
        for dim, name in enumerate(NAMES):
            row = dry.row_of(me.rank, ranks.movedim(dim, -1).reshape(-1, 2).tolist())
            assert groups[name].pg is mesh.get_group(name)
            assert list(groups[name].ranks) == row
            assert _total(groups[name].pg) == sum(row)
        again = groups.device_mesh()
        assert torch.equal(again.mesh, mesh.mesh)
        assert again.mesh_dim_names == NAMES
        assert groups.report().groups[0].backend == "gloo"
    me.error(ConnectError, lambda: groups["tp"])
    assert registries() == before
    assert _total(mesh.get_group("tp")) == sum(row)


def test_groups_of_a_device_mesh_are_adopted(ranks):
    """8 ranks: the mesh's own process groups under our names, none made, none destroyed by close."""
    ranks(8, _adopted)


def _covers_the_world(me):
    """torch gives the one dimension that spans the world the world itself, and equal dimensions a group each."""
    with adopt(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))) as groups:
        seen = [groups["dp"].pg is dist.group.WORLD]
    mesh = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    with adopt(mesh) as groups:
        seen += [group.pg is mesh.get_group(name) for name, group in groups.items()]
    return [*seen, dist.is_initialized(), _total(dist.group.WORLD)]


def test_adopted_worlds_survive(ranks):
    """4 ranks: closing an adopted dimension that is the world leaves the world; equal dimensions keep their own."""
    assert ranks(4, _covers_the_world) == [[True] * 5 + [6]] * 4


def _permuted(me):
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "tp"))
    if me.rank in (1, 3):
        orders = me.error(ConnectError, adopt, mesh)
        assert (list(orders["group_ranks"]), list(orders["mesh_ranks"])) == ([1, 3], [3, 1])
    # Made anew from the same plan, a rank's place in each group is its place in the mesh.
    with rm.connect(plan_of(mesh)) as groups:
        again = groups.device_mesh("dp", "tp")
        assert again.mesh.tolist() == [[3, 1], [0, 2]]
        assert [groups["dp"].rank, groups["tp"].rank] == list(again.get_coordinate())
        assert [dist.get_rank(groups["dp"].pg), dist.get_rank(groups["tp"].pg)] == list(mesh.get_coordinate())
        local, meshes = torch.tensor([me.rank]), (again["tp"], groups.device_mesh("tp"))
        return [DTensor.from_local(local, one, [Shard(0)]).full_tensor().tolist() for one in meshes]


def test_a_permuted_mesh(ranks):
    """4 ranks: torch sorted the members of a group, so adopting is refused; connecting the plan keeps the order."""
    assert ranks(4, _permuted) == [[[0, 2]] * 2, [[3, 1]] * 2] * 2


def _part(me):
    """A mesh over the last two of four ranks."""
    mesh = DeviceMesh("cpu", torch.tensor([2, 3]), mesh_dim_names=("tp",))
    with adopt(mesh) as groups:
        return [list(groups), groups["tp"].rank if "tp" in groups else None]


def test_a_mesh_over_part_of_the_world(ranks):
    """4 ranks: members get their group, the others none."""
    assert ranks(4, _part) == [[[], None], [[], None], [["tp"], 0], [["tp"], 1]]


# -- a plan from a DeviceMesh ------------------------------------------------------------------------------------


@dry.PROPERTIES
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_plan_has_the_groups_of_torch(shape, data):
    """Dry worlds of up to 256 ranks, 1 to 4 dimensions: places and members are DeviceMesh's, and back."""
    names = tuple(f"axis_{dim}" for dim in range(len(shape)))
    world = int(torch.tensor(shape).prod())
    rank = data.draw(st.integers(0, world - 1))
    with dry.world(rank, world):
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
        plan = plan_of(mesh)
        assert plan.mesh.axes == dict(zip(names[::-1], shape[::-1], strict=True))
        assert plan.mesh.coordinate(rank) == dict(zip(names[::-1], mesh.get_coordinate()[::-1], strict=True))
        with rm.connect(plan) as groups:
            for name in names:
                assert dry.members(mesh.get_group(name)) == list(groups[name].ranks)
            assert torch.equal(groups.device_mesh().mesh, mesh.mesh)
        with adopt(mesh) as adopted:
            assert [adopted[name].pg for name in names] == mesh.get_all_groups()


def _unusable(me):
    unnamed = init_device_mesh("cpu", (2, 2))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with adopt(unnamed, names=("dp", "tp")) as groups:
        given_names = [_total(groups["tp"].pg), list(groups)]
    refused = [
        me.error(LayoutError, plan_of, unnamed)["names"],
        me.error(LayoutError, plan_of, unnamed, names=("dp",))["names"],
        me.error(LayoutError, plan_of, named["dp"])["names"],
    ]
    return [*refused, given_names]


def test_meshes_that_are_no_plan(ranks):
    """4 ranks: without names, and a slice whose ranks are not contiguous, are refused; names can be given."""
    for rank, found in enumerate(ranks(4, _unusable)):
        assert found == [None, ["dp"], ["dp"], [1 if rank < 2 else 5, ["tp", "dp"]]]


# -- a DeviceMesh from live groups -------------------------------------------------------------------------------

FLAT = rm.Plan(
    rm.Mesh(tp=2, cp=2, dp=2),
    [rm.GroupSpec(name) for name in ("tp", "cp", "dp")]
    + [rm.GroupSpec("dp_cp", "dp-cp"), rm.GroupSpec("dp_tp", "dp-tp"), rm.GroupSpec("all", "dp-cp-tp")],
)
JOINED = {"dp_cp": ("dp", "cp"), "all": ("dp", "cp", "tp"), **({"dp_tp": ("dp", "tp")} if JOINS_APART else {})}


def _flattened(me):
    with rm.connect(FLAT) as groups:
        before = registries()
        mesh = groups.device_mesh("dp", "cp", "tp", flattened=JOINED)
        me.error(ConnectError, groups.device_mesh, flattened={"cp_tp": ("cp", "tp")})
        assert registries() == before
        theirs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        for name, axes in JOINED.items():
            theirs[axes]._flatten(name)
        for name in JOINED:
            assert torch.equal(mesh[name].mesh, theirs[name].mesh)
            assert mesh[name].get_local_rank() == theirs[name].get_local_rank() == groups[name].rank
            pgs = (mesh.get_group(name), mesh[name].get_group(), groups[name].pg)
            assert pgs[0] is pgs[1] is pgs[2]
            local = torch.tensor([me.rank])
            wholes = [DTensor.from_local(local, one[name], [Shard(0)]).full_tensor() for one in (mesh, theirs)]
            assert torch.equal(*wholes)


def test_flattened_dimensions(ranks):
    """8 ranks: joined dimensions are torch's _flatten, neighbours or not, over our groups, and serve DTensor."""
    ranks(8, _flattened)


def _named(me):
    specs = [rm.GroupSpec("slow", "dp-cp", timeout=600, share=False), rm.GroupSpec("zero", "dp-cp", share=False)]
    specs += [rm.GroupSpec("dp_slow", "dp", timeout=600, share=False), *map(rm.GroupSpec, ("dp", "cp", "tp"))]
    either = [rm.GroupSpec(name, "tp", share=False) for name in ("one", "other")]
    with rm.connect(rm.Plan(rm.Mesh(tp=8), either)) as groups:
        me.error(ConnectError, groups.device_mesh, "tp")
    with rm.connect(rm.Plan(rm.Mesh(tp=2, cp=2, dp=2), specs)) as groups:
        single = groups.device_mesh("dp")
        mesh = groups.device_mesh("dp", "cp", "tp", flattened={"zero": ("dp", "cp")})
        along = groups.device_mesh("zero", "tp")
        assert mesh["zero"].get_group() is along["zero"].get_group() is groups["zero"].pg
        assert along.mesh.shape == (4, 2)
        assert single.get_group() is mesh["dp"].get_group() is groups["dp"].pg
        return me.error(ConnectError, groups.device_mesh, flattened={"dp_cp": ("dp", "cp")})["found"]


def test_groups_are_taken_by_name(ranks):
    """8 ranks: of two groups with the same members the one that is named; where none is, both are named to choose."""
    assert ranks(8, _named) == [["slow", "zero"]] * 8
