"""A rank of a simulation answers as a process of its own would: random interleavings on every dialect."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects import dry
from tests.limits import LONG
from tests.sweeping import ALL
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rankmesh as rm
from rankmesh import sim

SIZE = 4
SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))


class _Dialect:
    """A state of one dialect as a program of one rank uses it; ``shared`` is made before there are ranks."""

    name = ""
    asks = ()
    begins, ends = "initialize_model_parallel", "destroy_model_parallel"
    # The class of a state that a program's module makes when it is imported, and its arguments.
    shares, given = "", ()

    def __init__(self, shared=None):
        self.shared = shared

    @classmethod
    def module(cls):
        return import_module(f"rankmesh.dialects.{cls.name}")

    def begin(self, tp, pp):
        getattr(self.state(), self.begins)(tp, pp)

    def end(self):
        getattr(self.state(), self.ends)()

    def state(self):
        """Whose attributes the getters are."""
        return self.shared or self.module()

    def write(self, value):
        """Change what one rank sees; nothing where the dialect has nothing to change."""

    def ask(self, name):
        value = getattr(self.state(), name)
        return value() if callable(value) else value

    @classmethod
    def share(cls):
        return getattr(cls.module(), cls.shares)(*cls.given)


class _ParallelState(_Dialect):
    name = "megatron.parallel_state"
    asks = (
        "is_initialized", "model_parallel_is_initialized", "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank", "get_pipeline_model_parallel_world_size", "get_data_parallel_group",
        "get_data_parallel_rank", "get_pipeline_model_parallel_next_rank", "is_pipeline_first_stage", "get_all_ranks",
        "get_global_memory_buffer", "_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS",
        "_MPU_TENSOR_MODEL_PARALLEL_RANK", "_HYBRID_DP_CP_GROUPS", "_global_process_group_list",
    )  # fmt: skip

    def write(self, value):
        self.state().set_tensor_model_parallel_rank(value)
        self.state()._HYBRID_DP_CP_GROUPS[value] = value

    @classmethod
    def share(cls):
        return import_module("rankmesh.dialects.megatron").ParallelState("shared")


class _Fairscale(_Dialect):
    name = "fairscale"
    asks = (
        "model_parallel_is_initialized", "get_model_parallel_rank", "get_model_parallel_group",
        "get_data_parallel_ranks", "get_pipeline_parallel_ranks", "get_model_parallel_src_rank",
    )  # fmt: skip
    shares = "ModelParallel"


class _Ezpz(_Dialect):
    name = "ezpz"
    asks = (
        "tensor_parallel_is_initialized", "get_tensor_parallel_rank", "get_tensor_parallel_world_size",
        "get_tensor_parallel_group", "get_data_parallel_ranks", "get_pipeline_parallel_rank",
        "get_tensor_parallel_src_rank", "get_context_parallel_ranks",
    )  # fmt: skip

    begins, ends, shares = "initialize_tensor_parallel", "destroy_tensor_parallel", "TensorParallel"

    def write(self, value):
        if self.shared is None:
            self.state()._CONTEXT_PARALLEL_GROUP_RANKS = [value]


class _Object(_Dialect):
    """A dialect without globals: each rank makes an object."""

    made = None

    def state(self):
        return self.made

    def end(self):
        made, self.made = self.made, None
        if made is not None:
            self.close(made)

    def close(self, made):
        made.close()


class _Grid(_Object):
    name = "megatron.hyper_comm_grid"
    asks = ("tp", "pp", "rest", "whole", "size")

    def begin(self, tp, pp):
        self.made = self.module().HyperCommGrid([tp, SIZE // tp // pp, pp], ["tp", "rest", "pp"])
        self.made.create_pg("tp"), self.made.create_pg("pp")

    def ask(self, name):
        return self.made.size if name == "size" else self.made.get_pg(["tp", "pp"] if name == "whole" else name)

    def close(self, made):
        made.destroy()


class _Nanotron(_Object):
    name = "nanotron"
    asks = ("tp_pg", "dp_pg", "world_rank_matrix", "world_ranks_to_pg", "pipeline_parallel_size")

    def begin(self, tp, pp):
        self.made = self.module().ParallelContext(tp, pp, SIZE // tp // pp)

    def close(self, made):
        made.__exit__(ValueError, None, None)  # as a rank that ends by itself: without a barrier


class _Minimal(_Object):
    name = "process_groups"
    asks = ("tp_group", "pp_rank", "dp_size", "is_last_stage", "groups")

    def begin(self, tp, pp):
        self.made = self.module().ProcessGroups(tp, pp, SIZE // tp // pp)


class _Deepspeed(_Object):
    name = "deepspeed"
    asks = ("get_model_parallel_group", "get_data_parallel_group_ranks", "stage_id", "p2p_groups", "get_global_rank")

    def begin(self, tp, pp):
        self.made = self.module().Mpu.connect(tp=tp, pp=pp)


class _Torchtitan(_Object):
    name = "torchtitan"
    asks = ("world_mesh", "tp", "pp", "dp_shard", "tp_enabled")

    def begin(self, tp, pp):
        self.made = self.shared or self.module().ParallelDims(1, -1, 1, tp, pp, 1, SIZE)
        self.made.build_mesh()

    def ask(self, name):
        return getattr(self.made, name) if "_" in name[2:] and name != "dp_shard" else self.made.get_mesh(name)


class _SharedTorchtitan(_Torchtitan):
    """One that is made when a module is imported, with its degrees."""

    shares, given = "ParallelDims", (1, -1, 1, 2, 1, 1, SIZE)


class _Mesh(_Object):
    name = "device_mesh"
    asks = ("kinds", "tp", "pp")

    def begin(self, tp, pp):
        mesh = init_device_mesh("cpu", (pp, SIZE // tp // pp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.made = self.module().adopt(mesh)

    def ask(self, name):
        return list(self.made) if name == "kinds" else self.made[name].pg


class _Accelerate(_Object):
    name = "accelerate"
    asks = ("dp", "dp_shard", "tp")

    def begin(self, tp, pp):
        self.groups = rm.connect(self.module().plan(dp_shard_size=SIZE // 2, tp_size=2))
        self.made = self.module().device_mesh(self.groups, "cpu")

    def ask(self, name):
        return self.made[name]

    def close(self, made):
        self.groups.close()


DIALECTS = (
    _ParallelState, _Fairscale, _Ezpz, _Grid, _Nanotron, _Minimal, _Deepspeed, _Torchtitan, _Mesh, _Accelerate,
)  # fmt: skip
SHARED = (_ParallelState, _Fairscale, _Ezpz, _SharedTorchtitan)


def plain(value):
    """A value as data that two processes can compare."""
    if isinstance(value, dist.ProcessGroup):
        return "group", dry.members(value), value.rank()
    if isinstance(value, DeviceMesh):
        return "mesh", value.mesh.tolist(), value.mesh_dim_names
    if isinstance(value, dict) or hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, int | str) else type(value).__name__


def attempt(step):
    """What a step gives, or the kind of its error."""
    try:
        return plain(step())
    except Exception as error:  # noqa: BLE001  - compared
        return type(error).__name__


def play(kind, shared, script):
    """What one rank sees of its script: rounds of a common ``begin`` and steps of its own."""
    program, seen = kind(shared), []
    for sizes, steps in script[dist.get_rank()]:
        program.begin(*sizes)
        for step, value in steps:
            if step == "pause":
                if dist.get_backend() != "fake":
                    dist.distributed_c10d._get_default_store().check(["nothing"])
            elif step == "ask":
                name = kind.asks[value % len(kind.asks)]
                seen.append((name, attempt(lambda name=name: program.ask(name))))
            else:
                seen.append((step, attempt(program.end if step == "end" else lambda value=value: program.write(value))))
        attempt(program.end)
    return seen


def single(kind, script, share):
    """What processes of their own see."""
    seen = []
    for rank in range(SIZE):
        with dry.world(rank, SIZE):
            seen.append(play(kind, kind.share() if share else None, script))
    return seen


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "pause", "pause", "write", "end"]), st.integers(0, 15)), max_size=12
)


@st.composite
def scripts(draw):
    """For each rank its rounds."""
    rounds = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    return [[(sizes, draw(STEPS)) for sizes in rounds] for _ in range(SIZE)]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", DIALECTS)
@settings(max_examples=100 if ALL else 8)
@given(scripts(), st.one_of(st.just("deterministic"), st.integers(0, 100)))
def test_every_dialect_answers_each_rank_as_a_process_of_its_own(kind, script, order):
    """4 ranks: begin, getters, writes and end, in any interleaving, give what a lone process gives on each rank."""
    assert sim.run(play, SIZE, kind, None, script, order=order) == single(kind, script, share=False)


@pytest.mark.parametrize("kind", [SHARED[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in SHARED[1:])])
@given(scripts(), st.one_of(st.just("deterministic"), st.integers(0, 100)))
@settings(max_examples=15 if ALL else 5)
def test_a_state_that_a_module_makes_is_each_ranks_own(kind, script, order):
    """4 ranks: an object that was made before the ranks began has the attributes of each rank in turn."""
    shared = kind.share()
    before = dict(vars(shared))
    assert sim.run(play, SIZE, kind, shared, script, order=order) == single(kind, script, share=True)
    assert vars(shared) == before


# One rank ends early, another late; then all begin again.
UNEVEN = [
    [((2, 2), [("ask", n) for n in range(8)] + [("pause", 0)] * rank + [("write", 9), ("end", 0), ("ask", 1)]),
     ((2, 1), [("pause", 0)] * (SIZE - rank) + [("ask", n) for n in range(16)])]
    for rank in range(SIZE)
]  # fmt: skip


def late():
    """Every dialect, each first imported by a rank."""
    assert not [name for name in sys.modules if name.startswith("rankmesh.dialects.")]
    for kind in DIALECTS:
        found = sim.run(play, SIZE, kind, None, UNEVEN)
        assert found == single(kind, UNEVEN, share=False), (kind, found)
        assert sim.run(play, SIZE, kind, None, UNEVEN, order=3) == found, kind


@pytest.mark.long
def test_a_module_that_a_rank_imports_first_is_each_ranks_own():
    """4 ranks, every dialect: what the first rank's import and its state were, the others do not see."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.sim.test_processes import late; late()"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def _as_grid():
    from deepspeed.runtime.pipe import module

    mpu = import_module("rankmesh.dialects.deepspeed").Mpu.connect(tp=2)
    with mpu.as_grid():
        dist.barrier()
        mine = module.PipelineParallelGrid() is mpu
    dist.barrier()
    mpu.close()
    return mine, module.PipelineParallelGrid


@pytest.mark.parametrize("order", ["deterministic", 1, 2, 3])
def test_the_grid_in_deepspeeds_module_is_each_ranks_own(monkeypatch, order):
    """4 ranks, each with its mpu as DeepSpeed's grid at the same time: its own inside, DeepSpeed's afterwards."""
    names = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.pipe", "deepspeed.runtime.pipe.module")
    modules = [ModuleType(name) for name in names]
    for name, module, inside in zip(names, modules, [*modules[1:], None], strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        if inside is not None:
            setattr(module, inside.__name__.rpartition(".")[2], inside)
    modules[-1].PipelineParallelGrid = "theirs"
    assert sim.run(_as_grid, 4, order=order) == [(True, "theirs")] * 4
    assert modules[-1].PipelineParallelGrid == "theirs"
