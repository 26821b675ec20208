import os
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks
from tests.sockets import free_port

from rankmesh import sim
from rankmesh.backend.registries import registries
from rankmesh.dialects.nanotron import ParallelContext, ParallelContext04
from rankmesh.errors import ConnectError, LayoutError, NotInitialized, SizesError

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
ORDER = ("ep", "pp", "dp", "cp", "tp")
# Which axes vary inside the groups of each attribute.
VARYING = {
    "world_pg": ORDER,
    "tp_pg": ("tp",),
    "cp_pg": ("cp",),
    "dp_pg": ("dp",),
    "pp_pg": ("pp",),
    "ep_pg": ("ep",),
    "mp_pg": ("ep", "pp", "tp"),
    "dp_cp_pg": ("dp", "cp"),
    "tp_and_ep_pg": ("ep", "tp"),
}


def enumerated(sizes, local):
    """Every group of each attribute, from a count through (ep, pp, dp, cp, tp) as nanotron reshapes the world."""
    groups = dry.enumerated(ORDER, sizes, VARYING)
    world = len(groups["world_pg"][0])
    return {**groups, "local_pg": [list(range(first, first + local)) for first in range(0, world, local)]}


def _context(sizes, **how):
    return ParallelContext(sizes["tp"], sizes["pp"], sizes["dp"], sizes["cp"], sizes["ep"], **how)


def _place(rank, local):
    """The launcher's variables of a rank on a host of ``local`` ranks."""
    return {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}


def _check(context, rank, sizes, local):
    groups = enumerated(sizes, local)
    for name, kind in groups.items():
        assert dry.members(getattr(context, name)) == dry.row_of(rank, kind), name
    keys = {tuple(row) for kind in groups.values() for row in kind}
    assert set(context.world_ranks_to_pg) == keys
    for ranks, pg in context.world_ranks_to_pg.items():
        assert (dry.members(pg) == list(ranks)) if rank in ranks else (pg == OUTSIDE)
    matrix = np.arange(context.world_size).reshape([sizes[axis] for axis in ORDER])
    assert np.array_equal(context.world_rank_matrix, matrix)
    assert context.parallel_order == list(ORDER)
    assert (context.world_size, context.local_world_size) == (matrix.size, local)
    fragment = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}
    assert {axis: getattr(context, f"{token}_parallel_size") for axis, token in fragment.items()} == sizes
    for other in {0, rank, matrix.size - 1}:
        place = context.get_local_ranks(other)
        assert place == dict(zip(ORDER, (int(at[0]) for at in np.where(matrix == other)), strict=True))
        assert context.get_global_rank(**{f"{axis}_rank": at for axis, at in place.items()}) == other


def _context_of_peer():
    sizes = {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1}
    found = []
    for kind, minutes in ((ParallelContext, 20), (ParallelContext04, 10)):
        context = kind(2, 2, 2)
        limits = {group.local.options.timeout for group in context.groups.values()}
        assert (limits, context._groups) == ({minutes * 60.0}, {})
        with mock.patch.object(dist, "new_group") as made:
            context.create_new_group([[0, 3, 5], [1, 2, 4, 6, 7]])
        context.world_ranks_to_pg.clear()
        found.append(made.call_args.kwargs["timeout"])
        context.destroy()
    context = _context(sizes)
    matrix = np.arange(8).reshape(1, 2, 2, 1, 2)
    every = slice(None)
    assert context.get_global_rank(0, every, 1, 0, 0).tolist() == matrix[0, :, 1, 0, 0].tolist()
    assert context.get_global_rank(0, 1, every, 0, [1, 0]).tolist() == matrix[0, 1, :, 0, [1, 0]].tolist()
    with pytest.raises(LayoutError):
        context.get_global_rank(0, 2, every, 0, 0)
    context.destroy()
    return found


def test_what_nanotron_has_besides():
    """8 simulated ranks: groups wait 20 minutes (0.4: 10), `_groups` is there, and global ranks of slices."""
    assert sim.run(_context_of_peer, 8) == [[timedelta(minutes=20), timedelta(minutes=10)]] * 8


# -- live --------------------------------------------------------------------------------------------------------

EIGHT = {"tp": 2, "pp": 1, "dp": 2, "cp": 1, "ep": 2}


def _use(context):
    for name in (*VARYING, "local_pg"):
        total = torch.ones(1)
        pg = getattr(context, name)
        dist.all_reduce(total, group=pg)
        assert total.item() == dist.get_world_size(pg)


def _cycle():
    context = _context(EIGHT)
    context.create_new_group([[0, 3], [1, 2, 4], [5], [6], [7]])
    context.destroy()


def _live(me):
    os.environ |= _place(me.rank, 4)  # two hosts of four ranks in a world of eight
    before = registries()
    context = _context(EIGHT)
    _use(context)
    _check(context, me.rank, EIGHT, 4)
    with _context(EIGHT, backend="gloo") as second:
        _use(second)
    _use(context)
    context.destroy()
    context.destroy()
    me.error(NotInitialized, lambda: context.groups)
    assert registries() == before
    return leaks.left_by(me, _cycle)


def test_two_hosts_of_four(ranks):
    """8 ranks, expert parallelism, LOCAL_WORLD_SIZE 4: every attribute, collectives, two contexts, nothing left."""
    # torch counts the groups that new_group ever made; nothing else stays.
    assert ranks(8, _live) == [{"group_count": 6}] * 8


def _new_groups(me):
    context = ParallelContext(2, 1, 2)
    known = registries()["pg_map"]
    tp_again = context.create_new_group(np.array([[0, 1], [2, 3]])) is context.tp_pg
    unchanged = registries()["pg_map"] == known
    ends = context.create_new_group([[3, 0]])
    pairs = context.create_new_group([[0, 2], [1, 3]])
    crossed = context.create_new_group([[0, 3], [1, 2]])
    last = dry.members(context.create_new_group([[0, 1, 2], [1, 2, 3]]))
    single = context.create_new_group([[0], [1], [2], [3]])
    sums = []
    for pg in (ends, pairs, crossed, single):
        total = torch.tensor([me.rank])
        if pg != OUTSIDE:
            dist.all_reduce(total, group=pg)
        sums.append(None if pg == OUTSIDE else total.item())
    # What nanotron does for tied weights: every rank asks the dictionary whether to make the group.
    for ranks in ((0, 1), (0, 1, 3), (0, 3), (2, 3)):
        if ranks not in context.world_ranks_to_pg:
            context.world_ranks_to_pg[ranks] = dist.new_group(ranks)
    tied = context.world_ranks_to_pg[0, 1, 3]
    total = torch.ones(1)
    if tied != OUTSIDE:
        dist.all_reduce(total, group=tied)
    context.destroy()
    return [tp_again, unchanged, sums, last, total.item(), registries()["pg_map"]]


def test_groups_that_callers_make(ranks):
    """4 ranks: known groups are found, new ones made once, others get no group, all destroyed; ties do not hang."""
    sums = [[3, 2, 3, 0], [None, 4, 3, 1], [None, 2, 3, 2], [3, 4, 3, 3]]
    for rank, seen in enumerate(ranks(4, _new_groups)):
        last = [0, 1, 2] if rank == 0 else [1, 2, 3]
        assert seen == [True, True, sums[rank], last, 1.0 if rank == 2 else 3.0, 1]


def _port(me):
    if me.rank == 0:
        me.store.set("port", str(free_port()))
    return me.store.get("port").decode()


def _starts(me):
    """The launcher's variables and no world: the context starts it, and ends it."""
    os.environ.update(RANK=str(me.rank), WORLD_SIZE=str(me.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=_port(me))
    os.environ |= _place(me.rank, me.size)
    if not torch.cuda.is_available():
        me.error(ConnectError, ParallelContext, 2, 1, 2)  # NCCL
    me.error(SizesError, ParallelContext, 2, 1, 3, backend="gloo")
    ended = dist.is_initialized()
    me.meet("refused")
    context = ParallelContext(2, 1, 2, backend="gloo")
    _use(context)
    inside = dist.get_backend()
    context.destroy()
    return [ended, inside, dist.is_initialized(), registries()["pg_map"]]


def test_it_starts_the_world_and_ends_it(ranks):
    """4 ranks with a launcher's variables: a gloo world from start to destroy; refused sizes leave none behind."""
    assert ranks(4, _starts, world=None) == [[False, "gloo", False, 0]] * 4


def _fails_inside(me):
    """Rank 0 does not come to the end of its block: it must not wait for ranks that still work."""
    if me.rank == 0:
        me.error(KeyError, _raises)
        me.store.set("failed", "yes")
    else:
        context = ParallelContext04(2, 1, 2, 1, "gloo")
        me.store.wait(["failed"])
        context._destroy(meet=False)
    return registries()["pg_map"]


def _raises():
    with ParallelContext04(2, 1, 2, 1, "gloo"):
        raise KeyError("inside")


def test_an_exception_inside_does_not_wait(ranks):
    """4 ranks, release 0.4, one raises inside its block: it leaves at once, with its groups destroyed."""
    assert ranks(4, _fails_inside) == [1] * 4


def _refused(me):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        os.environ.pop(name, None)
    me.error(SizesError, ParallelContext, 2, 1, 1)
    me.error(SizesError, ParallelContext, 2, 1, 2, 1, 2)
    backend = me.error(ConnectError, ParallelContext, 2, 1, 2, backend="mpi")
    for text in ("3", "four"):  # no divisor of the world, no number
        os.environ["LOCAL_WORLD_SIZE"] = text
        me.error(SizesError, ParallelContext, 2, 1, 2)
    os.environ |= _place(me.rank + 1, 2)
    place = me.error(SizesError, ParallelContext, 2, 1, 2)
    left = registries()["pg_map"]
    os.environ |= _place(me.rank, 2)
    with ParallelContext(2, 1, 2) as context:
        me.error(LayoutError, context.get_global_rank, 0, 0, 2, 0, 0)
        me.error(LayoutError, context.get_global_rank, 0, 0, -1, 0, 0)
        me.error(LayoutError, context.get_local_ranks, 4)
    dist.destroy_process_group()
    me.error(NotInitialized, ParallelContext, 1, 1, 1)
    return [left, backend["backend"], backend["world_backend"], place["position"]]


def test_refusals(ranks):
    """4 ranks: sizes, backends, hosts and places that cannot be; nothing is left of a context that failed."""
    assert ranks(4, _refused) == [[1, "mpi", "gloo", rank % 2] for rank in range(4)]


# -- any world ---------------------------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), st.integers(1, 3)))


@dry.PROPERTIES
@given(SIZES, st.data())
def test_any_rank_of_any_world(sizes, data):
    """Dry worlds of up to 243 ranks on hosts of any size: every attribute, every key, every place."""
    world = int(np.prod(list(sizes.values())))
    rank = data.draw(st.integers(0, world - 1))
    local = data.draw(st.sampled_from([size for size in range(1, world + 1) if world % size == 0]))
    with mock.patch.dict(os.environ, _place(rank, local)), dry.world(rank, world), _context(sizes) as context:
        _check(context, rank, sizes, local)


@pytest.mark.parametrize(("world", "local"), [(4, 4), (8, 8), (16, 8)])
def test_hosts_without_a_launcher(monkeypatch, world, local):
    """Dry worlds without LOCAL_WORLD_SIZE: one host up to 8 ranks, hosts of 8 above, as nanotron has it."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with dry.world(world - 1, world), ParallelContext(1, 1, world) as context:
        assert context.local_world_size == local
        assert dry.members(context.local_pg) == list(range(world - local, world))
