"""The diagnosis of NCCL's recordings made by hand: unfinished calls alone are kept, as torch does on request.

Sixteen calls behind the one that hangs stand in the queue of a device, so that every rank has unfinished calls of every
group; what torch counts of the groups (``pg_status``) is all that a rank without unfinished calls leaves.
"""

from tests.doctor.making import call, document, recordings

from rankmesh.debug.doctor import diagnose

TP = {rank: (str(3 + rank // 2), "TENSOR_MODEL_PARALLEL_GROUP") for rank in range(4)}
EP, PP = ("5", "EXPERT_MODEL_PARALLEL_GROUP"), ("0", "default_pg")
GROUPS = {rank: {PP: range(5), TP[rank]: (rank // 2 * 2, rank // 2 * 2 + 1), EP: range(4)} for rank in range(4)}


def queue(rank, tp, ep):
    """The unfinished calls of a rank in the order of its program: ``tp`` and ``ep`` are the first numbers of each."""
    rounds = [(TP[rank], "_all_gather_base", tp), (EP, "all_to_all", ep)]
    return [
        call(group, first + step, operation, done=False, pg_id=int(group[0]))
        for step in range(3)
        for group, operation, first in rounds
    ]


def made(entries, status=None):
    """Recordings of four ranks that have dropped most of their calls, and of a fifth one that waits for rank 0."""
    documents = {
        rank: document(calls, GROUPS[rank], first=90_000) | ({"pg_status": status[rank]} if status else {})
        for rank, calls in entries.items()
    }
    waits = [call(PP, 26, "recv 4<-0", done=False, is_p2p=True, p2p_seq_id=7, pg_id=0)]
    return recordings({**documents, 4: document(waits, {PP: range(5)}, first=70_000)})


def status(rank, tp, ep):
    """What torch counts: the last call handed over by the number of each group."""
    return {
        number: {"last_enqueued_collective": last, "last_completed_collective": last}
        for number, last in (("0", 163), (TP[rank][0], tp), ("5", ep))
    }


def test_a_device_that_reports_nothing_is_the_cause_and_its_peers_are_not():
    """4 ranks and a pipeline stage: rank 2 is in a call that rank 3 came out of; those that wait behind do not lead."""
    broken = queue(2, 101, 501)
    waiting = {rank: queue(rank, 104, 504)[1:] for rank in (0, 1, 3)}
    found = diagnose(made({**waiting, 2: broken}))
    first = found.causes[0]
    assert (first.cause, first.ranks, first.group.members, first.call) == ("stuck", (2,), (2, 3), 101)
    assert "rank 3 came out of _all_gather_base, call 101" in found.verdict
    assert not any("all members entered" in cause.evidence for cause in found.causes), found.to_dict()
    assert found.waiting == (0, 1, 3, 4)
    assert first.explains == 4


def test_a_rank_whose_device_is_in_an_earlier_call_of_another_group_has_not_entered():
    """4 ranks: rank 2 stands in a call of its pair, all others wait for it in the call of all, which it has queued."""
    entries = {rank: queue(rank, 101, 501)[1:] for rank in (0, 1)}
    entries |= {2: queue(2, 101, 501), 3: queue(3, 101, 501)}
    found = diagnose(made(entries))
    assert [(cause.cause, cause.ranks, cause.group.members) for cause in found.causes] == [("stuck", (2, 3), (2, 3))]
    behind = next(call for call in found.waits.calls if call.group.members == (0, 1, 2, 3))
    assert (behind.waiting, behind.missing) == ((0, 1), (2, 3))


def test_what_torch_counts_knows_better_than_an_empty_list():
    """4 ranks: rank 2 has no unfinished call, and torch's counts say that it is behind by three calls, not by 503."""
    entries = {rank: queue(rank, 104, 501)[1:] for rank in (0, 1, 3)} | {2: []}
    counts = {rank: status(rank, 106, 503) for rank in (0, 1, 3)} | {2: status(2, 103, 500)}
    found = diagnose(made(entries, counts))
    assert found.causes[0].ranks == (2,)
    assert "rank 2 behind by 3 calls of EXPERT_MODEL_PARALLEL_GROUP" in found.verdict
    assert "has none under way" in found.verdict


def test_counts_are_not_taken_for_those_of_another_group():
    """4 ranks, numbers of torch's that calls contradict: nothing is said to be known of the empty recording."""
    entries = {rank: queue(rank, 104, 501)[1:] for rank in (0, 1, 3)} | {2: []}
    counts = {rank: status(rank, 106, 503) for rank in (0, 1, 3)} | {2: {"0": {"last_enqueued_collective": 7}}}
    found = diagnose(made(entries, counts))
    assert "behind by 503 calls" in found.verdict
