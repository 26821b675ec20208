"""Reports of ncclras: text and JSON, what they say of ranks, and that no rank is named that waits for others."""

import json

import pytest
from tests.doctor.making import WORLD, call, document, write

import rankmesh as rm
from rankmesh.debug.doctor import doctor
from rankmesh.debug.doctor.ras import read_report
from rankmesh.errors import RecordingError

PLAN = rm.recipes.axes(rm.Mesh(tp=2, dp=4))
HEAD = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1   {0:8} {0:8}

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""


def of_rank(position, rank):
    """Where a rank runs, as the text says it."""
    return f"  Rank {position} -- GPU {rank} managed by process {1000 + rank} on node 10.0.0.1"


def as_text(communicators, size=8, most=3):
    """The report of a job as text, at most so many ranks of one count; communicators: (ranks, counts, missing)."""
    table, lines = [], ["", "Errors", "======", ""]
    for place, (ranks, counts, missing) in enumerate(communicators):
        differ = any(len(set(by.values())) > 1 for by in counts.values())
        table.append(
            f"{place:5}  {1:8}  {1:8}  {len(ranks):8}  {len(ranks):8}  {8:8}  RUNNING  {'MISMATCH' * differ or 'OK'}"
        )
        if missing:
            lines += [f"#{place}-0 ({place:016x}) INCOMPLETE", f"  Missing communicator data from {len(missing)} ranks"]
            lines += [*(of_rank(ranks.index(rank), rank) for rank in missing), ""]
    lines += ["Warnings", "========", ""]
    for place, (ranks, counts, _) in enumerate(communicators):
        differing = {operation: by for operation, by in counts.items() if len(set(by.values())) > 1}
        lines += [f"#{place}-0 ({place:016x}) MISMATCH"] * bool(differing)
        for operation, by in differing.items():
            lines.append(f"  Communicator ranks have different {operation} operation counts")
            for value in sorted(set(by.values())):
                of = [rank for rank in ranks if by.get(rank) == value]
                what = f"launched up to operation {value}" if value else "not launched any operations"
                if len(of) == 1:
                    line = of_rank(ranks.index(of[0]), of[0])
                    lines.append(line.replace(" -- ", f" has {what} -- "))
                else:
                    lines.append(f"  {len(of)} ranks have {what}")
                    lines += [of_rank(ranks.index(rank), rank) for rank in of] if len(of) <= most else []
            lines.append("")
    return "\n".join([HEAD.format(size).rstrip(), *table, *lines, ""])


def as_json(communicators):
    """The report as JSON."""

    def process(ranks, rank):
        return {"rank": ranks.index(rank), "host": "10.0.0.1", "pid": 1000 + rank, "cuda_dev": rank, "nvml_dev": rank}

    found = []
    for place, (ranks, counts, missing) in enumerate(communicators):
        there = [rank for rank in ranks if rank not in missing]
        status = {"unresponsive": True, "considered_dead": False}
        made = [{**process(ranks, r), "collective_counts": {op: by[r] for op, by in counts.items()}} for r in there]
        gone = [{**process(ranks, rank), "status": status} for rank in missing]
        about = {"hash": f"0x{place:x}", "size": len(ranks), "ranks": made, "missing_ranks": gone}
        found.append(about)
    return json.dumps({"nccl_version": "2.28.7", "communicators_count": len(found), "communicators": found})


def diagnosed(folder, text, plan=PLAN):
    """The diagnosis of a report."""
    (folder / "ras.txt").write_text(text, encoding="utf-8")
    return doctor(folder / "ras.txt", plan)


def named(found):
    """The cause, ranks, group and confidence of each cause."""
    return [(one.cause, one.ranks, one.group.label, one.confidence) for one in found.causes]


def counts(ranks, usual, **others):
    """A count for each rank, of those that differ ``r3=9``."""
    return {rank: others.get(f"r{rank}", usual) for rank in ranks}


WHOLE = list(range(8))


TP, DP, EVEN = [2, 3], [1, 3, 5, 7], [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("communicators", "expected", "words"),
    [
        # Two ranks have launched one call more: who waits where is told, and nobody is named.
        (
            [(WHOLE, {"AllGather": counts(WHOLE, 640, r2=641, r3=641)}, [])],
            [],
            "ranks 2, 3 wait in AllGather, call 641 of world, ranks 0, 1, 4, 5, 6, 7 do not",
        ),
        # One rank has launched one call less: it is the likely one, never a certain one.
        (
            [(WHOLE, {"AllReduce": counts(WHOLE, 10, r5=9)}, [])],
            [("late", (5,), "world", "likely")],
            "rank 5 behind by 1 call of world",
        ),
        # Fewer of one operation and more of another: it made another call.
        (
            [(WHOLE, {"AllReduce": counts(WHOLE, 10, r5=9), "AllGather": counts(WHOLE, 4, r5=5)}, [])],
            [("absent", (5,), "world", "likely")],
            "rank 5 never reached AllReduce, call 10 of world",
        ),
        # A rank that did not answer is named, and no other: those may wait for it in a call that NCCL does not count.
        (
            [(WHOLE, {"AllReduce": {rank: 10 - (rank == 2) for rank in WHOLE if rank != 6}}, [6])],
            [("dead", (6,), "world", "likely")],
            "unresponsive: rank 6 did not answer NCCL's request",
        ),
        # Rank 3 is behind in its dp group, as it waits in its tp group for rank 2.
        (
            [
                (WHOLE, {"AllReduce": counts(WHOLE, 1)}, []),
                (DP, {"AllReduce": counts(DP, 7, r3=6)}, []),
                (TP, {"AllGather": counts(TP, 5, r2=4)}, []),
            ],
            [("late", (2,), "tp@dp1", "likely")],
            "rank 3 waits in AllGather, call 5 of tp@dp1",
        ),
        # A stage that waits in a receive is behind, too: where different ranks are, none is named.
        (
            [
                (WHOLE, {"AllReduce": counts(WHOLE, 1)}, []),
                (EVEN, {"AllReduce": counts(EVEN, 7, r2=6)}, []),
                (DP, {"AllReduce": counts(DP, 7, r3=6)}, []),
            ],
            [],
            "ranks 0, 4, 6 wait in AllReduce, call 7 of dp@tp0, rank 2 does not",
        ),
    ],
)
def test_what_reports_show(tmp_path, communicators, expected, words):
    """A rank is named only if no other can be the cause."""
    # The text does not list the processes of a communicator that is OK.
    for form in (as_json,) if len(communicators) > 1 else (as_json, as_text):
        found = diagnosed(tmp_path, form(communicators))
        assert named(found) == expected
        assert words in found.verdict


@pytest.mark.parametrize(
    ("communicator", "words"),
    [
        # Without a communicator of the whole job nobody knows which ranks the positions of another one are.
        (([4, 5], {"AllReduce": {4: 3, 5: 2}}, []), "2 ranks, tp by its size: late: position 1 behind by 1 call"),
        # The text lists neither half.
        ((WHOLE, {"AllReduce": counts(WHOLE, 10, r0=9, r1=9, r2=9, r3=9)}, []), "AllReduce launched 9 to 10 times"),
    ],
)
def test_ranks_that_the_text_does_not_list(tmp_path, communicator, words):
    """The verdict has the numbers, and no rank is named."""
    found = diagnosed(tmp_path, as_text([communicator]))
    assert named(found) == []
    assert words in found.verdict


def test_processes_that_nccl_considers_dead(tmp_path):
    """The text lists dead processes apart from the ranks of communicators."""
    dead = "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    dead += "  Process 1006 on node 10.0.0.1 managing GPU 6\n\n#0-0"
    found = diagnosed(tmp_path, as_text([(WHOLE, {}, [6])]).replace("#0-0", dead, 1))
    assert found.verdict == "dead: rank 6 is considered dead by NCCL (likely)"


@pytest.mark.parametrize(
    "text",
    [
        '{"communicators": ' + "[" * 100_000,
        '{"communicators": [{"size": 1e400}]}',
        '{"communicators": [{"hash": "0x1", "size": 99999999, "ranks": [], "missing_ranks": []}]}',
        "Job summary\n",
        HEAD.format(8) + "    0  9000  1  8  1048576  8  RUNNING  MISMATCH\n" + "#0-0 (0) MISMATCH\n" * 9,
    ],
)
def test_hostile_reports(tmp_path, text):
    """What is too deep, too large or incomplete is refused."""
    (tmp_path / "ras.txt").write_text(text, encoding="utf-8")
    with pytest.raises(RecordingError, match="write the report again"):
        read_report(tmp_path / "ras.txt")


def test_a_mixture(tmp_path):
    """Recordings and reports together: the calls decide, the report is added, and what differs is told."""
    hung = {r: document([call(WORLD, 1), call(WORLD, 2, done=False)], {WORLD: tuple(WHOLE)}) for r in WHOLE if r != 3}
    (tmp_path / "traces").mkdir()
    write(tmp_path / "traces", hung)
    (tmp_path / "traces" / "train.log").write_text("step 1\n", encoding="utf-8")
    (tmp_path / "ras-2.json").write_text(
        as_json([(WHOLE, {"AllReduce": counts(WHOLE, 2, r3=1)}, [])]), encoding="utf-8"
    )
    found = doctor([tmp_path / "traces", tmp_path / "ras-2.json"], PLAN)
    assert [(one.cause, one.ranks) for one in found.causes] == [("dead", (3,))]
    assert found.remarks[0].startswith("ras-2.json: late: rank 3 behind by 1 call of world")
    assert any("rank 3" in note and "no recording" in note for note in found.notes)
    assert any("train.log" in note for note in found.notes)


def test_a_report_in_a_folder(tmp_path):
    """Of whatever form, it counts like a text there; one of an earlier attempt is left out."""
    for place, made in (("attempt_0/0", counts(WHOLE, 2, r5=1)), ("attempt_1/0", counts(WHOLE, 2, r3=1))):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "ras.json").write_text(as_json([(WHOLE, {"AllReduce": made}, [])]), encoding="utf-8")
    found = doctor(tmp_path)
    assert [(one.cause, one.ranks) for one in found.causes] == [("late", (3,))]
    assert any("earlier attempts" in note for note in found.notes)
