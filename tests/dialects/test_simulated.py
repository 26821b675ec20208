"""Every dialect under the simulator: after the ranks have taken turns, each is answered as a process of its own."""

from types import SimpleNamespace

import torch.distributed as dist
from tests.dialects.dry import members
from tests.torch_lacks import meshes_of_meshes

import rankmesh as rm
from rankmesh import sim
from rankmesh.dialects import (
    accelerate,
    deepspeed,
    device_mesh,
    ezpz,
    fairscale,
    nanotron,
    process_groups,
    torchtitan,
)
from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.hyper_comm_grid import HyperCommGrid
from rankmesh.dialects.megatron.process_groups_config import ProcessGroupCollection

SIZE = 8


def ranks_of(plan, rank, *kinds):
    """What a plan says of one rank's groups."""
    return [list(plan.groups(kind).of(rank).ranks) for kind in kinds]


def _megatron():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    dist.barrier()
    found = [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_next_rank(),
        parallel_state.is_pipeline_first_stage(),
        parallel_state.get_data_parallel_rank(),
        members(parallel_state.get_tensor_model_parallel_group()),
        members(ProcessGroupCollection.use_mpu_process_groups().dp),
    ]
    parallel_state.set_tensor_model_parallel_rank(10 + dist.get_rank())
    dist.barrier()
    found.append(parallel_state.get_tensor_model_parallel_rank())
    parallel_state.destroy_model_parallel()
    dist.barrier()
    return [*found, parallel_state.is_initialized()]


def test_megatron():
    """8 simulated ranks: ranks, stages, groups and values that were set are each rank's own."""
    plan = rm.recipes.megatron(SIZE, tp=2, pp=2)
    for rank, found in enumerate(sim.run(_megatron, SIZE)):
        place, stage = plan.mesh.coordinate(rank), plan.of(rank)["pp"]
        after = stage.ranks[(stage.rank + 1) % 2]
        assert found == [place["tp"], place["pp"], after, place["pp"] == 0, place["dp"],
                         *ranks_of(plan, rank, "tp", "dp"), 10 + rank, False]  # fmt: skip


def _two_states():
    actor, critic = ParallelState("actor"), ParallelState("critic")
    actor.initialize_model_parallel(tensor_model_parallel_size=4)
    critic.initialize_model_parallel(tensor_model_parallel_size=2)
    dist.barrier()
    return [actor.get_tensor_model_parallel_rank(), critic.get_tensor_model_parallel_rank()]


def test_states_of_a_rank():
    """8 simulated ranks: states that each makes for itself."""
    assert sim.run(_two_states, SIZE) == [[rank % 4, rank % 2] for rank in range(SIZE)]


def _grid():
    grid, counterpart = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    made = [grid.create_pg("tp"), grid.create_pg(["cp", "dp"]), counterpart.create_pg("tp")]
    dist.barrier()
    found = [members(group) for group in made]
    for each in (grid, counterpart):
        each.destroy()
    dist.barrier()
    return [*found, members(grid.create_pg("tp"))]


def test_grids():
    """8 simulated ranks: groups of two grids of one shape, destroyed and made again."""
    plan = rm.Plan(rm.Mesh(tp=2, cp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("both", "cp-dp")])
    for rank, found in enumerate(sim.run(_grid, SIZE)):
        tp, both = ranks_of(plan, rank, "tp", "both")
        assert found == [tp, both, tp, tp]


def _small():
    ezpz.initialize_tensor_parallel(2, context_parallel_size=2)
    fairscale.initialize_model_parallel(2, pipeline_length=2)
    groups = process_groups.ProcessGroups(tp=2, pp=2, dp=2)
    context = nanotron.ParallelContext(2, 2, 2)
    mpu = deepspeed.Mpu.connect(tp=2, sp=2)
    dist.barrier()
    found = [
        [ezpz.get_tensor_parallel_ranks(), ezpz.get_context_parallel_rank(), ezpz.get_data_parallel_ranks()],
        [fairscale.get_model_parallel_rank(), fairscale.get_pipeline_parallel_ranks()],
        [members(groups.dp_group), groups.tp_rank, groups.is_first_stage],
        [members(context.dp_pg), context.get_local_ranks(dist.get_rank())["pp"]],
        [mpu.get_sequence_parallel_rank(), mpu.get_data_parallel_group_ranks()],
    ]
    mpu.close()
    context.destroy()
    groups.close()
    fairscale.destroy_model_parallel()
    ezpz.destroy_tensor_parallel()
    dist.barrier()
    return [*found, ezpz.tensor_parallel_is_initialized(), fairscale.model_parallel_is_initialized()]


def test_the_small_ones():
    """8 simulated ranks: ezpz, fairscale, ProcessGroups, nanotron and DeepSpeed's mpu side by side."""
    sizes = rm.recipes.ezpz(SIZE, tp=2, cp=2)
    stages = rm.recipes.ezpz(SIZE, tp=2, pp=2)
    minimal = rm.recipes.three_d(SIZE, tp=2, pp=2)
    nano = rm.recipes.nanotron(SIZE, tp=2, pp=2)
    speed = deepspeed.plan(SIZE, tp=2, sp=2)
    for rank, found in enumerate(sim.run(_small, SIZE)):
        tp, dp = ranks_of(sizes, rank, "tp", "dp")
        assert found == [
            [tp, sizes.mesh.coordinate(rank)["cp"], dp],
            [stages.mesh.coordinate(rank)["tp"], *ranks_of(stages, rank, "pp")],
            [
                *ranks_of(minimal, rank, "dp"),
                minimal.mesh.coordinate(rank)["tp"],
                minimal.mesh.coordinate(rank)["pp"] == 0,
            ],
            [*ranks_of(nano, rank, "dp"), nano.mesh.coordinate(rank)["pp"]],
            [speed.mesh.coordinate(rank)["sp"], *ranks_of(speed, rank, "dp")],
            False,
            False,
        ]


def _meshes():
    config = SimpleNamespace(dp_shard_size=2, dp_replicate_size=2, tp_size=2)
    groups = rm.connect(accelerate.plan(config))
    mesh = accelerate.device_mesh(groups, "cpu")
    dist.barrier()
    adopted = device_mesh.adopt(mesh)
    dims = torchtitan.ParallelDims(1, -1, 1, 2, 2, 1, SIZE)
    titan = [dims.get_mesh(axis) for axis in ("dp_shard", "tp", "pp")]
    dist.barrier()
    return [
        [members(one.get_group()) for one in titan],
        members(mesh["dp"].get_group()),
        mesh["tp"].get_local_rank(),
        list(adopted["dp_shard"].ranks),
    ]


@meshes_of_meshes
def test_device_meshes():
    """8 simulated ranks: accelerate's mesh, the groups that are adopted from it, and torchtitan's meshes."""
    plan = accelerate.plan(dp_shard_size=2, dp_replicate_size=2, tp_size=2)
    titan = rm.recipes.torchtitan(SIZE, tp=2, pp=2)
    for rank, found in enumerate(sim.run(_meshes, SIZE)):
        dp, shard = ranks_of(plan, rank, "dp", "dp_shard")
        assert found == [ranks_of(titan, rank, "dp_shard", "tp", "pp"), dp, plan.mesh.coordinate(rank)["tp"], shard]
