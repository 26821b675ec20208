"""A program that saves a small checkpoint with Megatron-Core, as torch_dist: ``megatron_saves.py FOLDER PORT``."""

import sys
import warnings

import torch
import torch.distributed as dist

LAYERS, SHAPE = 3, (4, 6)


def layer(number):
    """The weight of a layer."""
    return torch.arange(24.0).reshape(SHAPE).bfloat16() + 100 * number


def main(folder, port):
    """Save layers stacked in one tensor, a table, and an object, as a training run does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    whole, key = ShardedTensor.from_rank_offsets, "decoder.layers.mlp.linear_fc2.weight"
    state = {number: whole(key, layer(number), (0, number, LAYERS), prepend_axis_num=1) for number in range(LAYERS)}
    state["table"] = whole("embedding.word_embeddings.weight", torch.arange(40.0).reshape(10, 4))
    state["extra"] = ShardedObject("decoder.layers.mlp.linear_fc2._extra_state", b"state", (1,), (0,))
    dist_checkpointing.save({"model": state, "iteration": 3}, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*sys.argv[1:])
