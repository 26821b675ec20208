"""A placement of an engine, which reads no rank map: the devices that each of its hosts shows it, in their order."""

import pytest

from rankmesh import Cluster, place
from rankmesh.core.source import read_plan
from rankmesh.placement.report import device_order

# Pairs of GPUs that NVLinks join across a bus: 0 with 2, 1 with 3; and of six, 0 with 3, 1 with 4, 2 with 5.
CROSSED = "GPU0 X PHB NV4 PHB\nGPU1 PHB X PHB NV4\nGPU2 NV4 PHB X PHB\nGPU3 PHB NV4 PHB X\n"
SIX = "\n".join(
    f"GPU{one} " + " ".join("X" if one == other else "NV4" if (one - other) % 3 == 0 else "SYS" for other in range(6))
    for one in range(6)
)
HALF = "GPU0 X PHB PHB PHB\nGPU1 PHB X PHB PHB\nGPU2 PHB PHB X NV2\nGPU3 PHB PHB NV2 X\n"


def machine(tmp_path, table, **options):
    """The cluster of a table of links."""
    path = tmp_path / "topo.txt"
    path.write_text(table, encoding="utf-8")
    return Cluster.read(path, **options)


@pytest.mark.parametrize(
    ("spec", "table", "hosts", "devices"),
    [
        ("vllm:tp=2,pp=2", CROSSED, None, "0,2,1,3 on every host"),
        ("sglang:tp=2,pp=3", SIX, None, "0,3,1,4,2,5 on every host"),
        ("vllm:tp=2,dp=4", CROSSED, ["a1", "a2"], "0,2,1,3 on every host"),
    ],
)
def test_devices_in_order(tmp_path, spec, table, hosts, devices):
    """The report has CUDA_VISIBLE_DEVICES for the hosts, and no plan file, which an engine does not read."""
    placed = place(read_plan(spec), machine(tmp_path, table, hosts=hosts), within={"tp": "nvlink"})
    report = str(placed.report())
    assert f"use: CUDA_VISIBLE_DEVICES={devices}" in report
    assert "placed.json" not in report
    for order in placed.to_dict()["devices"].values():
        assert ",".join(map(str, order)) == devices.split()[0]


def test_a_job_of_torch_keeps_its_rank_map(tmp_path):
    """Another plan is connected by its file as before, and the order of a host's devices is shown."""
    placed = place(read_plan("tp=2,dp=2"), machine(tmp_path, CROSSED))
    assert device_order(placed) == {"node0": (0, 2, 1, 3)}
    assert "node0: all ranks, on its devices 0,2,1,3" in str(placed.report())
    assert 'rm.connect("placed.json")' in str(placed.report())


def test_devices_without_a_link_are_named(tmp_path):
    """Of four GPUs of which two have an NVLink, a note names both pairs."""
    assert machine(tmp_path, HALF).notes[-1] == "nvlink joins GPUs 2, 3; GPUs 0, 1 have no such link"
    assert not any("no such link" in note for note in machine(tmp_path, CROSSED).notes)
