"""Two dozen faults on eight ranks: each is found at the next check, with tensor and ranks; clean steps pass."""

import pytest
import torch
from tests.guard.faults import FAULTS, LAYOUT, outcome
from tests.sweeping import ALL, every

import rankmesh as rm
from rankmesh import sim

# Every combination of axes that has replicas, up to 16 ranks.
LAYOUTS = (
    "dp=2", "tp=2", "pp=2", "dp=4", "tp=2,dp=2", "dp=2,pp=2", "tp=2,pp=2", "tp=2,dp=2,pp=2", "tp=4,dp=2", "tp=2,dp=4",
    "tp=2,dp=3,pp=2", "tp=4,dp=2,pp=2",
)  # fmt: skip
# Of each layout, to be 10,000 in a sweep of all.
STEPS = -(-10_000 // len(LAYOUTS)) if ALL else 40


def _all(me):
    me.launched()
    with rm.init(timeout=60), rm.connect(LAYOUT) as groups:
        return {name: outcome(groups, fault) for name, fault in FAULTS.items()}


@pytest.mark.long
def test_each_fault_is_found(outcomes):
    """On every rank of gloo the same: the tensor and the ranks; what differs in no replica is not reported."""
    values = [one.value for one in outcomes(8, _all, world=None)]
    assert values == [values[0]] * 8
    found = {name: one and (one[0], tuple(one[1]), *one[2:]) for name, one in values[0].items()}
    when = {True: (0, None), False: (3, 2)}
    assert found == {
        name: fault.tensor and (fault.tensor, fault.found, *when[fault.always]) for name, fault in FAULTS.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("layout", every(3, LAYOUTS))
def test_clean_steps_raise_nothing(layout):
    """Kernels that give other numbers on each rank, before their sums; RANKMESH_TEST_SWEEP=all: 10,000 steps."""

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
        for step in range(STEPS):
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

    assert set(sim.run(program, layout)) == {STEPS - 1}
