import subprocess
import sys

import rankmesh

CHECK = "import sys; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"

PLANNING = """
import rankmesh as rm
from rankmesh.core import presets
from rankmesh.readers import source
from rankmesh.placement import crossings
plan = rm.recipes.megatron(world_size=64, tp=2, cp=2, pp=2, ep=4, etp=1)
assert rm.Plan.from_json(plan.to_json()).digest == plan.digest
plan.explain(13), plan.sharing, plan.of(13), crossings(plan.groups("dp"), 8)
up = rm.Sharding(rm.Mesh(tp=2), ("tp", None), shape=(4, 4))
moves = rm.Transfer({"up": up}, {"up": rm.Sharding(rm.Mesh(tp=4), ("tp", None), shape=(4, 4))})
assert moves.bytes == moves.lower_bound and moves.digest and moves.of(1).receives
for name in presets.names():
    source.read(name).plan.digest
"""


def torch_after(code):
    """What a fresh interpreter says about torch after running ``code``."""
    return subprocess.run([sys.executable, "-c", code + CHECK], capture_output=True, text=True, check=False)


def test_planning_leaves_torch_alone():
    """Import, planning, topology, digests and presets never load torch."""
    done = torch_after(PLANNING)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_can_fail():
    """The same check reports torch once something has loaded it."""
    done = torch_after("import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n" + PLANNING)
    assert done.returncode == 1
    assert "torch is loaded" in done.stderr


def test_going_live_loads_torch():
    """Asking for what is live is what loads torch, so the first test tests something."""
    done = torch_after(PLANNING + "rm.connect\n")
    assert done.returncode == 1
    assert "torch is loaded" in done.stderr


def test_public_names():
    """The public names are these; a change is a decision."""
    assert rankmesh.__all__ == [
        "AgreementError",
        "Cluster",
        "ClusterError",
        "ConnectError",
        "Group",
        "GroupSpec",
        "Groups",
        "Job",
        "LayoutError",
        "LiveGroup",
        "LiveGroups",
        "LiveJob",
        "LiveRank",
        "Mesh",
        "MissingExtra",
        "NotAMember",
        "Options",
        "Pick",
        "Placed",
        "PlacementError",
        "Plan",
        "PlanError",
        "ProofError",
        "RankmeshError",
        "Sharding",
        "Traffic",
        "Transfer",
        "TransferError",
        "UnknownAxis",
        "UnknownGroup",
        "check",
        "close_all",
        "connect",
        "discover",
        "ends",
        "first",
        "init",
        "last",
        "place",
        "read",
        "recipes",
    ]


def test_public_names_resolve():
    """Every public name exists, the lazily loaded ones too, and is listed by dir()."""
    for name in rankmesh.__all__:
        assert getattr(rankmesh, name) is not None
    assert set(rankmesh.__all__) <= set(dir(rankmesh))
