"""Two dozen faults on eight gloo ranks: each is found at the next check, with tensor and ranks; clean steps pass."""

import os

import pytest
import torch
from tests.guard.faults import FAULTS, LAYOUT, outcome
from tests.sockets import free_port
from tests.sweeping import every

import rankmesh as rm
from rankmesh import sim
from rankmesh.launch.table import torchrun_variables

pytestmark = pytest.mark.long

# Every combination of axes that has replicas, up to 16 ranks.
LAYOUTS = (
    "dp=2", "tp=2", "pp=2", "dp=4", "tp=2,dp=2", "dp=2,pp=2", "tp=2,pp=2", "tp=2,dp=2,pp=2", "tp=4,dp=2", "tp=2,dp=4",
    "tp=2,dp=3,pp=2", "tp=4,dp=2,pp=2",
)  # fmt: skip


def _all(me, port):
    os.environ.update(torchrun_variables(me.rank, me.size, local_rank=me.rank, local_world_size=me.size, port=port))
    with rm.init(timeout=60), rm.connect(LAYOUT) as groups:
        return {name: outcome(groups, fault) for name, fault in FAULTS.items()}


def test_each_fault_is_found(outcomes):
    """On every rank the same: the tensor and the ranks; what is no difference between replicas is not reported."""
    values = [one.value for one in outcomes(8, _all, free_port(), world=None)]
    assert values == [values[0]] * 8
    expected = {}
    for name, fault in FAULTS.items():
        when = (0, None) if fault.always else (3, 2)
        expected[name] = None if fault.tensor is None else [fault.tensor, [*fault.found], *when]
    assert values[0] == expected
    assert sum(one is not None for one in expected.values()) > 20


@pytest.mark.parametrize("layout", every(3, LAYOUTS))
def test_clean_steps_raise_nothing(layout):
    """Kernels that give other numbers on each rank, before their sums."""

    def program(groups):
        torch.manual_seed(groups.rank)
        sizes = groups.plan.mesh.axes
        noise = torch.Generator().manual_seed(groups.rank)
        mesh = groups.plan.mesh
        up, norm = torch.zeros(4), torch.zeros(3)
        shardings = {
            "up": rm.Sharding(mesh, ("tp",) if "tp" in sizes else None, shape=(4 * sizes.get("tp", 1),)),
            "norm": rm.Sharding(mesh, shape=(3,)),
        }
        guard = rm.Guard(groups, {"up": up, "norm": norm}, shardings, every=1)
        for step in range(40):
            gradient = torch.randn(4, generator=noise)
            for axis in sizes:
                if axis != "tp":
                    torch.distributed.all_reduce(gradient, group=groups[axis].pg)
            up += gradient
            gradient = torch.randn(3, generator=noise)
            for axis in sizes:
                torch.distributed.all_reduce(gradient, group=groups[axis].pg)
            norm += gradient
            guard.sum("norm", float(norm.sum()), over="-".join(sizes))
            guard.step(step)
        guard.check()
        return guard.equal_at

    assert set(sim.run(program, layout)) == {39}
