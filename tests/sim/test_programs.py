"""Random programs over random layouts: simulated ranks compute what real gloo ranks compute."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.sweeping import ALL
from tests.torch_lacks import GLOO_FOLLOWS_OPTIONS

import rankmesh as rm
from rankmesh import PlanError, sim

SHAPES = [(), (1,), (4,), (2, 3), (0,), (3, 1, 2)]
TYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16]
OPERATIONS = {}


def operation(function):
    """One operation that a program may have: called with its line, a group, and this rank's tensor."""
    OPERATIONS[function.__name__] = function
    return function


@operation
def all_reduce(call, group, local):
    """In place, asynchronous or not."""
    work = dist.all_reduce(local, call.reduction, group=group, async_op=call.later)
    if work is not None:
        work.wait()
    return [local]


@operation
def broadcast(call, group, local):
    """From the root."""
    dist.broadcast(local, call.root(group), group=group)
    return [local]


@operation
def reduce(call, group, local):
    """To the root alone; what other ranks hold afterwards is nothing that one may read."""
    dist.reduce(local, call.root(group), call.reduction, group=group)
    return [local] if dist.get_rank() == call.root(group) else []


@operation
def all_gather(call, group, local):
    """Everybody's."""
    found = [torch.zeros_like(local) for _ in range(group.size())]
    dist.all_gather(found, local, group=group)
    return found


@operation
def gather_and_scatter(call, group, local):
    """To the root, and back in reverse."""
    root, back = call.root(group), torch.zeros_like(local)
    found = [torch.zeros_like(local) for _ in range(group.size())] if dist.get_rank() == root else None
    dist.gather(local, found, root, group=group)
    dist.scatter(back, found and found[::-1], root, group=group)
    return [back]


@operation
def reduce_scatter(call, group, local):
    """Everybody's part of the sum."""
    part = torch.zeros_like(local)
    reduction = call.reduction if GLOO_FOLLOWS_OPTIONS else dist.ReduceOp.SUM
    dist.reduce_scatter(part, [local + place for place in range(group.size())], reduction, group=group)
    return [part]


@operation
def uneven(call, group, local):
    """Rows to everybody, each time another number."""
    mine, size = group.rank(), group.size()
    gives, takes = [(mine + to) % 3 for to in range(size)], [(mine + sender) % 3 for sender in range(size)]
    number = local.reshape(-1).sum().to(local.dtype)
    rows, found = number.expand(sum(gives), 2).contiguous(), local.new_zeros(sum(takes), 2)
    dist.all_to_all_single(found, rows, takes, gives, group=group)
    return [found]


@operation
def ring(call, group, local):
    """From the one before, to the one after."""
    ranks, found = dist.get_process_group_ranks(group), torch.zeros_like(local)
    if len(ranks) > 1:
        after, before = ranks[(group.rank() + 1) % len(ranks)], ranks[group.rank() - 1]
        works = [dist.isend(local, after, group), dist.irecv(found, before, group)]
        for work in works[:: 1 if call.later else -1]:
            work.wait()
    return [found]


@operation
def objects(call, group, local):
    """Objects to all."""
    found = [None] * group.size()
    dist.all_gather_object(found, local.double().sum().item(), group)
    return [torch.tensor(found)]


class Call:
    """One line of a program, the same on every rank."""

    def __init__(self, choose, kinds):
        self.operation = choose.choice(list(OPERATIONS.values()))
        self.kind, self.shape, self.dtype = choose.choice(kinds), choose.choice(SHAPES), choose.choice(TYPES)
        self.reduction = getattr(dist.ReduceOp, choose.choice(["SUM", "MAX", "MIN", "PRODUCT"]))
        self.later, self.seed, self._root = choose.random() < 0.5, choose.randrange(1000), choose.random()

    def root(self, group):
        """A member of the group."""
        return dist.get_process_group_ranks(group)[int(self._root * group.size())]

    def run(self, groups):
        """What this rank has afterwards, as plain data."""
        numbers = torch.Generator().manual_seed(self.seed * 100 + dist.get_rank())
        local = torch.randint(0, 3, self.shape, generator=numbers).to(self.dtype)
        found = self.operation(self, groups[self.kind].pg, local)
        return [[str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()] for tensor in found]


def layout(seed):
    """A plan over 4 ranks: axes in a random order, every union of them, some with process groups of their own."""
    choose = random.Random(seed)  # noqa: S311  - not for secrets
    sizes = choose.choice([{"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"tp": 4}, {"tp": 2, "cp": 1, "dp": 2}])
    names = choose.sample(list(sizes), len(sizes))
    mesh = rm.Mesh(**{name: sizes[name] for name in names})
    unions = [names[:1], names[-1:], names]
    kinds = [rm.GroupSpec(f"kind{n}", tuple(axes), share=choose.random() < 0.5) for n, axes in enumerate(unions)]
    return rm.Plan(mesh, kinds)


def program(groups, seed):
    """A random program of eight lines, by its seed."""
    choose = random.Random(seed)  # noqa: S311  - not for secrets
    return [Call(choose, list(groups)).run(groups) for _ in range(8)]


def _on_gloo(me, seeds):
    found = []
    for seed in seeds:
        with rm.connect(layout(seed)) as groups:
            found.append(program(groups, seed))
    return found


def test_random_programs_are_those_of_gloo(ranks):
    """4 ranks, many programs, half of them in a random order: every result is that of real ranks, bit for bit."""
    seeds = list(range(40 if ALL else 12))
    simulated = [sim.run(program, layout(seed), seed, order=seed if seed % 2 else "deterministic") for seed in seeds]
    assert [list(each) for each in zip(*simulated, strict=True)] == ranks(4, _on_gloo, seeds)


@pytest.mark.parametrize("ranks", [16384, "tp=8,dp=2048"])
def test_a_world_that_is_too_large_is_refused(ranks):
    """More ranks than one process can run are refused at once, with what to do instead."""
    with pytest.raises(PlanError, match=r"16384 ranks are more than the 4096 .*; simulate .*backend 'fake'"):
        sim.run(print, ranks)
