"""The recipes and dialects of other systems beside these systems' own functions, in worlds that are not there."""

import os
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Optional
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from tests.dialects import dry
from tests.peers.conftest import checkout
from torch.distributed.device_mesh import DeviceMesh

import rankmesh as rm
from rankmesh.dialects import accelerate as accelerate_dialect
from rankmesh.dialects import deepspeed as deepspeed_dialect
from rankmesh.errors import SizesError

CASES = 40

# What DeepSpeed's PipelineModule and PipelineEngine read of their grid, and what else it has.
ATTRIBUTES = ("data_parallel_size", "pipe_parallel_size", "model_parallel_size", "slice_parallel_size", "stage_id",
              "data_parallel_id", "is_first_stage", "is_last_stage", "pp_group", "dp_group", "slice_group",
              "p2p_groups", "global_rank", "world_size")  # fmt: skip
PROC_GROUPS = ("pp_proc_group", "dp_proc_group", "slice_proc_group")


def rows(groups):
    """Groups, each in its order: a rank's place in its group decides what it holds."""
    return sorted([int(rank) for rank in group] for group in groups)


def kind(plan, name):
    """A kind's groups, each in its order."""
    return rows(plan.groups(name).tolist())


def _vllm(me):
    from tests.peers import theirs

    draw, wrong = random.Random(5), []  # noqa: S311
    for _ in range(CASES):
        tp, pp, dp, pcp, replicas = (draw.choice((1, 1, 2, 3, 4)) for _ in range(5))
        dcp = draw.choice([size for size in range(1, tp + 1) if tp % size == 0] if pcp == 1 else [1, pcp, tp * pcp])
        world, made = tp * pp * dp * pcp * replicas, {}
        parallel = SimpleNamespace(data_parallel_size=dp, enable_elastic_ep=False, enable_eplb=True, use_all2all=False)
        config = SimpleNamespace(parallel_config=parallel, model_config=None, engram_config=None)
        theirs.stand_in("vllm", "vllm.config", get_current_vllm_config=lambda config=config: config)

        def record(groups, *_, group_name, made=made, **__):
            made[group_name] = groups
            return MagicMock()

        unset = dict.fromkeys(("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"))
        initialise, _ = theirs.function(
            "vllm", "vllm/distributed/parallel_state.py", "initialize_model_parallel", torch=torch, logger=MagicMock(),
            get_world_group=MagicMock, init_model_parallel_group=record, Store=object, **unset,
        )  # fmt: skip
        with dry.world(0, world):
            initialise(tp, pp, pcp, dcp, "fake")
        plan = rm.recipes.vllm(world, tp=tp, pp=pp, dp=dp, pcp=pcp, dcp=dcp, eplb=True)
        wrong += [(name, tp, pp, dp, pcp, dcp) for name in plan.kinds if kind(plan, name) != rows(made[name])]
    return wrong


@pytest.mark.nightly
def test_vllm(ranks):
    """40 deployments of vLLM 0.33.0: every group of its initialize_model_parallel is the recipe's."""
    assert ranks(1, _vllm, world=None) == [[]]


def _sglang(me):
    from tests.peers import theirs

    path = "sglang/srt/distributed/parallel_state.py"
    context = "sglang/srt/runtime_context.py"
    attn_tp, _ = theirs.function("sglang", context, "derive_attn_tp_size", Any=object)
    widths, _ = theirs.function("sglang", context, "derive_parallel_widths", derive_attn_tp_size=attn_tp)
    theirs.stand_in(
        "sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.sampler", SYNC_TOKEN_IDS_ACROSS_TP=False
    )
    draw, wrong = random.Random(6), []  # noqa: S311
    for _ in range(CASES):
        parts, pp = [draw.choice((1, 2, 3)) for _ in range(3)], draw.choice((1, 2, 4))
        tp = parts[0] * parts[1] * parts[2]
        sizes = [size for size in range(1, tp + 1) if tp % size == 0]
        ep, dcp = draw.choice(sizes), draw.choice(sizes)
        moe_dp = draw.choice([size for size in sizes if tp // ep % size == 0])
        parallel = SimpleNamespace(
            tp_size=tp, moe_ep_size=ep, pp_size=pp, attn_dp_size=parts[1], attn_cp_size=parts[2], moe_dp_size=moe_dp,
            attn_dcp_size=dcp, shared_experts_tp_size=None,
        )  # fmt: skip
        unset = dict.fromkeys(("_TP", "_DCP", "_ATTN_CP", "_ATTN_TP", "_SHARED_EXPERTS_TP", "_MOE_DP", "_MOE_EP",
                               "_MOE_TP", "_PP", "_SELF_PP", "_PDMUX_PREFILL_TP_GROUP"))  # fmt: skip
        initialise, after = theirs.function(
            "sglang", path, "initialize_model_parallel", torch=torch, logger=MagicMock(), get_world_group=MagicMock,
            Optional=Optional,
            init_model_parallel_group=lambda groups, *_, **__: SimpleNamespace(groups=groups, rank_in_group=1),
            get_parallel=lambda parallel=parallel: parallel, derive_parallel_widths=widths, is_hip=lambda: True,
            is_cuda=lambda: False, _is_npu=False, _is_xpu=False, envs=MagicMock(), **unset,
        )  # fmt: skip
        with dry.world(0, tp * pp):
            try:
                initialise("gloo")
            except Exception:  # noqa: BLE001  - what follows the groups asks for the rest of SGLang
                assert after["_SELF_PP"] is not None
        plan = rm.recipes.sglang(tp=tp, pp=pp, attn_dp=parts[1], attn_cp=parts[2], ep=ep, moe_dp=moe_dp, dcp=dcp)
        for name in plan.kinds:
            made = after.get(f"_{name.upper()}")
            if name != "attn_dp" and kind(plan, name) != rows(made.groups):
                wrong.append((name, vars(parallel)))
    return wrong


@pytest.mark.nightly
def test_sglang(ranks):
    """40 engines of SGLang 0.5.23: every group of its initialize_model_parallel is the recipe's."""
    assert ranks(1, _sglang, world=None) == [[]]


def _accelerate(me):
    from tests.peers import theirs

    for name in ("accelerate", "accelerate.utils", "accelerate.utils.dataclasses"):
        theirs.stand_in(name)
    theirs.stand_in("accelerate.utils.versions", is_torch_version=lambda *_: True)
    config_of = theirs.load("accelerate", "accelerate/parallelism_config.py").ParallelismConfig
    draw, wrong, built = random.Random(7), [], 0  # noqa: S311
    order = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    while built < CASES:
        sizes = {f"{axis}_size": draw.choice((1, 1, 2, 3)) for axis in order}
        try:
            config, refused = config_of(**sizes), None
        except ValueError as error:
            refused = error
        try:
            plan = accelerate_dialect.plan(**sizes)
        except ValueError as error:
            if refused is None and "sizes are all 1" not in str(error):
                wrong.append((sizes, str(error)))
            continue
        if refused is not None:
            wrong.append((sizes, str(refused)))
            continue
        built += 1
        config.sp_backend = "torch"  # with DeepSpeed's it makes no mesh; the names of its axes are the same
        with dry.world(draw.randrange(plan.world_size), plan.world_size), rm.connect(plan) as groups:
            mesh = config.build_device_mesh("cpu")
            names = [*mesh.mesh_dim_names, *(name for name in ("dp", "dp_shard_cp", "dp_cp") if name in plan.kinds)]
            dry.compare_meshes(accelerate_dialect.device_mesh(groups, "cpu"), mesh, names)
        if list(plan.kinds) != names:
            wrong.append((names, list(plan.kinds)))
    return wrong


def test_accelerate(ranks):
    """40 configurations of Accelerate 1.15.0: its own mesh and flattened groups, and what it refuses."""
    assert ranks(1, _accelerate, world=None, limit=60) == [[]]


def _deepspeed(me):
    from tests.peers import theirs

    theirs.stand_in("deepspeed", comm=dist)
    topologies = theirs.load("deepspeed", "deepspeed/runtime/pipe/topology.py")
    draw, wrong = random.Random(8), []  # noqa: S311
    for _ in range(CASES):
        tp, dp, pp = (draw.choice((1, 2, 3, 4)) for _ in range(3))
        world = tp * dp * pp
        rank = draw.randrange(world)
        local = topologies.PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
        ours = deepspeed_dialect.Topology(rm.Mesh(tp=tp, sp=1, dp=dp, pp=pp))
        same = [
            tuple(local.get_coord(rank)) == tuple(ours.get_coord(rank)),
            local.get_rank(**local.get_coord(rank)._asdict()) == ours.get_rank(**local.get_coord(rank)._asdict()),
            local.get_rank_repr(rank) == ours.get_rank_repr(rank),
            local.get_rank_repr(rank, omit_axes=["data"]) == ours.get_rank_repr(rank, omit_axes=["data"]),
            all(
                rows(local.get_axis_comm_lists(a)) == rows(ours.get_axis_comm_lists(a))
                for a in ("pipe", "data", "model")
            ),
            sorted(local.get_axis_list("data", 0)) == ours.get_axis_list("data", 0),
            sorted(local.filter_match(pipe=0)) == ours.filter_match(pipe=0),
            (local.world_size(), local.get_axis_names(), local.get_dim("expert"))
            == (ours.world_size(), ours.get_axis_names(), ours.get_dim("expert")),
        ]
        with dry.world(rank, world):
            grid = topologies.PipelineParallelGrid(local)
            with deepspeed_dialect.Mpu.connect(tp=tp, pp=pp) as mpu:
                same += [getattr(grid, name) == getattr(mpu, name) for name in ATTRIBUTES]
                made = [[dry.members(getattr(each, name)) for name in PROC_GROUPS] for each in (grid, mpu)]
                same.append(made[0] == made[1])
                for name in dir(topologies.PipelineParallelGrid):
                    if name.startswith("get_"):
                        their_error, our_error = getattr(grid, name)(), getattr(mpu, name)()
                        if isinstance(their_error, dist.ProcessGroup):
                            their_error, our_error = dry.members(their_error), dry.members(our_error)
                        if their_error != our_error:
                            wrong.append((name, tp, dp, pp, rank, their_error, our_error))
                same.append(all(grid.stage_to_global(s) == mpu.stage_to_global(s) for s in range(pp)))
        if not all(same):
            wrong.append((tp, dp, pp, rank, same))
    return wrong[:10]


def test_deepspeed(ranks):
    """40 grids of DeepSpeed 0.19.8: its topology, and all that its PipelineParallelGrid answers."""
    assert ranks(1, _deepspeed, world=None, limit=60) == [[]]


def _nanotron(me, source):
    from tests.peers import theirs

    from rankmesh.dialects.nanotron import ParallelContext, ParallelContext04

    fake = ModuleType("nanotron.distributed")
    vars(fake).update(vars(dist))
    theirs.stand_in("nanotron")
    sys.modules["nanotron.distributed"] = sys.modules["nanotron"].distributed = fake
    torch.cuda.set_device = torch.cuda.device = lambda *_: None
    path = "src/nanotron/parallel/context.py" if source else "nanotron/parallel/context.py"
    context_of = theirs.load("nanotron", path, root=source).ParallelContext
    drop_in, named = ParallelContext04, ("expert_pg",)
    if source:
        drop_in, named = ParallelContext, ("cp_pg", "ep_pg", "dp_cp_pg", "tp_and_ep_pg", "local_pg")
    draw, wrong = random.Random(9), []  # noqa: S311
    for _ in range(CASES):
        sizes = [draw.choice((1, 2, 3)) for _ in range(4)]
        world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        rank = draw.randrange(world)
        os.environ |= {
            "WORLD_SIZE": str(world),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
        }
        with dry.world(rank, world):
            local = context_of(*sizes)
            with drop_in(*sizes) as ours:
                for name in ("tp_pg", "dp_pg", "pp_pg", "mp_pg", "world_pg", *named):
                    output = [dry.members(getattr(each, name)) for each in (local, ours)]
                    if output[0] != output[1]:
                        wrong.append((name, sizes, rank, output))
                if (local.world_rank_matrix != ours.world_rank_matrix).any():
                    wrong.append(("matrix", sizes, rank))
                if not source and tuple(local.get_3d_ranks(rank)) != ours.get_3d_ranks(rank):
                    wrong.append(("places", sizes, rank))
                if source and _places(local, rank) != _places(ours, rank):
                    wrong.append((_places(local, rank), _places(ours, rank)))
    return wrong[:10]


def _places(context, rank):
    """Where a rank is, the ranks of a slice, and the groups that the context knows."""
    ranks = context.get_global_rank(0, slice(None), 0, slice(None), 0)
    known = {tuple(map(int, ranks)) for ranks in context.world_ranks_to_pg}
    return context.get_local_ranks(rank), context.parallel_order, ranks.tolist(), known, context._groups


def test_nanotron(ranks):
    """40 contexts of nanotron 0.4: its groups, its matrix, its places."""
    assert ranks(1, _nanotron, None, world=None, limit=60) == [[]]


def test_nanotron_sources(ranks):
    """40 contexts of a checkout: groups of context parallelism too, slices of ranks, the groups that it knows."""
    assert ranks(1, _nanotron, str(checkout("NANOTRON")), world=None, limit=60) == [[]]


BOTH = ("dp_enabled", "dp_replicate_enabled", "dp_shard_enabled", "cp_enabled", "dp_cp_enabled", "fsdp_enabled",
        "tp_enabled", "pp_enabled", "ep_enabled", "non_data_parallel_size", "seq_len_divisor", "dp_shard")  # fmt: skip
AXES = ("pp", "batch", "loss", "dp_replicate", "dp_shard", "fsdp", "dp", "cp", "tp", "ep", "efsdp")


def _mesh_of(output):
    """A mesh as its names and ranks, and the members of each group that torchtitan makes for real."""
    if not isinstance(output, DeviceMesh):
        return output
    return output.mesh_dim_names, output.mesh.tolist()


def _requested(dims, draw, theirs):
    """What one object answers: each function that torchtitan's has, with what a training loop may ask it."""
    draw = random.Random(draw)  # noqa: S311
    questions = [("get_optional_mesh", axis) for axis in AXES] + [("get_mesh", axis) for axis in AXES]
    for _ in range(12):
        axes = draw.sample(AXES, draw.choice((2, 3)))
        questions += [(name, axes) for name in ("get_optional_mesh", "get_activated_mesh", "resolve_mesh")]
        axes = sorted(axes, key=("pp", "dp_replicate", "dp", "dp_shard", "fsdp", "efsdp", "cp", "ep", "tp").index) if (
            not set(axes) & {"batch", "loss"}) else axes  # fmt: skip
        questions.append(("get_optional_mesh", axes))
    questions += [("resolve_mesh", axes) for axes in (["dp", "cp", "tp"], ["dp_replicate", "efsdp", "ep"])]
    questions += [(name, None) for name in ("spmd_meshes", "spmd_dense_mesh", "spmd_sparse_mesh", "get_dense_tp_mesh")]
    for name, axes in (one for one in questions if hasattr(theirs, one[0])):
        try:
            output = getattr(dims, name)(*([] if axes is None else [axes]))
        except (ValueError, KeyError, IndexError, RuntimeError):
            output = ["refused"]
        yield name, axes, [_mesh_of(one) for one in output] if isinstance(output, list) else _mesh_of(output)


def _torchtitan(me, source):
    from tests.peers import theirs

    from rankmesh.dialects.torchtitan import ParallelDims

    theirs.stand_in("spmd_types")
    for name in (
        "torchtitan",
        "torchtitan.config",
        "torchtitan.config.configs",
        "torchtitan.tools",
        "torchtitan.tools.logging",
    ):
        theirs.stand_in(name)
    theirs.stand_in("torchtitan.tools.utils", device_type="cpu")
    dims_of = theirs.load("torchtitan", "torchtitan/distributed/parallel_dims.py", root=source).ParallelDims
    backends = ("partial_dtensor", "spmd_types") if source else ("partial_dtensor", "full_dtensor", "spmd_types")
    draw, wrong = random.Random(10), []  # noqa: S311
    for case in range(CASES):
        replicate, shard, cp, tp, pp = (draw.choice((1, 1, 2, 3)) for _ in range(5))
        ep = draw.choice([size for size in range(1, shard * cp * tp + 1) if shard * cp * tp % size == 0])
        world, backend = replicate * shard * cp * tp * pp, backends[case % len(backends)]
        rank, degrees = draw.randrange(world), (replicate, draw.choice((shard, -1)), cp, tp, pp, ep, world, backend)
        plan = rm.recipes.torchtitan(world, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep)
        with dry.world(rank, world):
            local = dims_of(*degrees)
            for name, mesh in local.get_all_one_dimensional_meshes().items():
                if mesh.mesh.tolist() != list(plan.groups("batch" if name == "dp" else name).of(rank).ranks):
                    wrong.append((name, degrees, rank))
            with ParallelDims(*degrees) as ours:
                wrong += [(name, degrees) for name in BOTH if getattr(local, name) != getattr(ours, name)]
                wrong += [name for name in dir(local) if name[0] != "_" and not hasattr(ours, name)]
                for one, other in zip(_requested(local, case, local), _requested(ours, case, local), strict=True):
                    if one != other:
                        wrong.append((degrees, rank, one, other[2]))
                meshes = local.get_all_one_dimensional_meshes(), ours.get_all_one_dimensional_meshes()
                if list(meshes[0]) != list(meshes[1]):
                    wrong.append((degrees, list(meshes[0]), list(meshes[1])))
                for name, mesh in meshes[1].items():
                    if dry.members(mesh.get_group()) != mesh.mesh.tolist():
                        wrong.append((degrees, name, mesh))
    for degrees in ((0, 1, 1, 1, 1, 1, 1), (1, 3, 1, 1, 1, 1, 8), (1, -1, 1, 9, 1, 1, 8), (1, 0, 1, 1, 1, 1, 8)):
        for of, kind in ((dims_of, AssertionError), (ParallelDims, SizesError)):
            me.error(kind, of, *degrees)
    return wrong[:10]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3.0 is written for Python 3.11")
def test_torchtitan(ranks):
    """40 layouts of torchtitan 0.3.0: its ParallelDims beside the recipe, and each answer beside the drop-in's."""
    assert ranks(1, _torchtitan, None, world=None, limit=100) == [[]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan is written for Python 3.11")
def test_torchtitan_sources(ranks):
    """40 layouts of a checkout: every public name is there, and each answer beside the drop-in's."""
    assert ranks(1, _torchtitan, str(checkout("TORCHTITAN")), world=None, limit=100) == [[]]
