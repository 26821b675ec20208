import torch
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


# Axes on 8 ranks, and torch's order of them, which the error has where they are in that of a SPEC.
IN_SPEC_ORDER = {
    ("cp", "tp"): ["tp", "cp"],
    ("cp", "pp", "tp", "dp"): ["dp", "pp", "tp", "cp"],
    ("dp", "cp", "tp"): ["dp", "tp", "cp"],
}


def _odd_axes(me):
    """What is made, and what is refused, of a plan without a group along y."""
    mesh = rm.Mesh(cp=2, tp=2, dp=2, pp=1).with_view("expert", ep=4, edp=2).with_view("other", x=2, y=4)
    kinds = [rm.GroupSpec(name) for name in ("cp", "tp", "dp", "pp")] + [rm.GroupSpec("zero", "cp-dp")]
    kinds += [rm.GroupSpec("ep", view="expert"), rm.GroupSpec("edp", view="expert")]
    with rm.connect(rm.Plan(mesh, kinds)) as groups:
        made = [groups.device_mesh(*axes) for axes in (("zero", "tp"), ("tp", "zero"))]
        made.append(groups.device_mesh("edp", "ep", view="expert"))
        orders = [list(me.error(ConnectError, groups.device_mesh, *axes)["order"]) for axes in IN_SPEC_ORDER]
        refused = [me.error(UnknownAxis, groups.device_mesh, "dpp")]
        refused.append(me.error(ConnectError, groups.device_mesh, "y", view="other"))
    refused.append(me.error(ConnectError, groups.device_mesh, "tp"))
    return [one.mesh.tolist() for one in made], orders, [error["message"] for error in refused]


def test_axes_in_any_order_and_without_a_group(ranks):
    """8 ranks: a view and kinds of which neither is slower are meshes; others are refused, with the order that works.

    Torch would make a mesh of axes in the order of a SPEC, and refuse its slices later.
    """
    found = ranks(8, _odd_axes)
    zero = [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found[0][0] == [zero, [list(row) for row in zip(*zero, strict=True)], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    for _, orders, (unknown, without, closed) in found:
        assert orders == list(IN_SPEC_ORDER.values())
        assert "'dpp'" in unknown
        assert "GroupSpec('y', 'y')" in without
        assert "closed" in closed
