import gc
import os
import random
import sys
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.registries import registries
from rankmesh.sim import watchdog
from rankmesh.sim.watchdog import hooks


def outside():
    """What the process has, and no simulation may leave changed."""
    return {
        "registries": registries(),
        "world": c10d._world,
        "maker": c10d._new_process_group_helper,
        "initialised": dist.is_initialized(),
        "ranks": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")),
        "excepthook": sys.excepthook,
        "environment": dict(os.environ),
        "threads of torch": torch.get_num_threads(),
        "autograd": torch.autograd.is_multithreading_enabled(),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def _well(groups):
    torch.rand(3), random.random(), np.random.rand()  # noqa: S311  - not for secrets
    os.environ["LEFT_BY_A_RANK"] = "1"
    dist.all_reduce(torch.ones(1), group=groups["tp"].pg)


def _badly(groups):
    _well(groups)
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1), group=groups["dp"].pg)


def _hangs(groups):
    _well(groups)
    mine = dist.get_rank()
    while mine == 1:  # and asks nothing of torch
        pass
    dist.all_reduce(torch.ones(1), group=groups["dp"].pg)


@pytest.mark.parametrize("function", [_well, _badly])
def test_nothing_is_left(function):
    """4 ranks: after a run that ends well or badly, the process is as it was."""
    before = outside()
    with pytest.raises(sim.RanksFailed) if function is _badly else pytest.MonkeyPatch.context():
        sim.run(function, "tp=2,dp=2")
    assert (outside(), hooks._back) == (before, None)


def test_a_rank_that_spins_is_named():
    """4 ranks: the rank that does not come back, its line, and those that waited are told in time; nothing is left."""
    before = outside()
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(_hangs, "tp=2,dp=2", timeout=1.0)
    assert (outside(), hooks._back) == (before, None)
    found = caught.value.failures
    assert {type(error) for error in found.values()} == {sim.HungRank}
    assert {error.hung for error in found.values()} == {1}
    assert found[3].site.startswith(f"{__file__}:")
    assert "made no progress for 1 s, at" in str(found[3])


def test_a_rank_that_imports_is_waited_for(tmp_path, monkeypatch):
    """2 ranks: an import that takes longer than the limit is no hang; a program that does is told the option."""
    (tmp_path / "slowly.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imports():
        import slowly

        dist.barrier()
        return slowly.__name__

    assert sim.run(imports, 2, timeout=0.1) == ["slowly"] * 2
    with pytest.raises(sim.RanksFailed, match=r"or pass timeout=0\.4 if it works"):
        sim.run(lambda: time.sleep(0.5), 2, timeout=0.1)


def test_a_rank_without_a_core_is_waited_for(monkeypatch):
    """2 ranks: the seconds in which a rank is ready to run, and others have the cores, count for no limit."""
    if Path("/proc/self/schedstat").exists():
        assert watchdog._queued(0, [threading.current_thread()]) > 0
    monkeypatch.setattr(watchdog, "_queued", lambda *_: time.monotonic())
    assert sim.run(lambda: time.sleep(0.4) or dist.get_rank(), 2, timeout=0.1) == [0, 1]


RELEASE = threading.Event()
OUTCOMES = []


def _blocks():
    if dist.get_rank() == 0:
        dist.barrier()
    RELEASE.wait(30)  # a call that no exception reaches
    try:
        OUTCOMES.append(dist.get_rank())
        dist.all_reduce(torch.ones(1))
    except BaseException as error:
        OUTCOMES.append(type(error).__name__)
        raise


def test_a_rank_that_cannot_be_ended_is_harmless():
    """2 ranks: a thread that blocks outlives its run; what it then asks of torch raises; later runs are unharmed."""
    RELEASE.clear()
    OUTCOMES.clear()
    with pytest.raises(sim.RanksFailed, match="made no progress"):
        sim.run(_blocks, 2, timeout=0.2)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
    assert hooks._back is not None
    assert sim.run(dist.get_rank, 3) == [0, 1, 2]
    assert not dist.is_initialized()
    RELEASE.set()
    thread.join(10)
    assert not thread.is_alive()
    assert set(OUTCOMES) <= {"Abandoned"}
    assert sim.run(dist.get_rank, 3) == [0, 1, 2]
    assert hooks._back is None


def _draws():
    drawn = []
    for _ in range(2):
        drawn.append((float(torch.rand(1)), random.random(), float(np.random.randn())))  # noqa: S311
        dist.barrier()
    return tuple(drawn)


def test_random_numbers_are_each_ranks_own():
    """3 ranks: draws do not depend on who runs when; torch starts alike on all, random and numpy do not."""
    found = sim.run(_draws, 3)
    assert all(sim.run(_draws, 3, order=seed) == found for seed in range(5))
    assert sim.run(_draws, 3, seed=1) != found
    torchs, randoms, numpys = zip(*(first for first, _ in found), strict=True)
    assert (len(set(torchs)), len(set(randoms)), len(set(numpys))) == (1, 3, 3)


def _normals(pauses):
    drawn = []
    for _ in range(5):
        drawn += np.random.randn(1).tolist()
        if pauses:
            dist.barrier()
    return drawn


def test_numpys_spare_number_is_kept():
    """3 ranks: numpy draws normal numbers in pairs; handing over between the two of a pair changes nothing."""
    assert sim.run(_normals, 3, True) == sim.run(_normals, 3, False)


def _who():
    before = os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"]
    os.environ["MINE"] = before[0]
    dist.barrier()
    return (*before, os.environ["MINE"])


def test_the_environment_is_each_ranks_own():
    """5 ranks on nodes of 2: the launcher's variables, and those that a rank sets, are its own."""
    found = sim.run(_who, 5, ranks_per_node=2)
    assert found == [
        ("0", "0", "2", "5", "0"),
        ("1", "1", "2", "5", "1"),
        ("2", "0", "2", "5", "2"),
        ("3", "1", "2", "5", "3"),
        ("4", "0", "1", "5", "4"),
    ]


@pytest.fixture
def keeper(monkeypatch):
    """A module that keeps a rank's state in its globals."""
    module = ModuleType("keeper")
    module.RANK, module.SEEN = None, []
    monkeypatch.setitem(sys.modules, "keeper", module)
    return module


def _keeps():
    import keeper

    keeper.RANK = dist.get_rank()
    keeper.SEEN.append(dist.get_rank())
    dist.barrier()
    keeper.late = True
    return keeper.RANK, list(keeper.SEEN)


def test_globals_of_named_modules_are_each_ranks_own(keeper):
    """3 ranks: a named module's globals and lists are each rank's own, afterwards as before; else they are shared."""
    assert sim.run(_keeps, 3, modules=["keeper"]) == [(0, [0]), (1, [1]), (2, [2])]
    assert (keeper.RANK, keeper.SEEN, hasattr(keeper, "late")) == (None, [], False)
    assert sorted(sim.run(_keeps, 3)[0][1]) == [0, 1, 2]


def _megatron():
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    number = torch.tensor([dist.get_rank()])
    dist.all_reduce(number, group=mpu.get_data_parallel_group())
    return mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(), int(number)


def test_megatron_runs_as_it_is():
    """8 ranks: Megatron-Core's own parallel_state, which keeps its groups in globals, works on every rank."""
    pytest.importorskip("megatron.core.parallel_state")
    plan = rm.recipes.megatron(8, tp=2, pp=2)
    expected = [(r % 2, r // 4, sum(plan.of(r)["dp"].ranks)) for r in range(8)]
    assert sim.run(_megatron, 8) == expected


def _imports():
    import tests.sim.with_a_default as module

    return module.GROUP is None, module.group_of() is None


def test_defaults_of_modules_imported_by_a_rank():
    """2 ranks: `def f(group=dist.group.WORLD)` in a module that a rank imports does not keep that rank's world."""
    sys.modules.pop("tests.sim.with_a_default", None)
    assert sim.run(_imports, 2) == [(True, True)] * 2


def test_beside_a_real_world(tmp_path):
    """A process that is in a world of its own keeps it: before, after, and its groups are found by name again."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert sim.run(dist.get_rank, 3) == [0, 1, 2]
        assert dist.group.WORLD is world
        number = functional.all_reduce(torch.ones(1), "sum", world)
        assert float(number) == 1.0
    finally:
        dist.destroy_process_group()


def _nested():
    inside = sim.run(_draws, 2)
    dist.barrier()
    return inside


def test_a_simulation_inside_a_rank():
    """2 ranks: a rank may run a simulation of its own, with the same results as outside."""
    assert sim.run(_nested, 2) == [sim.run(_draws, 2)] * 2


def test_bad_arguments():
    """What are no ranks is refused, with what to give instead."""
    for bad in (0, -1, True, 2.5, None):
        with pytest.raises((rm.PlanError, rm.LayoutError), match="rank"):
            sim.run(_who, bad)


def test_what_ranks_reduced_is_gone():
    """A settled call keeps no tensor: of what every rank gave nothing is left, before Python looks for cycles."""
    given = []

    def program():
        x = torch.ones(4)
        dist.all_reduce(x)
        given.append(weakref.ref(x))
        dist.barrier()

    gc.collect()
    gc.disable()
    try:
        sim.run(program, 4)
    finally:
        gc.enable()
    assert [one() for one in given] == [None] * 4


def test_ranks_share_the_members_of_a_group():
    """Of the world of n ranks, one dict of n positions, not n."""
    found = sim.run(lambda: c10d._world.pg_group_ranks[dist.group.WORLD], 3)
    assert found[0] == {0: 0, 1: 1, 2: 2}
    assert all(one is found[0] for one in found)
