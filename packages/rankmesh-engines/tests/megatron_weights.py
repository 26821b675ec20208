"""A program: Megatron-Core's own modules, filled by a transfer from Hugging Face weights; rows of JSON.

Two things that know nothing of a layout judge it. The logits of a model on one rank are those of transformers. And what
``sharded_state_dict`` says each rank holds of that model, offset by offset, is what the transfer has put there.
"""

import json
import sys
import warnings
from unittest import mock

from tests.peers import stand_ins

stand_ins.triton()

import engines_beside  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from tests.peers.megatron_training import OnCpu, without_a_gpu  # noqa: E402

import rankmesh as rm  # noqa: E402
from rankmesh import sim  # noqa: E402
from rankmesh.backend.fake_world import fake_world  # noqa: E402
from rankmesh.transfer import Transfer  # noqa: E402
from rankmesh_engines import megatron  # noqa: E402

stand_ins.no_triton()

# What decides numbers and not layouts: as transformers computes, on a CPU.
NUMBERS = {"moe_token_dispatcher_type": "allgather", "moe_router_pre_softmax": False, "variable_seq_lengths": False}
MODELS = {name: engines_beside.MODELS[name] | {"rope_theta": 10000.0} for name in ("Llama 3", "Qwen 3", "Mixtral")}
MODELS["Qwen 3 MoE"] = engines_beside.MODELS["Qwen 3 MoE"] | {"norm_topk_prob": True}
MODELS["Llama 3, tied"] = MODELS["Llama 3"] | {"tie_word_embeddings": True}
SIDES = [{"tp": 2}, {"tp": 2, "pp": 2, "first": 1}, {"dp": 2, "pp": 2, "vpp": 2}]
EXPERTS = [{"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}]
VOCABULARY = 104  # padded, from 100


def filled(config, whole, **sizes):
    """Each rank's chunks of a model, filled from whole tensors, with what Megatron says that they hold of it."""
    side = megatron.side(config, **sizes, vocab=VOCABULARY // sizes.get("tp", 1))
    layout = side.read()
    assert not layout.refused
    kept, empty = [], []
    plain = megatron._as_te

    def keep(chunk):
        kept[-1].append((chunk, contents(chunk)))
        return plain(chunk)

    with mock.patch.object(megatron, "_as_te", keep):
        for rank in range(side.mesh.size):
            kept.append([])
            with fake_world(rank, side.mesh.size):
                empty.append(dict(side.load(rank, {name: torch.zeros_like(tensor) for name, tensor in whole.items()})))
    one = {name: rm.Sharding(rm.Mesh(dp=1), None, tuple(t.shape), str(t.dtype)) for name, t in whole.items()}
    moves = Transfer(one, layout.shardings)

    def run():
        rank = torch.distributed.get_rank()
        into = layout.shards(empty[rank], rank)
        moves.run(whole if rank == 0 else {}, into)
        layout.fill(empty[rank], rank, into)

    sim.run(run, side.mesh.size)
    return kept


def contents(chunk):
    """By key of a checkpoint, the tensors that a chunk holds and where each begins, as Megatron's own code says."""
    state = chunk.sharded_state_dict()
    apply_factories(state)
    return list(tensors(state))


def tensors(nested):
    """The sharded tensors of nested dicts and lists."""
    if isinstance(nested, ShardedTensor):
        yield nested
    elif isinstance(nested, dict):
        for value in nested.values():
            yield from tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from tensors(value)


def place(shard):
    """Where a sharded tensor is in the whole: leading axes are layers and experts."""
    starts = shard.global_offset
    lengths = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True)), lengths


def different(one, ranks):
    """Keys whose part on a rank is not that part of the model of one rank; and how many parts were compared."""
    whole, bad, compared = {}, [], 0
    for _, shards in one[0]:
        for shard in shards:
            where, lengths = place(shard)
            known = whole.setdefault(shard.key, torch.full(shard.global_shape, torch.nan, dtype=shard.data.dtype))
            known[where] = shard.data.detach().reshape(lengths)
    for rank, chunks in enumerate(ranks):
        for shard in (shard for _, shards in chunks for shard in shards):
            where, lengths = place(shard)
            compared += 1
            if not torch.equal(whole[shard.key][where], shard.data.detach().reshape(lengths)):
                bad.append(f"{shard.key} on rank {rank}")
    return bad, compared


def logits(config, whole, chunk):
    """Of transformers' model, and of Megatron's of one rank, over the same tokens."""
    given = dict(config)
    made = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    names = {"config": made, "state_dict": dict(whole), "dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_config(made).from_pretrained(None, **names).eval()
    tokens = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(1))
    places = torch.arange(12).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), diagonal=1)
    with torch.no_grad(), fake_world(0, 1), megatron._state(1, 1, 1, 0, 1, 1), OnCpu():
        return theirs(tokens).logits, chunk.eval()(tokens, places, mask)[..., :100]


def main(models):
    """One row of logits for each model, then one for each layout."""
    for model in models:
        config = MODELS[model]
        whole = {
            name: tensor * 0.2 if tensor.dim() > 1 else 1 + tensor * 0.2
            for name, tensor in engines_beside.random_weights(megatron.side(config, vocab=1).weights).items()
        }
        one = filled(config, whole)
        theirs, ours = logits(config, whole, one[0][0][0])
        error = float((theirs - ours).abs().max() / theirs.abs().max())
        engines_beside.write_row({"model": model, "error": error, "spread": float(theirs.std())})
        for sizes in SIDES + (EXPERTS if "num_experts_per_tok" in config else []):
            bad, compared = different(one, filled(config, whole, **sizes))
            engines_beside.write_row({"model": model, "sizes": sizes, "wrong": bad[:5], "compared": compared})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    without_a_gpu()
    with mock.patch.dict(megatron._PLAIN, NUMBERS):
        main(sys.argv[1:] or MODELS)
    sys.stdout.write(json.dumps("done") + "\n")
