"""What random programs (test_programs.py) lack of torch.distributed, for simulated and real ranks, as plain data."""

import torch
import torch.distributed as dist

# torch 2.13 gave these two their names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rank_values(*shape, dtype=torch.int64):
    """A tensor that differs from rank to rank and from element to element."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size) + 1 + 100 * dist.get_rank()).reshape(shape).to(dtype)


def reductions():
    """all_reduce and reduce with each operation, and of complex numbers; gathers and scatters of one tensor."""
    found, size = {}, dist.get_world_size()
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        whole = rank_values(3)
        dist.all_reduce(whole, op=op)
        at_root = rank_values(2)
        dist.reduce(at_root, 1, op=op)
        found[name] = [whole.tolist(), at_root.tolist() if dist.get_rank() == 1 else None]
    number = rank_values(2, dtype=torch.float64) * 1j
    dist.all_reduce(number)
    joined, stacked = torch.zeros(2 * size, dtype=torch.int64), torch.zeros(size, 2, dtype=torch.int64)
    _gather(joined, rank_values(2))
    _gather(stacked, rank_values(1, 2))
    share = torch.zeros(2, dtype=torch.int64)
    _scatter(share, rank_values(2 * size))
    return found, str(number.tolist()), [tensor.tolist() for tensor in (joined, stacked, share)]


def exchanges():
    """all_to_all with equal parts, point to point, in groups too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    single = torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(single, rank_values(size))
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = even if rank % 2 == 0 else odd
    inside = rank_values(1)
    dist.all_reduce(inside, group=mine)
    got = torch.zeros(2, dtype=torch.int64)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, rank_values(2), (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    ):
        work.wait()
    tagged = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    if rank == 0:
        works = [dist.isend(rank_values(1) + tag, 1, tag=tag) for tag in (7, 8)]
    else:
        works = [dist.irecv(tagged[tag - 7], 0, tag=tag) for tag in (8, 7)] if rank == 1 else []
    for work in works:
        work.wait()
    ordered = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    works = [dist.isend(rank_values(1) + i, 3) for i in range(2)] if rank == 2 else []
    dist.barrier()
    if rank == 3:
        for tensor in ordered:
            dist.recv(tensor, 2)
    for work in works:
        work.wait()
    anybody = []
    if rank == 0:
        for _ in range(size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            anybody.append((dist.recv(number), int(number)))
    else:
        dist.send(rank_values(1), 0)
    dist.destroy_process_group(mine)
    tensors = [single, inside, got, *tagged, *ordered]
    return [tensor.tolist() for tensor in tensors], sorted(anybody)


def objects():
    """Objects, works and futures, coalesced calls, barriers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    output = [("from", rank)]
    dist.broadcast_object_list(output, src=2)
    taken = [None]
    dist.scatter_object_list(taken, [[i, "part"] for i in range(size)] if rank == 0 else None, src=0)
    at_root = [None] * size if rank == 1 else None
    dist.gather_object(rank, at_root, dst=1)
    passed = [None]
    if rank == 1:
        dist.send_object_list([{1, 2}], dst=2)
    if rank == 2:
        dist.recv_object_list(passed, src=1)
    later = rank_values(2)
    work = dist.all_reduce(later, async_op=True)
    work.wait()
    future = dist.all_reduce(rank_values(1), async_op=True).get_future()
    several = [rank_values(2), rank_values(3)]
    with dist._coalescing_manager(async_ops=True) as calls:
        for tensor in several:
            dist.all_reduce(tensor)
    calls.wait()
    dist.monitored_barrier()
    dist.barrier()
    numbers = [later.tolist(), future.wait()[0].tolist(), *[tensor.tolist() for tensor in several]]
    return output, taken, at_root, [sorted(item) for item in passed if item], numbers, work.is_completed()


PARTS = {"reductions": reductions, "exchanges": exchanges, "objects": objects}


def on_a_rank(me, part):
    """One part on a real rank, as plain data."""
    return plain(PARTS[part]())


def plain(value):
    """Tuples as lists, as they come back from other processes."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
