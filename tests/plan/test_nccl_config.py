"""Megatron-style files of NCCL options."""

from pathlib import Path

import pytest

import rankmesh as rm
from rankmesh.core import with_nccl_config

PLAN = rm.recipes.megatron(16, tp=2, cp=4, hierarchical_cp=(2, 2), timeout=600)


def test_sections_apply_to_the_groups_they_name():
    """Each section sets the options of its group and leaves the others, and what was set before, alone."""
    plan = with_nccl_config(PLAN, "tp: {max_ctas: 8, is_high_priority_stream: true}\ndp_cp: {net_name: IB}\n")
    assert dict(plan.spec("tp").options.nccl) == {"max_ctas": 8}
    assert plan.spec("tp").options.high_priority is True
    assert dict(plan.spec("dp_cp").options.nccl) == {"net_name": "IB"}
    assert plan.spec("tp").options.timeout == 600
    assert plan.spec("pp") == PLAN.spec("pp")
    assert plan.world_size == PLAN.world_size


def test_hcp_stands_for_every_level():
    """Megatron has one section for all levels of hierarchical context parallelism."""
    plan = with_nccl_config(PLAN, {"hcp": {"min_ctas": 2}})
    assert [dict(plan.spec(f"hcp_{level}").options.nccl) for level in range(2)] == [{"min_ctas": 2}] * 2


def test_a_file_is_read(tmp_path):
    """A path is given as a Path; an empty file changes nothing."""
    path = tmp_path / "nccl.yaml"
    path.write_text("pp:\n  cga_cluster_size: 2\n")
    assert dict(with_nccl_config(PLAN, path).spec("pp").options.nccl) == {"cga_cluster_size": 2}
    path.write_text("")
    assert with_nccl_config(PLAN, path) == PLAN


@pytest.mark.parametrize(
    ("config", "error", "token"),
    [
        ("tpp: {max_ctas: 8}", rm.UnknownGroup, "did you mean 'tp'"),
        ("tp: 8", rm.PlanError, r"\{'tp': 8\} is not an NCCL configuration"),
        ("tp: {max_ctas: [1]}", rm.PlanError, "max_ctas"),
        ("tp: {max_ctas: 8", rm.PlanError, "is not valid YAML"),
        (Path("absent.yaml"), rm.PlanError, "cannot be read"),
    ],
)
def test_bad_files_are_refused(config, error, token):
    """What is no configuration of this plan is refused, with the remedy."""
    with pytest.raises(error, match=token):
        with_nccl_config(PLAN, config)
