"""What Megatron's head and its users take from the three modules is there: ``taken_names.json`` says what they take."""

import json
from pathlib import Path

import pytest

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, process_groups_config

TAKEN = json.loads(Path(__file__).with_name("taken_names.json").read_text(encoding="utf-8"))
MODULES = {
    "parallel_state": parallel_state,
    "hyper_comm_grid": hyper_comm_grid,
    "process_groups_config": process_groups_config,
}


@pytest.mark.parametrize("repository", TAKEN)
def test_every_name_is_there(repository):
    """Every name that a repository takes at its commit is a name of the drop-in."""
    lacking = [
        (module, name)
        for module, local in MODULES.items()
        for name in TAKEN[repository][module]
        if not hasattr(local, name)
    ]
    assert lacking == []


def test_private_names_of_grids_are_megatrons():
    """The base view's name, the class of views, and who is a member, as Megatron's own code uses them."""
    grid = hyper_comm_grid
    view = grid._RankViewSpec(grid._BASE_VIEW_NAME, [2], ["tp"], shared_dims=[])
    assert (view.name, view.shape, view.dim_names, view.shared_dims) == ("base", [2], ["tp"], [])
    outside = grid.dist.GroupMember.NON_GROUP_MEMBER
    assert [grid._is_process_group_member(group) for group in (None, outside, object())] == [False, False, True]
