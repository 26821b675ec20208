import torch
from tests.torch_lacks import kept_order
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.errors import ConnectError, UnknownAxis

PLAN = rm.Plan(
    rm.Mesh(tp=2, dp=2, pp=2).with_view("expert", ep=4, pp=2),
    [rm.GroupSpec(name) for name in ("tp", "dp", "pp")]
    + [rm.GroupSpec("ep", view="expert"), rm.GroupSpec("embd", "pp", pick=(0,))],
)


def _mesh(me, plan, axes):
    with rm.connect(plan) as groups:
        before = registries()
        mesh = groups.device_mesh(*axes)
        tensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0), Replicate()])
        total = DTensor.from_local(torch.ones(1), mesh, [Shard(0), Replicate()]).sum().full_tensor().item()
        return {
            "new": registries() != before,
            "mesh": mesh.mesh.tolist(),
            "names": list(mesh.mesh_dim_names),
            "same": [mesh.get_group(axis) is groups[axis].pg for axis in axes],
            "sub": [mesh[axis].get_group() is groups[axis].pg for axis in axes],
            "coordinate": mesh.get_coordinate(),
            "local": tensor.to_local().tolist(),
            "full": torch.equal(tensor.full_tensor(), torch.arange(8.0).reshape(4, 2)),
            "total": total,
        }


def test_a_device_mesh_over_our_groups(ranks):
    """8 ranks: the mesh and its sub-meshes use our process groups, make none, and serve DTensor."""
    axes = ("dp", "tp")
    for rank, seen in enumerate(ranks(8, _mesh, PLAN, axes)):
        place, base = PLAN.mesh.coordinate(rank), 4 * (rank // 4)
        assert seen["new"] is False
        assert seen["mesh"] == [[base, base + 1], [base + 2, base + 3]]
        assert seen["names"] == list(axes)
        assert seen["same"] == seen["sub"] == [True, True]
        assert seen["coordinate"] == [place["dp"], place["tp"]]
        assert seen["local"] == [[4.0 * place["dp"] + row, 4.0 * place["dp"] + row + 1] for row in (0, 2)]
        assert (seen["full"], seen["total"]) == (True, 2.0)


def _connected_twice(me, plan):
    results = []
    for _ in range(2):
        with rm.connect(plan) as groups:
            mesh = groups.device_mesh("tp")
            total = DTensor.from_local(torch.full((2, 2), 1.0 + me.rank), mesh, [Shard(0)]).sum()
            results.append(total.full_tensor().item())
            del mesh, total
    return results


def test_a_device_mesh_over_groups_that_are_connected_again(ranks):
    """2 ranks: torch's caches know a mesh by its ranks, and do not lead to the groups that are closed."""
    plan = rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp")])
    assert ranks(2, _connected_twice, plan) == [[12.0, 12.0]] * 2


def _shuffled(me, plan):
    with rm.connect(plan) as groups:
        mesh = groups.device_mesh("dp", "tp")
        one = groups.device_mesh("tp")
        gathered = DTensor.from_local(torch.tensor([me.rank]), one, [Shard(0)]).full_tensor()
        return [mesh.mesh.tolist(), mesh.get_coordinate(), gathered.tolist(), list(groups["tp"].ranks)]


@kept_order
def test_a_device_mesh_over_permuted_ranks(ranks):
    """4 ranks in another order: the mesh lists them so, and a DTensor is put together in that order."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2, rank_map=[3, 1, 0, 2]), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])
    for rank, (mesh, coordinate, gathered, members) in enumerate(ranks(4, _shuffled, plan)):
        assert mesh == [[3, 1], [0, 2]]
        assert coordinate == [plan.mesh.coordinate(rank)["dp"], plan.mesh.coordinate(rank)["tp"]]
        assert gathered == members


def _in_spec_order(me, plan, given):
    with rm.connect(plan) as groups:
        return [me.error(ConnectError, groups.device_mesh, *axes)["order"] for axes in given]


def test_axes_in_the_order_of_a_spec_are_refused(ranks):
    """8 ranks: torch would make the mesh and refuse its slices later; the error has the order that works."""
    plan = rm.Plan(rm.Mesh(tp=2, cp=1, dp=2, pp=2), [rm.GroupSpec(name) for name in ("tp", "cp", "dp", "pp")])
    given = [("tp", "dp"), ("tp", "cp", "dp", "pp"), ("dp", "pp", "tp")]
    expected = [["dp", "tp"], ["pp", "cp", "dp", "tp"], ["pp", "dp", "tp"]]
    for orders in ranks(8, _in_spec_order, plan, given):
        assert [list(order) for order in orders] == expected


def _kinds_across(me, plan):
    with rm.connect(plan) as groups:
        return [groups.device_mesh(*axes).mesh.tolist() for axes in (("zero", "tp"), ("tp", "zero"))]


def test_kinds_of_which_neither_is_slower_have_any_order(ranks):
    """8 ranks: zero is along the axes on both sides of tp, so torch's order says nothing."""
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("zero", "cp-dp")]
    whole, turned = ranks(8, _kinds_across, rm.Plan(rm.Mesh(cp=2, tp=2, dp=2), kinds))[0]
    assert whole == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert turned == [list(row) for row in zip(*whole, strict=True)]


def _refused(me, plan):
    with rm.connect(plan) as groups:
        view = groups.device_mesh("pp", "ep", view="expert")
        after = [
            me.error(UnknownAxis, groups.device_mesh, "dpp"),
            me.error(ConnectError, groups.device_mesh, "cp"),
            view.mesh.tolist(),
        ]
    after.append(me.error(ConnectError, groups.device_mesh, "tp"))
    return after


def test_an_axis_without_a_group_is_refused(ranks):
    """8 ranks: an unknown axis, an axis that only a pick is along, and closed groups; a view works."""
    mesh = rm.Mesh(tp=2, cp=1, dp=2, pp=2).with_view("expert", ep=4, pp=2)
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("pp"), rm.GroupSpec("ep", view="expert")]
    for unknown, without, view, closed in ranks(8, _refused, rm.Plan(mesh, kinds)):
        assert unknown["name"] == "dpp"
        assert "GroupSpec('cp', 'cp')" in without["message"]
        assert view == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert "closed" in closed["message"]
