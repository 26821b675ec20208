"""Four workers of Ray's TorchTrainer: ``python ray_job.py FOLDER``; each writes what it found as JSON.

Then the third of them is killed in a check.
"""

import json
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    """What each worker does."""
    import os

    import torch
    import torch.distributed as dist

    sys.path.insert(0, config["root"])  # a worker is started by Ray, elsewhere
    from tests.check.phases import sabotage

    import rankmesh as rm
    from rankmesh.cli.run.where import where

    before, result = dict(os.environ), {"where": where().to_dict()}
    with rm.init() as me:
        result["me"] = [me.launcher, me.rank, me.world_size, me.local_rank, me.local_world_size]
        with rm.connect("tp=2,dp=*") as groups:
            x = torch.ones(1, device=me.device)
            dist.all_reduce(x, group=groups["dp"].pg)
            result["sum"] = x.item()
            result["measured"] = sorted({row.name for row in groups.measure([4096]).rows})
        result["ok"] = rm.check(rm.read("tp=2,dp=*", world_size=me.world_size), timeout=30).ok
        result["hosts"] = [host.devices for host in rm.discover().hosts]
        try:
            rm.check(rm.read("tp=8"))
        except rm.RankmeshError as error:
            result["wrong"] = str(error)
    result["still there"] = dist.is_initialized()
    result["variables"] = dict(os.environ) == {"GLOO_ENABLE_STORE_V2_API": "1", **before}
    (Path(config["folder"]) / f"{me.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    sabotage("use", "2", "SIGKILL")
    rm.check(rm.read("tp=2,dp=2"), timeout=10)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"folder": sys.argv[1], "root": str(Path(__file__).parents[2])},
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
