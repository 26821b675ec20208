"""Where orders part: equal calls at other lines, threads with orders of their own, and recordings of other moments."""

import json

import pytest
from tests.doctor.making import WORLD, call, document, recordings

from rankmesh.debug.doctor import diagnose, doctor
from rankmesh.debug.doctor.diagnosis import report, summary

SECOND = 10**9


def frames(site, thread=""):
    """The stack of a call at ``file:line name``; on a thread of Python that runs the function ``thread``."""
    place, _, name = site.partition(" ")
    file, _, line = place.partition(":")
    outer = [("torch/distributed/distributed_c10d.py", 3245, "all_reduce"), (file, int(line), name)]
    if thread:
        outer += [(file, 1, thread), *(("/usr/lib/python3.11/threading.py", 1, f) for f in ("run", "_bootstrap"))]
    else:
        outer += [(file, 99, "<module>")]
    return [{"filename": file, "line": line, "name": name} for file, line, name in outer]


def calls(text, group=WORLD, operation="all_reduce", **about):
    """One call of a group for each line ``file:line name`` of a text; one that ends with a star is not over."""
    for number, line in enumerate(text.strip().splitlines(), 1):
        site, open_ = line.strip().rstrip("*"), line.strip().endswith("*")
        yield call(group, number, operation, done=not open_, backend="gloo", frames=frames(site), **about)


def job(texts, **about):
    """The recordings of ranks whose calls of the world are these."""
    members = tuple(range(len(texts)))
    return {
        rank: document(list(calls(text, **about)), {WORLD: members}, rank=rank, world_size=len(members))
        for rank, text in enumerate(texts)
    }


SAVES = "train.py:21 step\ntrain.py:21 step\ntrain.py:10 save\ntrain.py:16 close*"
STEPS = "train.py:21 step\ntrain.py:21 step\ntrain.py:16 close"
EVALUATES = "fit.py:5 fit\neval.py:70 metrics\neval.py:70 metrics\nfit.py:6 fit*"
FITS = "fit.py:5 fit\neval.py:70 metrics\nfit.py:6 fit"


@pytest.mark.parametrize(
    ("texts", "operation", "culprit", "number", "sites"),
    [
        ([SAVES, STEPS, STEPS, STEPS], "barrier", 0, 3, ("train.py:10 in save", "train.py:16 in close")),
        ([FITS, FITS, EVALUATES, FITS, FITS, FITS], "all_gather", 2, 3, ("eval.py:70 in metrics", "fit.py:6 in fit")),
    ],
)
def test_a_rank_that_makes_one_call_more_is_named(texts, operation, culprit, number, sites):
    """4 and 6 ranks, equal calls: the one that waits has made one more, at a line where the others make a later one."""
    documents = job(texts, operation=operation)
    for rank in set(documents) - {culprit}:
        documents[rank]["rankmesh"]["in_call"] = {"running": True, "site": "train.py:23 in sleep"}
    found = diagnose(recordings(documents))
    (cause,) = found.causes
    assert (cause.cause, cause.ranks, cause.call, found.at_fault) == ("different", (culprit,), number, (culprit,))
    assert {cause.sites[culprit], cause.sites[len(texts) - 1]} == set(sites)
    assert f"rank {culprit} made {operation} at {sites[0]}" in found.verdict
    assert f"rank {culprit} made 1 call more" in found.verdict
    assert f"rank {culprit} is at {sites[0]}" in summary(found)[1]


@pytest.mark.parametrize("ended", [False, True])
def test_the_most_ranks_are_not_at_fault(ended):
    """4 ranks, at equal lines: three have not made a call that one waits in, and may be right."""
    documents = job(["a.py:1 f\na.py:1 f\na.py:1 f*", *["a.py:1 f\na.py:1 f"] * 3])
    for rank in (1, 2, 3):
        documents[rank]["rankmesh"] |= {"ended": ended, "in_call": {"running": True, "site": "a.py:9 in g"}}
    assert diagnose(recordings(documents)).at_fault == ()


def test_a_root_calls_at_another_line():
    """4 ranks: the root of each broadcast has a line of its own, which is no other order; rank 3 is late."""
    root = "io.py:3 send\nrun.py:8 step\nio.py:3 send\nrun.py:8 step*"
    others = root.replace("io.py:3 send", "io.py:5 receive")
    documents = job([root, others, others, "io.py:5 receive\nrun.py:8 step\nio.py:5 receive"])
    found = diagnose(recordings(documents))
    assert [(cause.cause, cause.ranks) for cause in found.causes] == [("late", (3,))]


def _gathers(sites, last, tensors):
    made = list(calls(sites, operation="all_gather", sizes=(32,)))
    site, operation, size = last
    return [*made, call(WORLD, len(made) + 1, operation, sizes=size, done=False, backend="gloo", frames=frames(site))]


@pytest.mark.parametrize(("size", "odd"), [(8, (3, 5, 6)), (5, (1,))])
def test_a_branch_of_a_forward_is_where_the_order_was_left(size, odd):
    """5 and 8 ranks: some skip a gather of the forward; the calls differ only in the backward, two calls later."""
    documents = {}
    for rank in range(size):
        skips = "vit.py:23 forward\nfit.py:38 main"
        whole = "vit.py:22 forward\nvit.py:23 forward"
        last = ("fit.py:38 main", "all_reduce", (256,)) if rank in odd else ("fit.py:38 main", "all_gather", (32,))
        documents[rank] = document(_gathers(skips if rank in odd else whole, last, 32), {WORLD: range(size)}, rank=rank)
    (cause,) = diagnose(recordings(documents)).causes
    assert (cause.cause, cause.ranks, cause.call) == ("different", odd, 1)
    assert cause.sites[0] == "vit.py:22 in forward"
    assert cause.sites[odd[0]] == "vit.py:23 in forward"
    assert "made 1 call less; operations differ at call 3 of world" in cause.evidence


def test_who_is_on_its_way_is_not_late_when_another_has_died():
    """4 ranks: gloo ended rank 3, and the others were asked at once; rank 0 had not come to the call yet."""
    documents = {
        rank: document(
            [call(WORLD, 1, backend="gloo", done=False)] * (rank > 0),
            {WORLD: range(4)},
            rank=rank,
            world_size=4,
            time_ns=10**18 + 2 * SECOND,
            in_call={"running": True, "site": "a.py:1 in main"} if rank == 0 else {},
        )
        for rank in range(3)
    }
    assert [(cause.cause, cause.ranks) for cause in diagnose(recordings(documents)).causes] == [("dead", (3,))]
    for each in documents.values():
        each["rankmesh"]["time_ns"] += 60 * SECOND
    found = diagnose(recordings(documents)).causes
    assert [(cause.cause, cause.ranks) for cause in found] == [("dead", (3,)), ("late", (0,))]


# -- threads -----------------------------------------------------------------------------------------------------------

SIDE = ("1", "undefined")


@pytest.mark.parametrize("by", ["stacks", "numbers"])
@pytest.mark.parametrize(("size", "operation"), [(3, "all_gather"), (5, "all_reduce")])
def test_threads_have_orders_of_their_own(by, size, operation):
    """3 and 5 ranks whose second thread calls on another group: the last rank is late in its main thread."""
    documents = {}
    for rank in range(size):
        main = list(calls("dl.py:18 main\n" * 3 + ("dl.py:18 main*" if rank < size - 1 else "")))
        side = list(calls("dl.py:15 send\n" * (4 + rank), SIDE, operation, sizes=(1,)))
        # The threads of each rank come in another order.
        made = [*side[: 1 + rank], *main[:2], *side[1 + rank :], *main[2:]]
        for each in made:
            if by == "numbers":
                each |= {"frames": [], "thread_id": "7" if each in side else "1"}
            elif each in side:
                each["frames"] = frames("dl.py:15 send", "metrics")
        about = {"rank": rank, "world_size": size, "time_ns": 10**18 + (60 + rank) * SECOND}
        where = {"operation": "all_reduce", "group": "0", "site": "dl.py:18 in main"}
        about["in_call"] = where if rank < size - 1 else {"running": True, "site": "dl.py:17 in main"}
        documents[rank] = document(made, {WORLD: range(size), SIDE: range(size)}, **about)
    found = diagnose(recordings(documents))
    assert [(cause.cause, cause.ranks, cause.call) for cause in found.causes] == [("late", (size - 1,), 4)]
    assert "it is in no call at dl.py:17 in main; its last was all_reduce, call 3 of world" in found.verdict


def test_a_backward_pass_is_in_the_order_of_its_program():
    """4 ranks on GPUs, whose gradients are reduced on threads of torch: two ranks that wait so are in a cycle."""
    other = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    documents = {}
    for rank in range(4):
        tp, dp = (f"tp{other[rank][0]}", f"tp@{other[rank][0]}"), WORLD
        backward = {"frames": frames("a.py:5 hook")[:2], "thread_id": "9", "thread_name": "pt_autograd_0"}
        forward = {"frames": frames("a.py:3 forward"), "thread_id": "1", "thread_name": "python"}
        made = [call(tp, 1, **forward), call(dp, 1, **backward)]
        made += [call(tp, 2, done=False, **forward)] if rank == 3 else [call(tp, 2, **forward)] * (rank < 2)
        made += [] if rank == 3 else [call(dp, 2, done=False, **backward)]
        documents[rank] = document(made, {tp: other[rank], dp: range(4)}, rank=rank, world_size=4)
    found = diagnose(recordings(documents))
    assert found.waiting == (0, 1, 2, 3)
    assert {rank for cause in found.causes for rank in cause.ranks} <= {2, 3}


# -- moments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "operation"), [(4, "all_reduce"), (2, "all_gather")])
def test_a_call_that_was_over_later_is_no_hang(size, operation, tmp_path):
    """2 and 4 ranks, recorded while rank 1 was slow, and that at its end: nobody waits, and the watch is repeated."""
    documents = {}
    for rank in range(size):
        made = list(calls("a.py:7 step\na.py:7 step" + ("\na.py:7 step" if rank == 1 else "*"), operation=operation))
        moment = {"time_ns": 10**18 + (90 if rank == 1 else 20) * SECOND, "ended": rank == 1, "session": "s"}
        documents[rank] = document(made, {WORLD: range(size)}, rank=rank, world_size=size, **moment)
    found = diagnose(recordings(documents))
    assert (found.causes, found.waiting) == ((), ())
    for rank, each in documents.items():
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(each))
    (tmp_path / "verdict.json").write_text(json.dumps({"session": "s", "verdict": "late: rank 1 behind"}))
    (tmp_path / "rankmesh.prom").write_text("rankmesh_hang 0\n")
    found = doctor(tmp_path)
    assert found.verdict == "no rank waits any more; while the job ran the watch found: late: rank 1 behind"
    assert found.notes == ()
    (tmp_path / "verdict.json").write_text(json.dumps({"session": "another", "verdict": "late: rank 1 behind"}))
    assert doctor(tmp_path).verdict == "no rank waits: nothing in these recordings hangs"


# -- lines of calls that differ --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "skipped"), [(4, 2), (5, 1), (3, 2)])
def test_calls_that_differ_have_their_lines_and_what_was_left_out(step, skipped):
    """2 ranks without recorded lines: those that they wait at, and how many calls of a step rank 1 left out."""
    sizes = list(range(4, 4 + step))
    whole = [("all_reduce", (size,)) for size in sizes] + [("barrier", ())]
    made = {0: (whole * 3)[: 2 * len(whole) + step - skipped + 1], 1: whole * 2 + whole[: step - skipped] + whole[-1:]}
    documents = {}
    for rank, each in made.items():
        entries = [
            call(WORLD, number, operation, sizes=size, done=number < len(each), backend="gloo")
            for number, (operation, size) in enumerate(each, 1)
        ]
        where = {"operation": each[-1][0], "group": "0", "site": f"bw.py:{8 + rank} in f"}
        documents[rank] = document(entries, {WORLD: (0, 1)}, rank=rank, in_call=where)
    found = diagnose(recordings(documents))
    (cause,) = found.causes
    assert (cause.cause, dict(cause.sites)) == ("different", {0: "bw.py:8 in f", 1: "bw.py:9 in f"})
    assert "at bw.py:8 in f, rank 1 made barrier" in found.verdict
    assert f"rank 1 left out {skipped} call" in found.verdict
    assert "rank 1  bw.py:9 in f" in report(found)
