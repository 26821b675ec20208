"""A program: every model under every side, against that side's own loader on random weights; rows of JSON.

``python -m tests.peers.engines_beside transformers vllm``: one process, sides that are named. A row has ``model``,
``side`` and ``result``: "exact", with the tensors that were compared, or "refused" and why.
"""

import json
import sys
import warnings

import torch

from rankmesh import sim
from rankmesh.backend.fake_world import fake_world
from rankmesh.errors import LayoutError
from rankmesh.transfer import Transfer
from rankmesh.transfer.layouts.layout import read
from rankmesh.transfer.layouts.sides import side

BASE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 128}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Llama 3": BASE | {"model_type": "llama"},
    "Qwen 3": BASE | {"model_type": "qwen3"},
    "Qwen 3 MoE": BASE | MIXTURE | {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1,
                                    "mlp_only_layers": []},
    "Mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepSeek-V3": BASE | MIXTURE | {
        "model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 3, "n_routed_experts": 8,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 8,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    "GPT-OSS": BASE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma 3": BASE | {"model_type": "gemma3_text"},
}  # fmt: skip
SIDES = {
    "transformers": ["transformers:tp=2", "transformers:tp=2,fsdp=2", "transformers:fsdp=4",
                     "transformers:tp=2,fsdp=2,ep=2", "transformers:dp_replicate=2,fsdp=2", "transformers:pp=2",
                     "transformers:tp=2,pp=2"],
    "vllm": ["vllm:tp=2", "vllm:tp=4", "vllm:tp=2,pp=2", "vllm:tp=2,dp=2", "vllm:tp=2,dp=2,ep=1"],
}  # fmt: skip


def random_weights(shapes):
    """A checkpoint of random numbers; no two of a tensor are likely to be equal."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for name, (shape, dtype) in shapes.items()
    }


def loaded(one, whole):
    """What the side's own loader makes of real weights, on each rank."""
    made = []
    for rank in range(one.mesh.size):
        with fake_world(rank, one.mesh.size):
            # A rank has a checkpoint of its own: GPT-OSS's loader writes zeros into what it read.
            parameters = one.load(rank, {name: tensor.clone() for name, tensor in whole.items()})
            made.append({name: _local(tensor).detach().clone() for name, tensor in parameters.items()})
    return made


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wrong(layout, ranks, whole):
    """Tensors of which an element of a rank's parameters is not what the sharding says; and how many were compared."""
    bad, compared = [], 0
    for rank, parameters in enumerate(ranks):
        for name, view in layout.views(parameters, rank).items():
            shard, compared = layout.shardings[name].of(rank), compared + 1
            for box, place in zip(shard.boxes, shard.places, strict=True):
                there = tuple(slice(at, at + high - low) for at, (low, high) in zip(place, box, strict=True))
                if not torch.equal(view[there], whole[name][tuple(slice(*ends) for ends in box)].to(view.dtype)):
                    bad.append(f"{name} on rank {rank}")
    return bad, compared


def moved(source, target, source_ranks, target_ranks):
    """Tensors that a transfer from one side's parameters into the other's empty ones left wrong."""
    names = source.shardings.keys() & target.shardings.keys()
    moves = Transfer(*({name: layout.shardings[name] for name in sorted(names)} for layout in (source, target)))
    empty = [{name: torch.zeros_like(tensor) for name, tensor in parameters.items()} for parameters in target_ranks]

    def run():
        rank = torch.distributed.get_rank()
        mine = source.views(source_ranks[rank], rank) if rank < len(source_ranks) else {}
        into = target.views(empty[rank], rank) if rank < len(empty) else {}
        moves.run({n: t for n, t in mine.items() if n in names}, {n: t for n, t in into.items() if n in names})

    sim.run(run, max(len(source_ranks), len(target_ranks)))
    bad = []
    for rank, (got, expected) in enumerate(zip(empty, target_ranks, strict=True)):
        filled = {place.parameter for name, place in target.places.get(rank, {}).items() if name in names}
        # The whole parameters: what no tensor goes to is zero in both, as is padding.
        bad += [f"{name} on rank {rank}" for name in sorted(filled) if not torch.equal(got[name], expected[name])]
    return bad, len(names)


def write_row(row):
    """One line; what the frameworks themselves print comes between."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(sides):
    """One row for each model under each side, then one for each pair of layouts of two frameworks."""
    for model, config in MODELS.items():
        known = {}
        for text in [text for name in sides for text in SIDES[name]]:
            row = {"model": model, "side": text}
            try:
                one = side(text, config)
                layout = read(one)
            except LayoutError as error:
                write_row(row | {"result": "refused", "why": str(error)})
                continue
            whole = random_weights(one.weights)
            ranks = loaded(one, whole)
            bad, compared = wrong(layout, ranks, whole)
            result = {"result": "wrong" if bad else "exact", "wrong": bad[:5], "compared": compared,
                      "tensors": len(layout.shardings), "refused": dict(layout.refused)}  # fmt: skip
            write_row(row | result)
            known[text] = layout, ranks
        for source, (from_layout, from_ranks) in known.items():
            for target, (to_layout, to_ranks) in known.items():
                if source.partition(":")[0] != target.partition(":")[0]:
                    bad, count = moved(from_layout, to_layout, from_ranks, to_ranks)
                    row = {"model": model, "from": source, "to": target, "tensors": count, "wrong": bad[:5]}
                    write_row(row)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:] or SIDES)
