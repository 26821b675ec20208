import inspect
import time

import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh import sim


def failures(function, ranks, **how):
    """The errors of a run, by rank."""
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(function, ranks, **how)
    assert caught.value.__cause__ in caught.value.failures.values()
    return caught.value.failures


def line_of(function, text):
    """``file:line`` of the line of a function that has this text."""
    lines, start = inspect.getsourcelines(function)
    number = start + next(index for index, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{number}"


def one():
    """What most calls give."""
    return torch.ones(2)


def _other_operation(groups):
    if dist.get_rank() == 3:
        dist.broadcast(one(), 2, group=groups["tp"].pg)
    else:
        dist.all_reduce(one(), group=groups["tp"].pg)


def test_both_sides_of_a_mismatch_are_named():
    """4 ranks: the members of the group, and only they, learn the group, each rank's call and each rank's line."""
    found = failures(_other_operation, "tp=2,dp=2")
    assert sorted(found) == [2, 3]
    for rank, error in found.items():
        assert (error.kind, error.group, error.ranks, error.rank) == ("mismatch", "tp@dp1", (2, 3), rank)
        assert error.calls[3].startswith("broadcast")
        assert error.calls[2].startswith("all_reduce")
        assert error.sites == {
            2: line_of(_other_operation, "dist.all_reduce"),
            3: line_of(_other_operation, "dist.broadcast"),
        }
        assert "group tp@dp1 of ranks [2, 3]: operations differ" in str(error)


MISMATCHES = {
    "shape": lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())),
    "dtype": lambda: dist.all_reduce(one().to([torch.float32, torch.float64][dist.get_rank()])),
    "reduction": lambda: dist.all_reduce(one(), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][dist.get_rank()]),
    "root": lambda: dist.broadcast(one(), dist.get_rank()),
    "reduce root": lambda: dist.reduce(one(), dist.get_rank()),
    "number of tensors": lambda: _coalesced(1 + dist.get_rank()),
    "gathered shape": lambda: dist.all_gather([one(), one()], torch.ones(2 + dist.get_rank())),
    "scattered shape": lambda: _scatter([torch.ones(2), torch.ones(3)]),
    "scattered number": lambda: _scatter([torch.ones(2)] * 3),
    "pieces": lambda: dist.all_to_all([one(), one()], [torch.ones(2 + dist.get_rank()), one()]),
    "split sizes": lambda: _split([[1, 1], [1, 1]], [[1, 1], [2, 0]]),
    "rows": lambda: dist.all_to_all_single(torch.ones(2, 2), torch.ones(2, 1 + dist.get_rank())),
    "widths": lambda: dist.all_to_all_single(torch.ones(2, 2), torch.ones(2, 3)),
    "sent": lambda: _pair(torch.ones(2), torch.ones(3)),
    "sent dtype": lambda: _pair(torch.ones(2), torch.ones(2).int()),
    "barrier": lambda: dist.barrier() if dist.get_rank() else dist.monitored_barrier(),
    "order": lambda: _in_order(dist.get_rank()),
}


def test_error_while_calls_are_matched_reaches_every_member(monkeypatch):
    """2 ranks: an error between the calls of members fails both immediately; nobody waits for the time limit."""

    def broken(calls):
        raise KeyError("gives")

    monkeypatch.setattr("rankmesh.sim.channel.compute", broken)
    start = time.monotonic()
    found = failures(lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)), 2, timeout=200.0)
    assert {rank: error.kind for rank, error in found.items()} == {0: "refused", 1: "refused"}
    assert time.monotonic() - start < 60.0


def _coalesced(number):
    with dist._coalescing_manager():
        for _ in range(number):
            dist.all_reduce(one())


def _scatter(tensors):
    options = (
        dist.ScatterOptions()
        if hasattr(dist, "ScatterOptions")
        else torch.distributed.distributed_c10d.ScatterOptions()
    )
    options.rootRank = 0
    dist.group.WORLD.scatter([one()], [tensors] if dist.get_rank() == 0 else [], options).wait()


def _split(takes, gives):
    rank = dist.get_rank()
    dist.all_to_all_single(torch.ones(sum(takes[rank])), torch.ones(2), takes[rank], gives[rank])


def _pair(sent, received):
    if dist.get_rank():
        dist.recv(received, 0)
    else:
        dist.send(sent, 1)


def _in_order(rank):
    calls = [lambda: dist.all_reduce(one()), dist.barrier]
    for call in calls if rank else calls[::-1]:
        call()


@pytest.mark.parametrize("name", MISMATCHES)
def test_every_kind_of_mismatch(name):
    """2 ranks: whatever differs between two calls of one group is told, on both ranks, with both calls."""
    found = failures(MISMATCHES[name], 2)
    assert {rank: error.kind for rank, error in found.items()} == {0: "mismatch", 1: "mismatch"}
    assert found[0].calls.keys() == found[0].sites.keys() == {0, 1}


def _absent_member():
    if dist.get_rank() == 1:
        return
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(one())


def _never_joined():
    if dist.get_rank() == 0:
        dist.all_reduce(one(), async_op=True)


def _never_received():
    if dist.get_rank() == 0:
        dist.isend(one(), 1)


def _sends_first():
    dist.send(one(), 1 - dist.get_rank())
    dist.recv(one(), 1 - dist.get_rank())


def _changed_in_flight():
    tensor = one()
    work = dist.all_reduce(tensor, async_op=True)
    tensor.mul_(2)
    work.wait()


def _destroyed(groups):
    pg = groups["tp"].pg
    groups.close()
    dist.all_reduce(one(), group=pg)


def _not_mine():  # of which torch only warns
    dist.all_reduce(one(), group=dist.new_group([0, 1]))


def _hashed_names():  # which differ once ranks own different numbers of groups
    rank = dist.get_rank()
    if rank in (0, 3):
        dist.new_group([0, 3], use_local_synchronization=True)
    dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)


def _two_of_the_same_members(groups):
    for name in ("tp", "own")[:: 1 if dist.get_rank() else -1]:
        dist.all_reduce(one(), group=groups[name].pg)


TWO_OF_THE_SAME = rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp"), rm.GroupSpec("own", "tp", share=False)])
# A program, its ranks, the kind of error and the ranks that get it, and what the first of these is told.
ERRORS = [
    (lambda: dist.all_reduce(one(), op=dist.ReduceOp.BAND), 2, "refused", (0, 1), "these tensors cannot be computed"),
    (_absent_member, 4, "mismatch", (0, 2, 3), "rank 1  has returned"),
    (_never_joined, 2, "unmatched", (0,), "never joined by rank 1"),
    (_never_received, 2, "unmatched", (0,), "never joined by rank 1"),
    (_sends_first, 2, "deadlock", (0, 1), "waits in send to rank 1"),
    (_changed_in_flight, 2, "race", (0, 1), "rank 0 changed a tensor between the call and the wait"),
    (_destroyed, "tp=2,dp=2", "destroyed", (0, 1, 2, 3), "the destroyed group tp@dp0"),
    (_not_mine, 4, "outside", (2, 3), "torch.distributed only warns"),
    (_hashed_names, 4, "deadlock", (0, 1, 2, 3), "have one group under the names"),
    (_two_of_the_same_members, TWO_OF_THE_SAME, "deadlock", (0, 1), "on own of ranks [0, 1]"),
]


@pytest.mark.parametrize(("program", "ranks", "kind", "failed", "text"), ERRORS)
def test_every_kind_of_error(program, ranks, kind, failed, text):
    """The ranks that cannot go on get an error of this kind, at once, with the cause in words."""
    found = failures(program, ranks)
    assert {rank: error.kind for rank, error in found.items()} == dict.fromkeys(failed, kind)
    message = str(found[failed[0]])
    assert text in message
    assert ("under the names" in message) == (program is _hashed_names)


def _changed_beside():
    whole = torch.ones(4)
    work = dist.all_reduce(whole[:2], async_op=True)
    whole[2:] = 5
    work.wait()
    return whole.tolist()


def test_a_tensor_is_changed_beside_what_is_in_flight():
    """2 ranks: writing beside what a call has, in the same memory, is not an error."""
    assert sim.run(_changed_beside, 2) == [[2.0, 2.0, 5.0, 5.0]] * 2


def _opposite(groups):
    names = ["dp", "tp"] if dist.get_rank() in (0, 3) else ["tp", "dp"]
    for name in names:
        dist.all_reduce(one(), group=groups[name].pg)


def test_groups_entered_in_opposite_orders():
    """4 ranks: a ring of ranks that wait for each other is told on all of them, with group and line of each."""
    found = failures(_opposite, "tp=2,dp=2")
    entered = ["dp@tp0 of ranks [0, 2]", "tp@dp0 of ranks [0, 1]", "tp@dp1 of ranks [2, 3]", "dp@tp1 of ranks [1, 3]"]
    for rank, group in enumerate(entered):
        assert (found[rank].kind, found[rank].group) == ("deadlock", group.split()[0])
        assert group in str(found[0])
    assert str(found[2]).count("test_divergence.py:") == 4


def _raises():
    if dist.get_rank() == 1:
        raise KeyError("boom")
    dist.barrier()


def test_a_member_that_raised():
    """3 ranks: the ranks that wait for one that raised are told so; the error that came first is the cause."""
    with pytest.raises(sim.RanksFailed, match=r"rank 1 of 3 failed: KeyError: 'boom'") as caught:
        sim.run(_raises, 3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "rank 1  has raised KeyError: 'boom', at" in str(caught.value.failures[0])


def _returns():
    if dist.get_rank() != 1:
        dist.barrier()
    return dist.get_rank()


def test_exceptions_in_place_of_values():
    """3 ranks: with return_exceptions the values of the others are there, and the errors where values would be."""
    first, value, last = sim.run(_returns, 3, return_exceptions=True)
    assert value == 1
    assert (first.kind, last.kind) == ("deadlock", "deadlock")
    assert "rank 1  has returned" in str(first)


KEPT = {}


def _of_another_rank(groups):
    KEPT.setdefault("pg", groups["tp"].pg)
    dist.barrier()
    dist.all_reduce(one(), group=KEPT["pg"])


def test_the_process_group_of_another_rank():
    """4 ranks: a process group that one rank left where all can reach it is refused by name on the others."""
    KEPT.clear()
    found = failures(_of_another_rank, "tp=2,dp=2")
    kinds = sorted(error.kind for error in found.values())
    assert kinds == ["deadlock", "foreign", "foreign", "foreign"]
    assert any("modules=" in str(error) for error in found.values())


def _two_meshes(groups):
    other = rm.Plan(rm.Mesh(dp=2, tp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")], name="llm")
    with rm.connect(other) as theirs:
        chosen = groups if dist.get_rank() == 0 else theirs
        dist.all_reduce(one(), group=chosen["dp"].pg)


def test_a_group_of_another_mesh():
    """4 ranks, two meshes: the rank that takes the group of the wrong mesh is seen, with both groups' names."""
    encoder = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")], name="encoder")
    found = failures(_two_meshes, encoder)
    assert found[0].group == "encoder:dp@tp0"
    assert found[1].group == "llm:dp@tp0"
    assert "encoder:dp@tp0 of ranks [0, 2]" in str(found[1])


def _goes_on():
    with pytest.raises(sim.DivergenceError, match="operations differ"):
        dist.barrier() if dist.get_rank() else dist.all_reduce(one())
    with pytest.raises(sim.DivergenceError, match="has failed before"):
        dist.all_reduce(one())
    pair = dist.new_group([0, 1])
    total = one()
    dist.all_reduce(total, group=pair)
    return total.tolist()


def test_a_divergence_can_be_caught():
    """2 ranks: after a caught divergence its group stays shut, and other groups work."""
    assert sim.run(_goes_on, 2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("position", [3, -1])
def test_a_rank_that_is_nowhere(position):
    """2 ranks: roots and peers that the group has not are refused where they are named."""
    errors = []

    def wrong():
        for call in (dist.send, dist.recv, dist.broadcast, dist.reduce):
            with pytest.raises(ValueError, match=rf"position {position} .* on the world of ranks \[0, 1\]"):
                call(one(), position)
            errors.append(call)

    sim.run(wrong, 2)
    assert len(errors) == 8


def _different_plans():
    sizes = {"tp": 2, "dp": 2} if dist.get_rank() != 2 else {"tp": 4}
    rm.connect(rm.recipes.axes(rm.Mesh(**sizes)))


def test_plans_that_differ():
    """4 ranks: connect tells every rank who has another plan, as it does on real ranks."""
    found = failures(_different_plans, 4)
    assert {type(error) for error in found.values()} == {rm.AgreementError}
    assert found[0].ranks == [2]
