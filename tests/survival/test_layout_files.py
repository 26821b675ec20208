"""Layouts of a job that survives in files, which `rankmesh.readers` reads."""

import pytest

from rankmesh.core import Mesh, recipes
from rankmesh.survival.members import Members

_FILES = {
    "plan.json": recipes.axes(Mesh(dp_shard=16)).to_json(),
    "train.toml": "[parallelism]\ndata_parallel_shard_degree = -1\nexpert_parallel_degree = 4\n",
}


@pytest.mark.parametrize("name", _FILES)
def test_a_file_is_read_at_the_start_alone(tmp_path, name):
    """The plans of later epochs follow from it, and travel: another file at the same path changes nothing."""
    path = tmp_path / name
    path.write_text(_FILES[name], encoding="utf-8")
    first, equal = (Members.first(str(path), world_size=16, shrink="dp_shard") for _ in range(2))
    path.write_text("[parallelism]\ntensor_parallel_degree = 2\n", encoding="utf-8")
    smaller = first.without(range(9, 16))
    assert smaller.plan.mesh.axes["dp_shard"] == {"plan.json": 9, "train.toml": 8}[name]
    assert [view.axes["efsdp"] for view in smaller.plan.mesh.views.values()] == [2] * (name == "train.toml")
    assert [spec.name for spec in smaller.plan.specs] == [spec.name for spec in first.plan.specs]
    other = Members.first("dp_shard=16", world_size=16, shrink="dp_shard")  # on a host with another file
    for member in (equal, other):
        assert member.following(smaller.data).plan == smaller.plan
        assert member.following(smaller.data).without(range(5, 16)).plan == smaller.without(range(5, 16)).plan
    assert str(path) not in str(smaller.data)
