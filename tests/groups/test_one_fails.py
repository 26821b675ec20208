"""Calls in which ranks wait for each other: what one rank cannot do is an error on all of them, at once."""

import torch
from tests import limits
from tests.transfer import live

import rankmesh as rm
from rankmesh.errors import AgreementError, ConnectError, PlanError, TransferError
from rankmesh.runtime import discover
from rankmesh.transfer import Transfer
from rankmesh.transfer.sync import stored

CALLS = ("connect", "guard", "model", "transfer", "publish", "receive", "discover")


def test_what_one_rank_cannot_do_is_an_error_on_all(ranks, tmp_path):
    """2 ranks, rank 1 has no plan, a wrong shard, a small budget, an old version or no host name: both raise."""
    found = ranks(2, _rank_1_fails, str(tmp_path), timeout=10 * limits.AT_ONCE)
    for name, *both in zip(CALLS, *found, strict=True):
        assert "rank 1" in both[0]["message"], (name, both)
        assert max(error["seconds"] for error in both) < limits.AT_ONCE, name
    assert [one["kind"] for one in found[0]] == [
        "AgreementError",
        *2 * ["PlanError"],
        *3 * ["TransferError"],
        "ConnectError",
    ]
    assert [one["kind"] for one in found[1]] == [*5 * ["PlanError"], "TransferError", "OSError"]


def _rank_1_fails(me, folder):  # of a file, rankmesh.readers says what is wrong
    is_1, how = me.rank == 1, {"timeout": 10 * limits.AT_ONCE}
    found = [me.error((AgreementError, PlanError), rm.connect, "no-plan.json" if is_1 else "dp=2", **how)]
    with rm.connect("dp=2") as groups:
        weight = {"w": rm.Sharding(groups.plan.mesh, shape=(4,))}
        found.append(me.error(PlanError, rm.Guard, groups, {"w": torch.zeros(4 + is_1)}, weight))
        optimizer = torch.optim.SGD([torch.ones(1) if is_1 else (model := torch.nn.Linear(2, 2)).weight])
        found.append(me.error(PlanError, rm.Guard.of, torch.nn.Linear(2, 2) if is_1 else model, optimizer, groups))
    cut, whole = ({"w": rm.Sharding(rm.Mesh(dp=2), one, shape=(4,))} for one in (("dp",), None))
    moves = Transfer(cut, whole)
    shards = live.shards(cut, me.rank)
    budget = 1 if is_1 else 1 << 20
    found.append(me.error((PlanError, TransferError), moves.run, shards, moves.allocate(me.rank), budget, **how))
    with rm.Sync(cut, cut, shards, at=f"{folder}/sync", **how) as trainer:
        trainer.publish(1)
        found.append(me.error((PlanError, TransferError), trainer.publish, 1 + (not is_1)))
    if is_1:
        stored.Reader.await_version = discover.witness = _fails
    with rm.Sync(cut, cut, shards, at=f"{folder}/other", **how) as engine:
        found.append(me.error(TransferError, engine.receive, wait=0))
    found.append(me.error((ConnectError, OSError), rm.discover, **how))
    return found


def _fails(*_):
    raise OSError("no host name")


def test_each_plan_of_a_job_has_phases_of_its_own(ranks):
    """1 rank: what it took to make a group is under the group's name, and under the plan's where there are several."""
    ((single, job),) = ranks(1, _phases)
    assert ("create tp" in single, "create b tp" in single) == (True, False)
    assert ("create tp" in job, "create b tp" in job) == (False, True)


def _phases(_):
    with rm.connect("tp=1") as one:
        single = list(one.phases)
    with rm.connect({"a": "tp=1", "b": "tp=1"}) as job:
        return single, list(job["b"].phases)
