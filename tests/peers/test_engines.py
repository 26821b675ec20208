"""Layouts that are read from engines' and trainers' own loaders, beside what these loaders make of real weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.peers import engines_beside, engines_table, fetch

# Every pair of layouts of two frameworks, of seven models.
pytestmark = pytest.mark.timeout(1200)

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    """Every row of the program, once: models under sides, and transfers between sides; it takes many minutes."""
    if not os.environ.get("RANKMESH_ENGINES"):
        pytest.skip("many minutes: RANKMESH_ENGINES=1 make test-peers ARGS='-k engines -n 0'")
    return engines_table.measured(Path(fetch.engines()))


def test_every_model_under_every_side_is_exact_or_refused(rows):
    """7 models, 12 sides: each view of each rank's parameters is what the side's loader put there, every element."""
    cells = [row for row in rows if "side" in row]
    assert len(cells) == len(engines_beside.MODELS) * sum(map(len, engines_beside.SIDES.values()))
    assert [row for row in cells if row["result"] == "wrong"] == []
    assert all(row["compared"] >= row["tensors"] > 0 for row in cells if row["result"] == "exact")
    assert all(row["why"] for row in cells if row["result"] == "refused")


def test_transfers_from_each_side_fill_the_parameters_of_each_other(rows):
    """Whole parameters, padding included, equal what the target's own loader made of the same weights."""
    moved = [row for row in rows if "from" in row]
    assert moved
    assert [row for row in moved if row["wrong"] or not row["tensors"]] == []


def test_the_table_of_the_page_is_the_measured_one(rows):
    """The page lists which cells are exact, and why the others are refused."""
    page = (REPOSITORY / "docs" / "reference" / "layouts.md").read_text(encoding="utf-8")
    assert engines_table.table(rows) in page


JAX = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np
import rankmesh as rm
for cut, shape in ((("dp-tp", None), (16, 6)), ((None, "dp"), (3, 8)), (("tp", "dp"), (4, 8)), (("tp-dp",), (8,))):
    one = rm.Sharding(rm.Mesh(tp=2, dp=4), cut, shape)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))
    theirs = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*one.to_partition_spec()))
    for device, index in theirs.devices_indices_map(shape).items():
        box = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape))
        assert one.of(device.id).boxes == (box,), (cut, device.id, box)
    text = jax.jit(lambda x: x, in_shardings=theirs).lower(jax.ShapeDtypeStruct(shape, np.float32)).as_text()
    mine = one.to_shardy().splitlines()
    assert mine[0] in text, (mine[0], text)
    assert mine[1].removeprefix("#sdy.sharding") in text, (mine[1], text)
print("same")
"""


def test_jax_reads_a_partition_spec_and_prints_shardy_the_same():
    """JAX's own devices_indices_map, and the text that it lowers to, beside ours, on 8 CPU devices."""
    environment = {**os.environ, "PYTHONPATH": str(fetch.engines())}
    done = subprocess.run(
        [sys.executable, "-c", JAX], capture_output=True, text=True, check=False, env=environment, timeout=200
    )
    assert done.stdout == "same\n", done.stderr
