"""The example trains the same on 12 layouts; each of its collectives, made on another group, is found by its line."""

import pytest
from tests.compare.train_gpt import BREAKS, copy_of, megatron, program_of
from tests.sweeping import every

from rankmesh import sim

pytestmark = pytest.mark.long

LAYOUTS = megatron(
    "tp=2,dp=1", "cp=2,dp=1", "dp=2", "pp=2,dp=1", "dp=2,ep=2", "cp=2,dp=1,ep=2", "tp=2,dp=2", "tp=2,cp=2,dp=1",
    "cp=2,dp=2,ep=2", "cp=2,dp=2,ep=4", "tp=2,pp=2,dp=2", "tp=2,cp=2,pp=2,dp=2,ep=2",
)  # fmt: skip
# The group is used for more than the collective: its inputs are wrong, too, and no change of the collective is right.
WITHOUT_REPAIR = {"vocabulary, forward", "cross-entropy"}


@pytest.mark.nightly
def test_twelve_layouts_are_the_same():
    """Two steps: every loss, norm, weight and moment, on up to 16 ranks."""
    result = sim.compare(program_of("examples.train_gpt.gpt"), LAYOUTS)
    assert result.same, result.report()
    assert len(result.layouts) == 12
    assert {"loss", "norm", "table", "block1.experts.up.exp_avg"} <= set(result.errors[LAYOUTS[-1]])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", every(4, BREAKS))
def test_a_collective_on_another_group_is_found(name, tmp_path):
    """The line that is wrong is named, and a group that is right."""
    case, package = BREAKS[name], f"gpt_{list(BREAKS).index(name)}"
    line = case.apply(copy_of(tmp_path, package))
    seconds = 3.0 if name in WITHOUT_REPAIR else 300.0
    first = sim.compare(program_of(package, steps=1), case.layouts, seconds=seconds).first
    if name in WITHOUT_REPAIR:
        assert (first.operation, first.repair, first.before) == (None, None, f"{case.file}:{line}")
        return
    assert first.site == f"{case.file}:{line}"
    assert first.operation == case.operation
    assert first.repair[0] == "group"
    assert first.settles
