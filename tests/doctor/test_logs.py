"""Logs of torch's watchdog: formats of releases, prefixes of launchers, and that no rank is named without proof."""

import pytest
from tests.doctor.making import WORLD, call, document, write
from tests.doctor.test_ras import as_text

import rankmesh as rm
from rankmesh.debug.doctor import doctor, texts, watchdog
from rankmesh.debug.doctor.texts import text_of
from rankmesh.debug.doctor.watchdog import log_of
from rankmesh.errors import RecordingError, in_words

PLAN = rm.recipes.axes(rm.Mesh(tp=2, dp=4))
WHOLE = range(8)
HEALTHY = as_text([(list(range(256)), {}, [])], 256)
LATER = "PG ID {id} PG GUID {name}{desc} Rank {place}"
PREFIXES = [
    "",
    "[default3]:",
    "3: ",
    "(TrainWorker pid=71, ip=10.0.0.3) ",
    "[pod/train-worker-0/pytorch] ",
    "\x1b[36m(W pid=7)\x1b[0m ",
]
STATUS = {
    "2.4": "Exception (either an error or timeout) detected by watchdog at work: {at}, "
    "last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.",
    "2.7": " failure detected by watchdog at work sequence id: {at} PG status: last enqueued work: {enqueued}, "
    "last completed work: {completed}",
    "2.13": " failure detected by watchdog at work sequence id: {at} PG status: last enqueued work: {enqueued}, "
    "last started work: {at} (ALLREDUCE), last completed work: {completed}",
}


def head(rank, second=0, release="2.7"):
    """What torch begins a line with; its oldest releases had no rank and no time there."""
    if release == "2.2":
        return "[E ProcessGroupNCCL.cpp:475] "
    return f"[rank{rank}]:[E606 09:{10 + second // 60:02}:{second % 60:02}.164985 ProcessGroupNCCL.cpp:757] "


def named(group, release):
    """The prefix of a group: (name, description, position)."""
    name, desc, place = group
    if release == "2.4":
        return f"[PG {name} ({desc}) Rank {place}] " if desc else f"[PG {name} Rank {place}] "
    return f"[PG ID {int(name) % 9} PG GUID {name}{f'({desc})' if desc else ''} Rank {place}] "


def timed_out(rank, at, group=None, operation="ALLREDUCE", sizes=(4, 4), enqueued=None, release="2.7", second=0):
    """The two lines of a rank whose call has timed out; ``group`` is (name, description, position)."""
    name, desc, place = group or ("0", "default_pg", rank)
    start = head(rank, second, release)
    caught = f"[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={at}, OpType={operation}, "
    caught += (
        f"NumelIn={sizes[0]}, NumelOut={sizes[1]}, Timeout(ms)=600000) ran for 600004 milliseconds before timing out."
    )
    lines = [start + caught]
    if release in STATUS:
        status = STATUS[release].format(at=at, enqueued=enqueued or at, completed=at - 1)
        lines.append(start + named((name, desc, place), release) + status)
    return lines


def asked(rank, enqueued, completed, second=0):
    """The line of a rank that another one asked for its recording: the counts of the world's group."""
    what = "Received a dump signal due to a collective timeout from rank 0 and we will try our best to dump the debug "
    what += f"info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely"
    return [f"{head(rank, second)}{named(('0', 'default_pg', rank), '2.7')}{what}"]


def read_log(path):
    """The lines of the watchdog in a file."""
    return next(iter(log_of(text_of(path))), None)


def diagnosed(tmp_path, *texts, plan=None, name="log-{}.txt"):
    """The diagnosis of logs of these lines."""
    paths = [tmp_path / name.format(place) for place in range(len(texts))]
    for path, lines in zip(paths, texts, strict=True):
        path.write_text("\n".join(["step 1", *lines, "bye"]), encoding="utf-8")
    return doctor(paths, plan)


def causes(found):
    """The cause, ranks, group and confidence of each cause."""
    return [(one.cause, one.ranks, one.group.label, one.confidence) for one in found.causes]


def lines_of(*parts):
    """The lines of several ranks, one after another."""
    return [line for part in parts for line in part]


BEHIND = lines_of(*(timed_out(rank, 7) for rank in WHOLE if rank != 3), asked(3, 6, 6))


LATE, DEAD = [("late", (3,), "world", "likely")], [("dead", (3,), "world", "possible")]
WAITS = {rank: timed_out(rank, 7) for rank in WHOLE}
OTHERS = [line for rank in WHOLE if rank != 3 for line in WAITS[rank]]


@pytest.mark.parametrize("release", STATUS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_rank_that_is_behind(tmp_path, prefix, release):
    """All others wait in call 7, which rank 3 has not enqueued, whatever wrote the lines."""
    others = lines_of(*(timed_out(rank, 7, release=release) for rank in WHOLE if rank != 3))
    lines = [f"{prefix}{line}\r" for line in [*others, *asked(3, 6, 6)]]
    assert causes(diagnosed(tmp_path, lines)) == LATE


def test_one_log_for_each_rank(tmp_path):
    """The logs of all ranks say together what one log of all says."""
    texts = [[line for line in BEHIND if f"[rank{rank}]" in line] for rank in WHOLE]
    assert causes(diagnosed(tmp_path, *texts)) == LATE


def of_all(**odd):
    """All ranks wait in call 7, rank 5 in another one."""
    return lines_of(*(timed_out(rank, 7, **(odd if rank == 5 else {})) for rank in WHOLE))


@pytest.mark.parametrize(
    ("lines", "expected", "words"),
    [
        # Two operations or sizes at one number are certain; a majority of the group tells who is odd.
        (of_all(operation="BROADCAST"), [("different", (5,), "world", "certain")], "rank 5 made broadcast"),
        (of_all(sizes=(8, 8)), [("different", (5,), "world", "certain")], "rank 5 made all_reduce [8]"),
        (of_all(), [], "ranks 0, 1, 2, 3, 4, 5, 6, 7 wait in all_reduce, call 7 of world; nothing here shows"),
        (
            lines_of(*(timed_out(rank, 7, operation=("BROADCAST", "ALLREDUCE")[rank % 2]) for rank in WHOLE)),
            [("different", tuple(WHOLE), "world", "certain")],
            "operations differ at call 7",
        ),
        (
            lines_of(*(timed_out(rank, 7, operation="BROADCAST" if rank else "ALLREDUCE") for rank in (0, 1, 7))),
            [("different", (0, 1, 7), "world", "certain")],
            "operations differ at call 7",
        ),
        # An all-to-all and a gather of uneven parts have other sizes on each rank.
        (
            lines_of(*(timed_out(rank, 7, operation="ALLTOALL_BASE", sizes=(rank, 9)) for rank in WHOLE)),
            [],
            "wait in all_to_all, call 7 of world",
        ),
        # Of two ranks that are behind one may wait for the other in a receive.
        ([line for line in OTHERS if "[rank2]" not in line] + asked(2, 6, 6) + asked(3, 6, 6), [], "ranks 2, 3 do not"),
        # Rank 3 is behind in the world as it waits in its tp group, for rank 2, of which there is no line.
        (
            [line for line in OTHERS if "[rank2]" not in line] + asked(3, 6, 6) + timed_out(3, 5, ("12", "tp", 1)),
            [("dead", (2,), "world", "possible")],
            "no line is of rank 2",
        ),
        # One rank waits in a call that no other has enqueued.
        (WAITS[0] + lines_of(*(asked(rank, 6, 6) for rank in WHOLE if rank)), [], "rank 0 waits in all_reduce, call 7"),
        # One rank without a line is possibly the one; of two nobody knows, nor in a log of which lines are missing.
        (OTHERS, DEAD, "no line is of rank 3"),
        ([line for line in OTHERS if "[rank5]" not in line], [], "ranks 3, 5 do not"),
        ([*OTHERS, f"{OTHERS[0]} [repeated 3x across cluster]"], [], "rank 3 does not"),
        # torch 2.3 names groups by a number that is another group on another rank: its ranks are not compared.
        (
            timed_out(0, 7, ("3", "", 0), release="2.4")
            + timed_out(2, 7, ("3", "", 1), operation="BROADCAST", release="2.4"),
            [("dead", (1,), "world", "possible")],
            "rank 0 waits in all_reduce, call 7 of group 3",
        ),
        # Two ranks at one position of a group are of two groups.
        (
            timed_out(0, 7, ("3", "tp", 0)) + timed_out(2, 7, ("3", "tp", 0), operation="BROADCAST"),
            [("dead", (1,), "world", "possible")],
            "rank 0 waits in all_reduce, call 7 of tp 3",
        ),
        # Ray's trainers and their inference engines each have a world.
        (
            [f"(Trainer pid=1) {line}" for rank in (0, 1) for line in WAITS[rank]]
            + [f"(Engine pid=9) {line}" for line in timed_out(2, 7, operation="BROADCAST") + asked(3, 2, 2)],
            [],
            "Engine: rank 2 waits in broadcast, call 7 of world",
        ),
        # Lines a timeout older than the last one are of an attempt before.
        (
            lines_of(*(timed_out(rank, 7) for rank in WHOLE if rank != 5), asked(5, 6, 6))
            + lines_of(*(timed_out(rank, 9, second=1500) for rank in WHOLE if rank != 3), asked(3, 8, 8, second=1501)),
            LATE,
            "call 9 of world",
        ),
        # Lines without a rank: positions of a group are described.
        ([line.replace("[rank5]:", "") for line in timed_out(5, 7, ("12", "tp", 1))], [], "tp 12: position 1 waits in"),
    ],
)
def test_what_lines_show(tmp_path, lines, expected, words):
    """A rank is named only if no other can be the cause; the verdict says who waits where."""
    found = diagnosed(tmp_path, lines)
    assert causes(found) == expected
    assert words in found.verdict


@pytest.mark.parametrize("operation", ["SEND", "RECV", "COALESCED"])
def test_groups_with_sends_and_receives(tmp_path, operation):
    """Sends have numbers of their own: the counts of rank 1, which has no call under way here, do not show it late."""
    lines = lines_of(timed_out(0, 4, operation=operation), *(timed_out(rank, 7) for rank in WHOLE if rank > 1))
    found = diagnosed(tmp_path, lines + asked(1, 2, 2))
    assert (found.causes, found.waiting) == ((), (0, *range(2, 8)))
    assert found.verdict.endswith("; nothing here shows for which rank")
    stack = tmp_path / "rank1.txt"
    stack.write_text('Thread 7 (active): "MainThread"\n    load (data.py:8)\n', encoding="utf-8")
    [one] = doctor([tmp_path / "log-0.txt", stack]).causes
    assert (one.cause, one.ranks, one.confidence) == ("late", (1,), "possible")


def test_a_group_is_named_by_the_plan(tmp_path):
    """Ranks 2 and 3 are positions 0 and 1 of the plan's tp@dp1, all of whose members wait."""
    lines = timed_out(2, 9, ("12", "TENSOR", 0)) + timed_out(3, 9, ("12", "TENSOR", 1))
    assert causes(diagnosed(tmp_path, lines, plan=PLAN)) == [("stuck", (2, 3), "tp@dp1", "likely")]
    assert "call 9 of TENSOR [2, 3]; nothing here shows" in diagnosed(tmp_path, lines).verdict


def test_the_oldest_lines(tmp_path):
    """torch 2.2 says neither rank nor group: the file names the rank, and nobody is compared."""
    texts = [timed_out(rank, 7 - rank, release="2.2") for rank in (0, 1)]
    found = diagnosed(tmp_path, *texts, name="train_rank{}.log")
    assert causes(found) == []
    assert "rank 1 waits in all_reduce, call 6 of a group that the log does not name" in found.verdict
    [line] = read_log(tmp_path / "train_rank1.log").lines
    assert (line.rank, line.position, line.number, line.operation, line.sent) == (1, 1, 6, "ALLREDUCE", 4)


def test_a_folder_that_names_the_rank(tmp_path):
    """Where neither torch nor the file says the rank, the folder of the file does, as for all other texts."""
    path = tmp_path / "rank_3" / "stderr.log"
    path.parent.mkdir()
    path.write_text("\n".join(timed_out(1, 7, release="2.2")), encoding="utf-8")
    assert {line.rank for line in read_log(path).lines} == {3}


@pytest.mark.parametrize("folder", ["lora_rank8", "sweep-rank16", "8xrank4"])
def test_a_folder_whose_name_ends_like_a_ranks(tmp_path, folder):
    """A run's folder names no rank: its log is that of all ranks, and the job does not grow by its name."""
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "train.log"
    path.write_text("\n".join(BEHIND), encoding="utf-8")
    found = doctor(tmp_path / folder)
    assert (causes(found), found.world_size) == (LATE, 8)
    path.write_text('Thread 7 (active): "MainThread"\n    load (data.py:8)\n', encoding="utf-8")
    assert doctor(tmp_path / folder).verdict == "0 of 1 processes whose ranks are not known are in a collective"


def test_two_processes_in_one_line(tmp_path):
    """Processes that write at once lose a line break."""
    (tmp_path / "log").write_text("abc" + "".join(lines_of(timed_out(0, 7), timed_out(1, 8))), encoding="utf-8")
    assert {(line.rank, line.number) for line in read_log(tmp_path / "log").lines} == {(0, 7), (1, 8)}


def test_the_last_part_of_a_large_log(tmp_path, monkeypatch):
    """Of a large log the end is read, and of many lines the first: the log is partial then."""
    path = tmp_path / "train.log"
    path.write_text("x" * 5000 + "\n" + "\n".join(BEHIND), encoding="utf-8")
    assert not read_log(path).is_partial
    monkeypatch.setattr(texts, "_SIZE", 4000)
    read = read_log(path)
    assert read.is_partial
    assert 3 in {line.rank for line in read.lines}
    assert causes(diagnosed(tmp_path, ["x" * 5000, *BEHIND])) == []
    monkeypatch.setattr(texts, "_SIZE", 1 << 20)
    monkeypatch.setattr(watchdog, "_LINES", 4)
    assert len(read_log(path).lines) == 5
    assert read_log(path).is_partial


def test_files_without_lines(tmp_path):
    """Binary files, devices and logs of something else are not logs."""
    (tmp_path / "data.log").write_bytes(b"\0" + "\n".join(BEHIND).encode())
    (tmp_path / "train.log").write_text("ProcessGroupNCCL.cpp is a file\n", encoding="utf-8")
    assert [read_log(path) for path in (tmp_path / "data.log", tmp_path / "train.log", tmp_path)] == [None] * 3
    for path in (tmp_path / "train.log", "/dev/zero"):
        with pytest.raises(RecordingError, match=r"train\.log|zero"):
            doctor(path)


@pytest.mark.parametrize(("ranks", "position"), [((37,), 912), ((8, 9, 10, 11), 44), ((0,), 3)])
def test_the_log_of_one_pod_or_host_names_no_rank_of_others(tmp_path, ranks, position):
    """Lines of 1 and 4 ranks of a larger job: these wait, nothing is known of others, whose logs are asked for."""
    lines = [line for rank in ranks for line in timed_out(rank, position)]
    (tmp_path / "pod.log").write_text("\n".join(lines))
    found = doctor(tmp_path)
    assert (found.causes, found.waiting) == ((), ranks)
    assert f"{in_words(ranks)} wait{'s' * (len(ranks) == 1)} in all_reduce, call {position} of world" in found.verdict
    assert "nothing is known of the other ranks: add their files" in found.verdict
    (tmp_path / "ras.txt").write_text(HEALTHY)
    found = doctor(tmp_path)
    assert (found.world_size, found.causes, found.waiting) == (256, (), ranks)
    assert any("256 ranks, no mismatch" in note for note in found.notes)
    (tmp_path / "ras.txt").write_text("\n".join([HEALTHY, *lines]))
    assert doctor(tmp_path / "ras.txt").verdict == found.verdict  # pasted into one file, as in reports


def test_a_report_without_a_mismatch_is_no_hang(tmp_path):
    """256 ranks whose counts are equal: the report shows that, and that a second one would show more."""
    (tmp_path / "ras.txt").write_text(HEALTHY)
    found = doctor(tmp_path)
    assert found.verdict.startswith("256 ranks, no mismatch: the counts of each communicator are equal at this moment")
    assert (found.remarks, found.causes) == ((), ())


@pytest.mark.parametrize(("here", "size"), [((3,), 8), ((8, 9, 10, 11), 64)])
def test_the_recordings_of_one_host_name_no_rank_of_others(tmp_path, here, size):
    """1 and 4 ranks of 8 and 64 left recordings here: those wait, and nothing is known of the others."""
    documents = {
        rank: document([call(WORLD, 1), call(WORLD, 2, done=False)], {WORLD: range(size)}, rank=rank, world_size=size)
        for rank in here
    }
    write(tmp_path, documents)
    found = doctor(tmp_path)
    assert (found.causes, found.waiting, found.at_fault) == ((), here, ())
    assert "nothing is known of the other ranks: add their files" in found.verdict
