"""Four workers of Ray's TorchTrainer: ``python ray_job.py WHAT FOLDER``; each writes what it found as JSON."""

import json
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    """What each worker does."""
    import torch
    import torch.distributed as dist

    import rankmesh as rm

    with rm.init() as me:
        told = {"launcher": me.launcher, "rank": me.rank, "size": me.world_size, "local": me.local_rank}
        try:
            if config["what"] == "wrong":
                rm.check(rm.read("tp=8"))
            with rm.connect("tp=2,dp=*") as groups:
                x = torch.ones(1, device=me.device)
                dist.all_reduce(x, group=groups["dp"].pg)
                told["sum"] = x.item()
            told["ok"] = rm.check(rm.read("tp=2,dp=*", world_size=me.world_size), timeout=30).ok
        except rm.RankmeshError as error:
            told["error"] = str(error)
    told["still there"] = dist.is_initialized()
    (Path(config["folder"]) / f"{me.rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={"what": what, "folder": folder},
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(storage_path=folder),
    ).fit()
