import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.dialects import dry
from tests.torch_lacks import meshes_of_meshes
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh.backend.registries import registries

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
NAMES = ("accelerate", "deepspeed", "device_mesh", "ezpz", "fairscale", "nanotron", "process_groups")


def after(name):
    """What a page on one of `rankmesh.dialects` says to write instead."""
    (code,) = re.findall(r"```python\n# after\n(.*?)```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    return code


def _runs(me, name):
    before = registries()["pg_map"]
    given = {
        "rm": rm,
        "dist": dist,
        "x": torch.ones(1),
        "device": "cpu",
        "backend": "gloo",
        "init_device_mesh": init_device_mesh,
        # The systems themselves, as far as the pages use them.
        "ParallelismConfig": lambda **sizes: SimpleNamespace(**sizes),
        "deepspeed": SimpleNamespace(initialize=lambda mpu, **_: [dry.members(mpu.get_data_parallel_group())]),
        "model": None,
        "config": None,
    }
    exec(after(name), given)  # noqa: S102  - the page's own example
    return [given["x"].item(), registries()["pg_map"] - before]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*NAMES, pytest.param("torchtitan", marks=meshes_of_meshes)])
def test_a_page_does_what_it_says(ranks, name):
    """8 ranks: the code of the page runs, reduces over its group, and leaves what it says that it leaves."""
    reduced = {"ezpz": 2, "fairscale": 2, "nanotron": 2, "process_groups": 2}.get(name, 1)
    for total, left in ranks(8, _runs, name):
        assert total == reduced
        assert (left > 0) == (name in ("device_mesh", "process_groups"))
