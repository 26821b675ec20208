import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd
from tests.dialects import dry
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import rankmesh as rm
from rankmesh.backend.registries import registries

PLAN = rm.Plan(rm.Mesh(tp=1, dp=2), [rm.GroupSpec("tp")])


def _t(*values):
    return torch.tensor([float(value) for value in values])


def _same(got, *values):
    assert torch.equal(got.flatten(), _t(*values)), got


def _all_reduce(pg, me):
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.AVG, ops.MAX, ops.MIN, ops.PRODUCT):
        tensor = _t(1, 2)
        dist.all_reduce(tensor, op, group=pg)
        _same(tensor, 1, 2)


def _all_reduce_scaled(pg, me):
    tensor = _t(2)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(3.0), group=pg)
    _same(tensor, 6)


def _work(pg, me):
    handle = dist.all_reduce(_t(5), group=pg, async_op=True)
    handle.wait()
    assert handle.wait(timedelta(seconds=3))
    assert handle.is_completed()
    assert handle.is_success()
    _same(handle.result()[0], 5)
    (value,) = handle.get_future().wait()
    _same(value, 5)


def _coalesced(pg, me):
    one, two, gathered, reduced = _t(1), _t(2), torch.zeros(2), torch.zeros(2)
    with c10d._coalescing_manager(pg):
        dist.all_reduce(one, group=pg)
        dist.all_reduce(two, group=pg)
    with c10d._coalescing_manager(pg, async_ops=True) as manager:
        dist.all_reduce(one, group=pg)
    manager.wait()
    with c10d._coalescing_manager(pg):
        dist.all_gather_into_tensor(gathered, _t(1, 2), group=pg)
    with c10d._coalescing_manager(pg):
        dist.reduce_scatter_tensor(reduced, _t(3, 4), group=pg)
    _same(torch.cat([one, two, gathered, reduced]), 1, 2, 1, 2, 3, 4)


def _broadcast(pg, me):
    tensor = _t(7)
    dist.broadcast(tensor, src=me, group=pg)
    dist.broadcast(tensor, group_src=0, group=pg)
    dist.reduce(tensor, dst=me, group=pg)
    _same(tensor, 7)


def _all_gather(pg, me):
    listed, flat, stacked = [torch.zeros(1)], torch.zeros(2), torch.zeros(1, 2)
    dist.all_gather(listed, _t(3), group=pg)
    dist.all_gather_into_tensor(flat, _t(3, 4), group=pg)
    dist.all_gather_into_tensor(stacked, _t(5, 6), group=pg)
    _same(torch.cat([listed[0], flat, stacked.flatten()]), 3, 3, 4, 5, 6)


def _lists_of_tensors(pg, me):
    out = [[torch.zeros(1), torch.zeros(2)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(out, [_t(1), _t(2, 3)], group=pg)
        dist.all_reduce_coalesced(tensors := [_t(4), _t(5)], group=pg)
    _same(torch.cat([*out[0], *tensors]), 1, 2, 3, 4, 5)


def _gather_scatter(pg, me):
    gathered, scattered = [torch.zeros(1)], torch.zeros(1)
    dist.gather(_t(3), gathered, dst=me, group=pg)
    dist.scatter(scattered, [_t(4)], src=me, group=pg)
    _same(torch.cat([gathered[0], scattered]), 3, 4)


def _reduce_scatter(pg, me):
    one, two = torch.zeros(1), torch.zeros(2)
    dist.reduce_scatter(one, [_t(3)], group=pg)
    dist.reduce_scatter_tensor(two, _t(4, 5), group=pg)
    _same(torch.cat([one, two]), 3, 4, 5)


def _all_to_all(pg, me):
    one, two, three = torch.zeros(2), torch.zeros(2), [torch.zeros(2)]
    dist.all_to_all_single(one, _t(1, 2), group=pg)
    dist.all_to_all_single(two, _t(3, 4), [2], [2], group=pg)
    dist.all_to_all(three, [_t(5, 6)], group=pg)
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0), [0], [0], group=pg)
    _same(torch.cat([one, two, three[0]]), 1, 2, 3, 4, 5, 6)


def _barrier(pg, me):
    dist.barrier(group=pg)
    dist.barrier(group=pg, async_op=True).wait()
    dist.monitored_barrier(group=pg, timeout=timedelta(seconds=1))
    dist.monitored_barrier(group=pg, wait_all_ranks=True)


def _objects(pg, me):
    got = [None]
    dist.all_gather_object(got, {"a": 1}, group=pg)
    assert got == [{"a": 1}]
    dist.gather_object(4, got, dst=me, group=pg)
    assert got == [4]
    dist.scatter_object_list(got, [9], src=me, group=pg)
    assert got == [9]
    dist.broadcast_object_list(sent := ["x"], src=me, group=pg)
    assert sent == ["x"]


def _functional_collectives(pg, me):
    wait = functional.wait_tensor
    _same(wait(functional.all_reduce(_t(2), "sum", pg)), 2)
    _same(wait(torch.ops._c10d_functional.all_reduce(_t(2), "sum", pg.group_name)), 2)
    _same(wait(functional.all_gather_tensor(_t(1, 2), 0, pg)), 1, 2)
    _same(wait(functional.reduce_scatter_tensor(_t(1, 2), "sum", 0, pg)), 1, 2)
    _same(wait(functional.all_to_all_single(_t(1, 2), [2], [2], pg)), 1, 2)
    _same(wait(functional.broadcast(_t(1, 2), 0, pg)), 1, 2)
    _same(wait(functional.all_reduce_coalesced([_t(1), _t(2)], "sum", pg)[1]), 2)
    _same(wait(functional.all_gather_into_tensor_coalesced([_t(1), _t(2)], pg)[1]), 2)


def _functional_gradients(pg, me):
    calls = [
        partial(functional.all_gather_tensor_autograd, gather_dim=0, group=pg),
        partial(functional.reduce_scatter_tensor_autograd, reduceOp="sum", scatter_dim=0, group=pg),
        partial(functional.all_to_all_single_autograd, output_split_sizes=[2], input_split_sizes=[2], group=pg),
        partial(autograd.all_reduce, group=pg),
        lambda tensor: autograd.reduce_scatter(torch.zeros(2), [tensor], group=pg),
        lambda tensor: autograd.all_to_all_single(torch.zeros(2), tensor, group=pg),
    ]
    for call in calls:
        tensor = _t(1, 2).requires_grad_()
        (call(tensor) * _t(3, 4)).sum().backward()
        _same(tensor.grad, 3, 4)


def _inputs_with_gradients(pg, me):
    """What a collective writes to has no history, as with gloo and NCCL."""
    out = torch.zeros(2)
    dist.all_gather_into_tensor(out, _t(1, 2).requires_grad_(), group=pg)
    assert not out.requires_grad


def _in_place(pg, me):
    tensor = _t(1, 2)
    dist.all_gather_into_tensor(tensor, tensor, group=pg)
    dist.reduce_scatter_tensor(tensor, tensor, group=pg)
    _same(tensor, 1, 2)


def _data_parallel(pg, me):
    for hook in (None, default_hooks.allreduce_hook):
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pg)
        if hook is not None:
            model.register_comm_hook(pg, hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        _same(model.module.bias.grad, 1, 1)


def _dtensor(pg, me):
    mesh = DeviceMesh.from_group(pg, "cpu")
    tensor = DTensor.from_local(_t(1, 2), mesh, [Shard(0)])
    _same(tensor.redistribute(mesh, [Replicate()]).to_local(), 1, 2)
    _same(tensor.full_tensor(), 1, 2)


def _to_itself(pg, me):
    """There is no peer: refused, not silently done."""
    calls = [
        lambda: dist.send(_t(1), group_dst=0, group=pg),
        lambda: dist.recv(torch.zeros(1), group_src=0, group=pg),
        lambda: dist.recv(torch.zeros(1), group=pg),
        lambda: dist.isend(_t(1), me, group=pg),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), me, group=pg)]),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except (ValueError, RuntimeError):
            continue
        raise AssertionError(f"call {number} was accepted")


def _settings(pg, me):
    c10d._set_pg_timeout(timedelta(seconds=3), pg)
    pg._set_sequence_number_for_group()
    assert pg._get_sequence_number_for_group() >= 0
    assert (dist.get_rank(pg), dist.get_world_size(pg), dist.get_process_group_ranks(pg)) == (0, 1, [me])
    assert c10d._resolve_process_group(pg.group_name) is pg
    assert dist.get_backend(pg) == "gloo"


BATTERY = {
    "all-reduce": _all_reduce,
    "a scaled all-reduce": _all_reduce_scaled,
    "work and its future": _work,
    "coalescing": _coalesced,
    "broadcast and reduce": _broadcast,
    "all-gather": _all_gather,
    "lists of tensors": _lists_of_tensors,
    "gather and scatter": _gather_scatter,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "barriers": _barrier,
    "objects": _objects,
    "functional collectives": _functional_collectives,
    "functional gradients": _functional_gradients,
    "inputs with gradients": _inputs_with_gradients,
    "in place": _in_place,
    "data-parallel training": _data_parallel,
    "a DTensor": _dtensor,
    "messages to itself": _to_itself,
    "timeout, sequence and registries": _settings,
}
RAN = []


def _battery(me):
    """Every part in turn, on the group of rank 0 alone and of rank 1 alone; what failed."""
    failed = {}
    with rm.connect(PLAN) as groups:
        for what, part in BATTERY.items():
            try:
                part(groups["tp"].pg, me.rank)
            except Exception as error:  # noqa: BLE001, PERF203  - the other parts are tried all the same
                failed[what] = f"{type(error).__name__}: {error}"
    return failed


@pytest.mark.parametrize("what", BATTERY)
def test_a_group_of_one_answers(ranks, what):
    """2 ranks, each alone in a group: it gives what a group of one must give (one run for all)."""
    RAN[:] = RAN or ranks(2, _battery)
    assert [failed.get(what) for failed in RAN] == [None, None]


def _cost(me):
    """What twenty groups of one rank take while they live, and the keys that a connect writes."""
    kinds = [rm.GroupSpec(f"g{number}", "tp", share=False) for number in range(20)]
    before, keys = me.resources(), me.store.num_keys()
    with rm.connect(rm.Plan(rm.Mesh(tp=1), kinds, world_size=1)) as groups:
        for group in groups.values():
            dist.all_reduce(torch.ones(1), group=group.pg)
        during, made = me.resources(), registries()["pg_map"] - 1
    used = {name: during[name] - before[name] for name in ("descriptors", "threads")}
    return [used, made, me.store.num_keys() - keys]


def test_a_group_of_one_costs_nothing(ranks):
    """1 rank, 20 groups: no descriptor, no thread, and no store key but those by which ranks agree and complete."""
    ((used, made, written),) = ranks(1, _cost)
    assert (used, made) == ({"descriptors": 0, "threads": 0}, 20)
    assert written <= 12


def test_pools_of_memory():
    """A group of one rank takes a pool of memory to register, as Megatron's allocator asks of every group it gets."""
    with dry.world(0, 2), rm.connect(PLAN) as groups:
        for device in ("cpu", "cuda"):
            backend = groups["tp"].pg._get_backend(torch.device(device))
            backend.register_mem_pool(object(), symm=True)
            backend.register_mem_pool(object())
            backend.deregister_mem_pool(object())
            assert backend.supports_coalescing in (True, False)
            assert backend.rank() == 0
