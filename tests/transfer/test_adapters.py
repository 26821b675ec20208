"""Adapters: shardings that others' tensors state, against what their ranks really hold."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer import brute, live

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.fake_world import fake_world
from rankmesh.errors import LayoutError
from rankmesh.transfer.adapters import dtensors, huggingface, megatron, vllm

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 100, "model_type": "qwen2",
}  # fmt: skip


def _placed(shape, placements):
    """Whether each rank's DTensor holds what its sharding says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    placed = distribute_tensor(whole, mesh, placements)
    sharding = dtensors.sharding_of(placed)
    expected = torch.tensor(brute.local(sharding, dist.get_rank())).float()
    return torch.equal(placed.to_local(), expected.reshape(placed.to_local().shape)), sharding.cut


def test_dtensors_of_any_placement():
    """6 simulated ranks: shards of either axis or both, even and uneven, on one dimension or two."""
    from torch.distributed.tensor import Replicate, Shard

    cases = [
        ((12, 4), [Shard(0), Replicate()], ("dp", None)),
        ((7, 5), [Replicate(), Shard(1)], (None, "tp")),
        ((7, 5), [Shard(1), Shard(0)], ("tp", "dp")),
        ((12, 4), [Shard(0), Shard(0)], ("dp-tp", None)),
        ((7, 2), [Shard(0), Shard(-2)], ("dp-tp", None)),
    ]
    for shape, placements, cut in cases:
        assert sim.run(_placed, 6, shape, placements) == [(True, cut)] * 6


@settings(max_examples=100)
@given(st.data())
def test_dtensors_round_trip(data):
    """Any cut of any axes in any order: placements of it, a DTensor with them, and the same sharding again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    axes = data.draw(st.permutations(["tp", "dp", "pp"]))
    mesh = rm.Mesh(tp=2, dp=3, pp=2)
    cut = [[], []]
    for axis in axes:
        place = data.draw(st.sampled_from([None, 0, 1]))
        if place is not None:
            cut[place].append(axis)
    one = rm.Sharding(mesh, tuple("-".join(names) or None for names in cut), (24, 36))
    with fake_world(0, 12):
        device_mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
        local = torch.empty(one.of(0).shape)
        tensor = DTensor.from_local(
            local, device_mesh, one.to_dtensor(device_mesh), run_check=False, shape=torch.Size((24, 36)), stride=(36, 1)
        )
        assert rm.Sharding.from_dtensor(tensor) == one


def test_what_a_dtensor_cannot_say_is_named():
    """Positions, and a mesh of other axes."""
    from torch.distributed.device_mesh import init_device_mesh

    with fake_world(0, 4):
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        with pytest.raises(LayoutError, match="a DTensor cannot say tensors that only some ranks have"):
            rm.Sharding(rm.Mesh(tp=2, pp=2), ("tp",), (8,), at={"pp": 1}).to_dtensor(device_mesh)
        with pytest.raises(LayoutError, match="make the DeviceMesh of the same ranks and axes"):
            rm.Sharding(rm.Mesh(tp=4), ("tp",), (8,)).to_dtensor(device_mesh)


def _fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    made = dtensors.shardings(dict(model.named_parameters()))
    good = {}
    for name, tensor in model.named_parameters():
        numbers = torch.from_numpy(brute.local(made[name], dist.get_rank()))
        good[name] = torch.equal(tensor.to_local(), whole[name].reshape(-1)[numbers])
    return good, {name: sharding.cut for name, sharding in made.items()}


def test_fsdp_over_tensor_parallelism(ranks):
    """4 ranks, gloo: FSDP2's strided shards are cut by tp first, then by dp."""
    for good, cuts in ranks(4, _fully_sharded_here):
        assert all(good.values()), good
        assert cuts["0.weight"] == ["tp-dp", None]
        assert cuts["1.weight"] == ["dp", "tp"]


def _fully_sharded_here(me):
    return _fully_sharded()


def test_partial_dtensors_and_meshes_with_holes_are_refused():
    """Elements that are sums are nowhere; a mesh of ranks 0 and 2 is part of another."""
    with pytest.raises(LayoutError, match=r"placement .* does not say where"):
        dtensors._dim(SimpleNamespace(), 2)
    holes = SimpleNamespace(mesh=torch.tensor([0, 2]), mesh_dim_names=("dp",), ndim=1)
    with pytest.raises(LayoutError, match=r"gaps between its ranks \[0, 2\]"):
        dtensors.mesh_of(holes)


def _parameter(*shape, **attributes):
    parameter = torch.nn.Parameter(torch.empty(shape))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def test_megatrons_parameters():
    """8 ranks of tp=2, ep=2, pp=2: strides, padding, experts, tied tables and copies, from attributes alone."""
    mesh = rm.recipes.megatron(tp=2, dp=2, pp=2, ep=2, etp=1).mesh
    cut = {"tensor_model_parallel": True, "partition_stride": 1}
    every = []
    for rank in range(8):
        local_group = mesh.coordinate(rank)
        mine = {
            f"layers.{local_group['pp']}.fc1.weight": _parameter(
                8, 6, **{**cut, "partition_dim": 0, "partition_stride": 2}
            ),
            f"layers.{local_group['pp']}.proj.weight": _parameter(6, 3, **cut, partition_dim=1),
            f"layers.{local_group['pp']}.norm.weight": _parameter(6),
            f"experts.{mesh.coordinate(rank, view='expert')['ep']}.weight": _parameter(4, 6, allreduce=False),
            "word_embeddings.weight": _parameter(64, 6, **cut, partition_dim=0),
        }
        every.append(megatron.described(mine.items(), mesh, rank, vocabulary=100))
    every = json.loads(json.dumps(every))
    made = megatron.shardings(every, mesh)
    f = "float32"
    assert made["layers.1.fc1.weight"] == rm.Sharding(mesh, ("tp", None), (16, 6), f, {"pp": 1}, parts={0: (8, 8)})
    assert made["layers.0.proj.weight"] == rm.Sharding(mesh, (None, "tp"), (6, 6), f, {"pp": 0})
    assert made["layers.0.norm.weight"] == rm.Sharding(mesh, (None,), (6,), f, {"pp": 0})
    assert made["experts.1.weight"] == rm.Sharding(mesh, (None, None), (4, 6), f, {"ep": 1}, "expert")
    assert made["word_embeddings.weight"] == rm.Sharding(mesh, ("tp", None), (100, 6), f, padded={0: 128})
    every[3]["layers.0.norm.weight"]["shape"] = [7]
    with pytest.raises(LayoutError, match="one name is one tensor"):
        megatron.shardings(every, mesh)


def test_a_plan_of_transformers():
    """Column- and row-parallel weights and biases; a style that is not known is refused."""
    made = huggingface.shardings(huggingface.shapes(CONFIG), rm.Mesh(tp=2, dp=2))
    cuts = {name.partition("layers.0.")[2] or name: sharding.cut for name, sharding in made.items()}
    assert cuts["self_attn.q_proj.weight"] == ("tp", None)
    assert cuts["self_attn.q_proj.bias"] == ("tp",)
    assert cuts["mlp.down_proj.weight"] == (None, "tp")
    assert cuts["model.norm.weight"] == (None,)
    other = {"model.layers.*.mlp.*": "colwise_rep", "lm_head": "colwise_gather_output"}
    made = huggingface.shardings(huggingface.shapes(CONFIG), rm.Mesh(tp=2), other)
    assert made["lm_head.weight"].cut == ("tp", None)
    assert made["model.layers.1.self_attn.q_proj.weight"].cut == (None, None)
    with pytest.raises(LayoutError, match="unknown style 'diagonal'"):
        huggingface.shardings(huggingface.shapes(CONFIG), rm.Mesh(tp=2), {"lm_head": "diagonal"})


def test_from_a_trainer_into_vllms_own_parameters():
    """8 simulated ranks: TP2·DP4 to vLLM's TP4·PP2, into fused, padded parameters; key-value heads on two ranks."""
    source = huggingface.shardings(huggingface.shapes(CONFIG), rm.Mesh(tp=2, dp=4), dtype="float32")
    plan = rm.recipes.vllm(tp=4, pp=2)
    target = vllm.shardings(CONFIG, plan.mesh, dtype="float32")
    moves = rm.Transfer(source, target)
    whole = live.shards({name: rm.Sharding(rm.Mesh(dp=1), None, s.shape) for name, s in source.items()}, 0)

    def refit():
        rank = dist.get_rank()
        local_group = plan.mesh.coordinate(rank)
        layers = range(2) if local_group["pp"] == 0 else range(2, 3)
        parameters = {"model.embed_tokens.weight": torch.zeros(32, 16)} if local_group["pp"] == 0 else {}
        parameters |= (
            {"lm_head.weight": torch.zeros(32, 16), "model.norm.weight": torch.zeros(16)} if local_group["pp"] else {}
        )
        for layer in layers:
            block = f"model.layers.{layer}"
            parameters |= {
                f"{block}.self_attn.qkv_proj.weight": torch.zeros(4 + 2 + 2, 16),
                f"{block}.self_attn.qkv_proj.bias": torch.zeros(4 + 2 + 2),
                f"{block}.self_attn.o_proj.weight": torch.zeros(16, 4),
                f"{block}.mlp.gate_up_proj.weight": torch.zeros(12, 16),
                f"{block}.mlp.down_proj.weight": torch.zeros(16, 6),
                f"{block}.input_layernorm.weight": torch.zeros(16),
                f"{block}.post_attention_layernorm.weight": torch.zeros(16),
            }
        moves.run(live.shards(source, rank), vllm.views(parameters, target, rank))
        return parameters

    for rank, parameters in enumerate(sim.run(refit, 8)):
        tp, layer = rank % 4, 0 if rank < 4 else 2
        attention = f"model.layers.{layer}.self_attn"
        q, k, v = (whole[f"{attention}.{part}_proj.weight"] for part in "qkv")
        fused = torch.cat([q.chunk(4)[tp], k.chunk(2)[tp // 2], v.chunk(2)[tp // 2]])
        assert torch.equal(parameters[f"{attention}.qkv_proj.weight"], fused)
        gate, up = (whole[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        fused = torch.cat([gate.chunk(4)[tp], up.chunk(4)[tp]])
        assert torch.equal(parameters[f"model.layers.{layer}.mlp.gate_up_proj.weight"], fused)
        name = "lm_head.weight" if rank > 3 else "model.embed_tokens.weight"
        padded = torch.cat([whole[name], torch.zeros(28, 16)])
        assert torch.equal(parameters[name], padded.chunk(4)[tp])


MIXTURE = CONFIG | {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 8, "mlp_only_layers": [1]}


def _stacked(whole, rank, parallel):
    """The experts of layer 2 that rank (dp, tp) of 2 x 2 has, cut by hand: whole ones, or a quarter of each."""
    local_group = ([0, 1], [2, 3], [4], [5])[rank] if parallel else range(6)
    parts = {name: [] for name in ("gate", "up", "down")}
    for expert in local_group:
        for name, into in parts.items():
            weight = whole[f"model.layers.2.mlp.experts.{expert}.{name}_proj.weight"]
            into.append(weight if parallel else weight.chunk(4, dim=int(name == "down"))[rank])
    up = [torch.cat(both) for both in zip(parts["gate"], parts["up"], strict=True)]
    return torch.stack(up), torch.stack(parts["down"])


@pytest.mark.parametrize("parallel", [True, False])
def test_experts_into_vllms_stacked_parameters(parallel):
    """8 simulated ranks: TP2·EP4 to vLLM's TP2·PP2·DP2: whole experts on one rank each, or cut by all of a stage."""
    shapes = huggingface.shapes(MIXTURE)
    trainer = rm.Mesh(tp=2, dp=4).with_view("expert", tp=2, ep=2, edp=2, shared=("tp",))
    source = huggingface.shardings(shapes, rm.Mesh(tp=2, dp=4), dtype="float32")
    for name, shape in shapes.items():
        if ".experts." in name:
            at = {"ep": int(name.split(".")[5]) % 2}
            source[name] = rm.Sharding(trainer, source[name].cut, shape, at=at, view="expert")
    mesh = rm.recipes.vllm(tp=2, pp=2, dp=2).mesh
    target = vllm.shardings(MIXTURE, mesh, dtype="float32", expert_parallel=parallel)
    target = {name: sharding for name, sharding in target.items() if ".mlp." in name and ".layers.2." in name}
    moves = rm.Transfer(source, target)
    whole = live.shards({name: rm.Sharding(rm.Mesh(dp=1), None, shape) for name, shape in shapes.items()}, 0)

    def refit():
        rank = dist.get_rank()
        local_group = mesh.coordinate(rank)
        up, down = _stacked(whole, 2 * local_group["dp"] + local_group["tp"], parallel)
        block = "model.layers.2.mlp"
        expected = {f"{block}.gate.weight": whole[f"{block}.gate.weight"]}
        expected |= {
            f"{block}.experts.routed_experts.w13_weight": up,
            f"{block}.experts.routed_experts.w2_weight": down,
        }
        parameters = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        moves.run(live.shards(source, rank), vllm.views(parameters, target, rank))
        return local_group["pp"], {name: torch.equal(parameters[name], tensor) for name, tensor in expected.items()}

    for stage, good in sim.run(refit, 8):
        assert set(good.values()) == {stage == 1}


def test_mixtures_of_hugging_face():
    """Experts by Qwen's names and Mixtral's; layers without; shared experts and odd widths are refused."""
    shapes = huggingface.shapes(MIXTURE)
    assert shapes["model.layers.0.mlp.experts.5.down_proj.weight"] == (16, 8)
    assert shapes["model.layers.0.mlp.gate.weight"] == (6, 16)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (24, 16)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (2,)
    mixtral = CONFIG | {"num_local_experts": 2, "model_type": "mixtral"}
    made = huggingface.shardings(huggingface.shapes(mixtral), rm.Mesh(tp=2))
    cuts = {
        name.partition("experts.1.")[2]: made[name].cut for name in made if ".2.block_sparse_moe.experts.1." in name
    }
    assert cuts == {"w1.weight": ("tp", None), "w3.weight": ("tp", None), "w2.weight": (None, "tp")}
    assert made["model.layers.2.block_sparse_moe.gate.weight"].cut == (None, None)
    with pytest.raises(LayoutError, match="shared experts"):
        huggingface.shapes(MIXTURE | {"shared_expert_intermediate_size": 8})
    with pytest.raises(LayoutError, match="experts of width 8 cannot be divided by dp x pcp x tp = 16"):
        vllm.shardings(MIXTURE, rm.recipes.vllm(tp=4, dp=4).mesh)


def test_stages_and_heads_of_vllm():
    """What is left of the layers goes before the last stage; heads that tp does not fit are refused."""
    assert [vllm.stages(layers, 4) for layers in (8, 9, 10, 11)] == [
        [2, 2, 2, 2],
        [2, 2, 3, 2],
        [2, 3, 3, 2],
        [3, 3, 3, 2],
    ]
    with pytest.raises(LayoutError, match="tp that divides the heads"):
        vllm.shardings(CONFIG, rm.Mesh(tp=3))


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "mamba2"])
def test_models_of_other_names_are_refused(kind):
    """GPT-OSS fuses its experts: a model whose tensors are not Llama's is refused, not given Mixtral's names."""
    with pytest.raises(rm.LayoutError, match=f"shapes of model type '{kind}' are not known here"):
        huggingface.shapes(MIXTURE | {"model_type": kind, "num_local_experts": 4})


def test_a_config_without_a_type_is_not_llamas():
    """Without a model_type the class in architectures counts; without either the config is refused."""
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    assert huggingface.shapes(config | {"architectures": ["Qwen2ForCausalLM"]}) == huggingface.shapes(CONFIG)
    with pytest.raises(rm.LayoutError, match="the configuration has no model_type, and architectures is None"):
        huggingface.shapes(config)
