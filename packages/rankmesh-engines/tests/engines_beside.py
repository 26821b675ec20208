"""A program: every model under every side, against that side's own loader on random weights; rows of JSON.

``python engines_beside.py all`` takes minutes, ``quick`` a slice of it. A row has ``model``, ``side`` and
``result``: "exact", with the tensors that were compared, or "refused" and why; or ``from`` and ``to`` of a transfer.

``again`` reads layouts after others have been read, and gives a row for each: whether it is the same.
``kernels`` gives a row for each model, side and format of quantisation: what has a sharding, what is refused and why.
"""

import json
import resource
import sys
import warnings
from importlib import import_module

import torch
from tests.peers import stand_ins

from rankmesh import sim
from rankmesh.backend.fake_world import fake_world
from rankmesh.errors import LayoutError
from rankmesh.readers.model import described
from rankmesh.transfer import Transfer
from rankmesh.transfer.layouts.known import known
from rankmesh.transfer.layouts.sides import side

# What it needs is 2 GB: beyond this, an error that says where, and no machine without memory.
MEMORY = 12 << 30
BASE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": 4, "vocab_size": 100, "max_position_embeddings": 128}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Llama 3": BASE | {"model_type": "llama"},
    "Qwen 3": BASE | {"model_type": "qwen3"},
    "Qwen 3 MoE": BASE | MIXTURE | {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1,
                                    "mlp_only_layers": []},
    "Mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepSeek-V3": BASE | MIXTURE | {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 8,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 8,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    # SGLang's sinks are bfloat16 and its biases of experts float32, whatever the model is.
    "GPT-OSS": BASE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "bfloat16"},
    "Gemma 3": BASE | {"model_type": "gemma3_text"},
}  # fmt: skip
SIDES = {
    "transformers": ["transformers:tp=2", "transformers:tp=2,fsdp=2", "transformers:fsdp=4",
                     "transformers:tp=2,fsdp=2,ep=2", "transformers:dp_replicate=2,fsdp=2", "transformers:pp=2",
                     "transformers:tp=2,pp=2"],
    "vllm": ["vllm:tp=2", "vllm:tp=4", "vllm:tp=2,pp=2", "vllm:tp=2,dp=2", "vllm:tp=2,dp=2,ep=1"],
    "sglang": ["sglang:tp=2", "sglang:tp=4", "sglang:tp=2,pp=2", "sglang:tp=4,ep=4", "sglang:tp=4,dp=2",
               "sglang:tp=4,dp=2,ep=2"],
    # The vocabulary of 100 is padded to 256, and to 104.
    "megatron": ["megatron:tp=2", "megatron:tp=4,vocab=1", "megatron:tp=2,pp=2,first=1,vocab=4",
                 "megatron:dp=2,pp=2,vpp=2,vocab=1", "megatron:tp=2,dp=2,ep=2,vocab=1",
                 "megatron:tp=2,pp=2,ep=2,etp=1,vocab=1"],
}  # fmt: skip
# What each change is checked with: one of each kind of model and of parallelism.
QUICK = {
    "models": ["Llama 3", "Qwen 3 MoE"],
    "sides": ["transformers:tp=2,fsdp=2", "vllm:tp=2,dp=2", "sglang:tp=4,dp=2,ep=2",
              "megatron:tp=2,pp=2,first=1,vocab=4", "megatron:tp=2,pp=2,ep=2,etp=1,vocab=1"],
}  # fmt: skip
WHOLE = {"models": list(MODELS), "sides": [text for texts in SIDES.values() for text in texts]}

# A quantization_config of each family: blocks of fp8 but for one layer's qkv, packed integers, experts alone.
FORMATS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
KERNELS = [("Llama 3", "fp8"), ("Llama 3", "awq"), ("Qwen 3 MoE", "gptq"), ("GPT-OSS", "mxfp4")]


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
        for name, view in layout.shards(parameters, rank).items():
            shard, compared = layout.shardings[name].of(rank), compared + 1
            for box, place in zip(shard.boxes, shard.places, strict=True):
                there = tuple(slice(at, at + high - low) for at, (low, high) in zip(place, box, strict=True))
                if not torch.equal(view[there], whole[name][tuple(slice(*ends) for ends in box)].to(view.dtype)):
                    bad.append(f"{name} on rank {rank}")
    return bad, compared


def unlike(layout, text, config):
    """Tensors of which rankmesh's own table says something else than a side's loader; None if it has no such layout."""
    table = known(text, config, described)
    if table is None:
        return None
    ranks = layout.mesh.rank_range.ascending.tolist()
    names, known_names = ({*one.shardings, *one.refused} for one in (layout, table))
    wrong = names ^ known_names
    for name, ours in table.shardings.items():  # what it refuses, a loader may have placed
        theirs = layout.shardings.get(name)
        shards = [(ours.of(rank), theirs.of(rank)) for rank in ranks] if theirs else []
        # A rank whose rows are all padding has a parameter, which a loader leaves as it is.
        same = [one == other or not (one.boxes or other.boxes) for one, other in shards]
        if not same or not all(same) or theirs.dtype != ours.dtype:
            wrong.add(name)
    return sorted(wrong)


def offered(text, config):
    """Whether rankmesh's own table has a layout."""
    try:
        return known(text, config, described) is not None
    except LayoutError:
        return False


def moved(source, target, source_ranks, target_ranks):
    """Tensors that a transfer from one side's parameters into the other's empty ones left wrong."""
    names = source.shardings.keys() & target.shardings.keys()
    moves = Transfer(*({name: layout.shardings[name] for name in sorted(names)} for layout in (source, target)))
    empty = [{name: torch.zeros_like(tensor) for name, tensor in parameters.items()} for parameters in target_ranks]

    def run():
        rank = torch.distributed.get_rank()
        mine = source.shards(source_ranks[rank], rank) if rank < len(source_ranks) else {}
        into = target.shards(empty[rank], rank) if rank < len(empty) else {}
        moves.run({n: t for n, t in mine.items() if n in names}, {n: t for n, t in into.items() if n in names})
        if rank < len(empty):
            target.fill(empty[rank], rank, into)

    sim.run(run, max(len(source_ranks), len(target_ranks)))
    bad = []
    for rank, (got, expected) in enumerate(zip(empty, target_ranks, strict=True)):
        filled = {place.parameter for name, place in target.places.get(rank, {}).items() if name in names}
        if target.shardings.keys() - names or target.refused:  # a parameter can hold a tensor beside others that moved
            got, expected = target.shards(got, rank), target.shards(expected, rank)
            filled = got.keys() & names
        # The whole parameters: what no tensor goes to is zero in both, as is padding.
        bad += [f"{name} on rank {rank}" for name in sorted(filled) if not torch.equal(got[name], expected[name])]
    return bad, len(names)


def write_row(row):
    """One line; what the frameworks themselves print comes between."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def pairs(texts):
    """Each layout as source and as target of each other framework, whose first layout stands for it."""
    first = {text.partition(":")[0]: text for text in reversed(texts)}
    for source in texts:
        for target in texts:
            kinds = source.partition(":")[0], target.partition(":")[0]
            if kinds[0] != kinds[1] and (first[kinds[0]] == source or first[kinds[1]] == target):
                yield source, target


def main(models, sides):
    """One row for each model under each side, then one for each transfer between layouts of two frameworks."""
    for model in models:
        known = {}
        for text in sides:
            row = {"model": model, "side": text}
            try:
                one = side(text, MODELS[model])
                layout = one.read()
            except LayoutError as error:
                write_row(row | {"result": "refused", "why": str(error), "table": offered(text, MODELS[model])})
                continue
            whole = random_weights(one.weights)
            ranks = loaded(one, whole)
            bad, compared = wrong(layout, ranks, whole)
            result = {"result": "wrong" if bad else "exact", "wrong": bad[:5], "compared": compared,
                      "tensors": len(layout.shardings), "refused": dict(layout.refused),
                      "unlike": unlike(layout, text, MODELS[model])}  # fmt: skip
            write_row(row | result)
            known[text] = layout, ranks
        for source, target in pairs(list(known)):
            (from_layout, from_ranks), (to_layout, to_ranks) = known[source], known[target]
            bad, count = moved(from_layout, to_layout, from_ranks, to_ranks)
            write_row({"model": model, "from": source, "to": target, "tensors": count, "wrong": bad[:5]})


def again():
    """Layouts of engines, and once more after other models; vLLM takes models of one id for the same."""
    asked = [("GPT-OSS", "vllm:tp=2,pp=2"), ("Llama 3", "sglang:tp=2,pp=2"), ("Mixtral", "sglang:tp=4,dp=2,ep=2"),
             ("Mixtral", "vllm:tp=2,pp=2")]  # fmt: skip
    first = {one: side(one[1], MODELS[one[0]]).read().to_dict() for one in asked}
    utils = import_module("vllm.model_executor.models.utils")
    # A model may have the id of one that is gone: here all of a class have one.
    utils.id = lambda one: type(one) if isinstance(one, torch.nn.Module) else id(one)
    for model, text in reversed(asked):
        row = {"model": model, "side": text, "again": side(text, MODELS[model]).read().to_dict() == first[model, text]}
        write_row(row | {"refused": first[model, text]["refused"]})


def refusals():
    """What the sides say to options that they do not have, and that of SGLang to sizes."""
    options = ("sglang:tp=2,cp=2", "vllm:cp=2", "megatron:tp=2,fsdp=2", "transformers:tp=2,cp=2", "vllm:tp=2,tp=4")
    for text in (*options, "sglang:tp=4,dp=3", "sglang:tp=4,ep=8", "sglang:tp=3"):
        write_row({"model": "Llama 3", "side": text, "why": why_not(text)})


def why_not(text):
    """Why a side has no layout of Llama 3; nothing where it has one."""
    try:
        side(text, MODELS["Llama 3"]).read()
    except LayoutError as error:
        return str(error)


def kernels():
    """Quantised models under each side: the names that have a sharding, and those that are refused."""
    for model, kind in KERNELS:
        for text in ("transformers:tp=2", "vllm:tp=2", "sglang:tp=2", "megatron:tp=2"):
            if model == "GPT-OSS" and text.startswith("megatron"):
                continue  # mbridge does not have it
            found = side(text, MODELS[model] | {"quantization_config": FORMATS[kind]}).read()
            write_row({"model": model, "side": text, "format": kind, "kept": sorted(found.shardings),
                       "refused": dict(found.refused)})  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Megatron-Core imports triton, and vLLM and transformers look whether there is one.
    stand_ins.triton()
    import_module("rankmesh_engines.megatron")
    stand_ins.no_triton()
    programs = {"kernels": kernels, "again": again, "refusals": refusals}
    if sys.argv[1] in programs:
        programs[sys.argv[1]]()
    else:
        main(**{"quick": QUICK, "all": WHOLE}[sys.argv[1]])
