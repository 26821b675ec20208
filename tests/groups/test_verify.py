"""Proof: a collective that gives a wrong answer, in each of its operations, is a ProofError that names it."""

import pytest
import torch.distributed as dist

import rankmesh as rm
from rankmesh.debug.verification.verify import verify
from rankmesh.errors import ProofError

OPERATIONS = ("all-reduce", "all-gather", "broadcast", "send/recv")
PLAN = rm.Plan(rm.Mesh(stage=2, dp=2), [rm.GroupSpec("dp"), rm.GroupSpec("stage", pipeline=True)])


def _off_by_one(call, result):
    """The same call, whose result is one too much in the tensor that ``result`` finds among its arguments."""

    def wrong(*args, **kwargs):
        done = call(*args, **kwargs)
        result(args).add_(1)
        return done

    return wrong


class _WrongReceive:
    """Work that is waited for, after which what was received is one too much."""

    def __init__(self, work, tensor):
        self._work, self._tensor = work, tensor

    def wait(self):
        self._work.wait()
        if self._tensor is not None:
            self._tensor.add_(1)


def _wrong_receives(operations):
    works = RIGHT["batch_isend_irecv"](operations)
    tensors = [operation.tensor if operation.op is dist.irecv else None for operation in operations]
    return [_WrongReceive(work, tensor) for work, tensor in zip(works, tensors, strict=True)]


RIGHT = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "batch_isend_irecv")}
WRONG = {
    "all-reduce": ("all_reduce", _off_by_one(RIGHT["all_reduce"], lambda args: args[0])),
    "all-gather": ("all_gather", _off_by_one(RIGHT["all_gather"], lambda args: args[0][0])),
    "broadcast": ("broadcast", _off_by_one(RIGHT["broadcast"], lambda args: args[0])),
    "send/recv": ("batch_isend_irecv", _wrong_receives),
    "rank": ("get_rank", lambda group=None: 1 - group.rank()),
    "members": ("get_process_group_ranks", lambda group: [7, 8]),
}


def _broken(me):
    """For each operation that is broken: what the proof says on this rank. All ranks break alike, so all go on."""
    answer = {}
    with rm.connect(PLAN) as groups:
        for operation, (name, wrong) in WRONG.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, name, wrong)
                kind = "stage" if operation == "send/recv" else "dp"
                answer[operation] = me.error(ProofError, list, verify({kind: groups[kind]}))
            me.meet(f"after {operation}")
        answer["nothing"] = [(verified.name, list(verified.operations)) for verified in verify(groups)]
    return answer


def test_a_wrong_answer_of_any_operation_is_found(ranks):
    """4 ranks: each operation, and the group's own rank and members, broken once; then nothing is."""
    for answer in ranks(4, _broken):
        assert answer.pop("nothing") == [["dp", list(OPERATIONS[:3])], ["stage", list(OPERATIONS)]]
        assert set(OPERATIONS) <= set(answer)
        for operation, error in answer.items():
            assert error["operation"] == operation
            assert error["got"] != error["expected"]
            assert "the process group is not the group of the plan" in error["message"]
