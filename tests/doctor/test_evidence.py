"""Stacks, logs of NCCL and errors of torchrun: what they name, and that no other rank is ever named."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.making import WORLD, call, document, write
from tests.doctor.test_logs import BEHIND
from tests.doctor.test_ras import as_json, as_text
from tests.sweeping import ALL

from rankmesh.debug.doctor import doctor
from rankmesh.errors import RecordingError

# Real dumps of three ranks: rank 1 sleeps or computes, and the others wait for it.
CORPUS = sorted((Path(__file__).parent / "evidence").iterdir())
# Snapshots that do not show that the others wait: work.wait() in no frame of Python, imports in a constructor.
UNCLEAR = {"async-fh", "async-pyspy", "ddp-fh", "ddp-pyspy"}
WAITS = """\
Process {pid}: /usr/bin/python3.12 -u train.py
Python v3.12.3 (/usr/bin/python3.12)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2827)
    wrapper (torch/distributed/c10d_logger.py:81)
    step (train.py:31)
    <module> (train.py:60)
Thread 0x7F12AB (active): "Thread-1"
    wait (threading.py:331)
    _bootstrap (threading.py:1032)
"""
LOADS = """\
Process {pid}: /usr/bin/python3.12 -u train.py
Thread {pid} (active+gil): "MainThread"
    decode (PIL/Image.py:88)
    load (data.py:8)
    <module> (train.py:58)
"""
BACKWARD = """\
Thread 71 (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:824)
    backward (torch/_tensor.py:647)
    step (train.py:40)
"""
IMPORTS = """\
Thread 71 (active+gil): "MainThread"
    <module> (torch/_dynamo/trace_rules.py:3097)
    forward (torch/nn/parallel/distributed.py:1593)
    step (train.py:40)
"""


# A loader of data beside a rank's own process, and what torch.compile starts beside a rank and in it.
LOADER = LOADS.replace("decode (PIL/Image.py:88)", "_worker_loop (torch/utils/data/_utils/worker.py:349)")
LOADER = LOADER.replace("{pid}", "99")
COMPILER = LOADS.replace("decode (PIL/Image.py:88)", "main (torch/_inductor/compile_worker/__main__.py:64)")
COMPILES = 'Thread 91 (idle): "InductorSubproc"\n    _read_thread (torch/_inductor/compile_worker/subproc_pool.py:9)\n'
# Of faulthandler.
CALL = """\
{} (most recent call first):
  File "/v/lib/python3.13/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/x/t.py", line 8 in <module>

"""
READS = 'Current thread 0x00007f1 (most recent call first):\n  File "/x/data.py", line 3 in load\n\n'
NAMED_CALL, OTHER_CALL = CALL.format("Current thread 0x00007f1 [python]"), CALL.format("Thread 0x00007f9")
IDLE = 'Thread 0x00007f9 (most recent call first):\n  File "/x/queue.py", line 4 in get\n\n'


def found(folder, plan=None):
    """The cause, ranks and confidence of each cause."""
    return [(one.cause, one.ranks, one.confidence) for one in doctor(folder, plan).causes]


def dumps(folder, *texts, name="rank{}.txt", end="\n"):
    """One file for each rank."""
    for rank, text in enumerate(texts):
        path = folder / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{pid}", str(4000 + rank)).replace("\n", end), encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("folder", CORPUS, ids=lambda path: path.name)
def test_real_dumps(folder):
    """Rank 1 is named where frames show that the others wait, at its own line; else nobody is."""
    one = doctor(folder)
    assert found(folder) == ([] if folder.name in UNCLEAR else [("late", (1,), "likely")])
    if folder.name not in UNCLEAR:
        assert "train.py:29 in step" in one.verdict or "train.py:10 in load" in one.verdict
    assert "distributed_c10d" not in one.verdict


@pytest.mark.parametrize(
    "name",
    [
        "rank{}.txt",
        "stack.{}.log",
        "log.{}",
        "dumps/worker-{}/py-spy.txt",
        "run_x/attempt_0/{}/stderr.log",
        "r_rank_{}",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_names_of_files(tmp_path, name, end):
    """Files and folders are named by rank in many ways."""
    dumps(tmp_path, WAITS, WAITS, LOADS, WAITS, name=name, end=end)
    assert found(tmp_path) == [("late", (2,), "likely")]


@pytest.mark.parametrize(
    "prefix", ["[rank{}]:", "[default{}]:", "{}: ", "2026-01-01T10:00:00.123Z {}: ", " {}: ", "[pod/job-{}/pytorch] "]
)
def test_one_file_with_prefixes(tmp_path, prefix):
    """Lines of several ranks are told apart by their prefix, even in turns; a pod is not a rank."""
    texts = [text.replace("{pid}", str(rank)).splitlines() for rank, text in enumerate((WAITS, LOADS, WAITS))]
    longest = max(map(len, texts))
    lines = [
        prefix.format(rank) + text[place]
        for place in range(longest)
        for rank, text in enumerate(texts)
        if place < len(text)
    ]
    (tmp_path / "slurm.out").write_text("\n".join([*lines, "bye"]), encoding="utf-8")
    assert found(tmp_path) == ([] if "pod" in prefix else [("late", (1,), "likely")])


def test_numbers_that_are_not_ranks(tmp_path):
    """Process ids, and local ranks of two hosts, name nobody."""
    for number in (48211, 48212, 48213):
        dumps(tmp_path / "stacks", WAITS if number > 48211 else LOADS, name=f"stack.{number}.txt")
    words = "2 of 3 processes whose ranks are not known are in a collective"
    assert doctor(tmp_path / "stacks").verdict == words
    dumps(tmp_path / "logs" / "a", WAITS, WAITS, name="{}/stderr.log")
    dumps(tmp_path / "logs" / "b", WAITS, WAITS, LOADS, name="{}/stderr.log")
    assert found(tmp_path / "logs") == []


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            (WAITS, WAITS, WAITS),
            "ranks 0, 1, 2 wait in all_reduce at train.py:31 in step; nothing here shows for which",
        ),
        ((WAITS, LOADS, LOADS), "ranks 1, 2 do not; rank 1 is at PIL/Image.py:88 in decode; rank 2 is at"),
        ((LOADS, LOADS, LOADS), "no rank waits"),
        (
            (WAITS, WAITS.replace("all_reduce", "recv").replace(":31", ":50"), WAITS),
            "ranks 0, 2 wait in all_reduce at train.py:31 in step; rank 1 waits in recv at train.py:50 in step",
        ),
        ((IMPORTS, LOADS, IMPORTS), "no rank waits"),
        ((WAITS, LOADS, ""), "ranks 1, 2 do not"),
        ((BACKWARD, LOADS, BACKWARD), [("late", (1,), "possible")]),
        ((WAITS, WAITS, "Error: No such process"), [("dead", (2,), "possible")]),
        # Helpers of a rank are not ranks.
        ((WAITS + LOADER, LOADS, f"{LOADER}\n{WAITS}"), [("late", (1,), "likely")]),
        ((WAITS + COMPILES, LOADS + COMPILES, f"{COMPILER}\n{WAITS}"), [("late", (1,), "likely")]),
        # Threads may have names, the newest first; a later dump in the same file counts.
        ((READS + NAMED_CALL, READS, READS + NAMED_CALL), [("late", (1,), "likely")]),
        # The main thread, which has the signal, is the last of a dump: those before it count, in the last dump of two.
        (
            (OTHER_CALL + READS, IDLE + READS + OTHER_CALL + READS, OTHER_CALL + READS + IDLE + READS),
            [("late", (2,), "likely")],
        ),
    ],
)
def test_who_is_named(tmp_path, texts, expected):
    """Only one that is elsewhere while all others wait; a file without a stack may be of the rank to blame."""
    dumps(tmp_path, *texts)
    assert found(tmp_path) == (expected if isinstance(expected, list) else [])
    verdict = doctor(tmp_path).verdict
    assert isinstance(expected, list) or expected in verdict
    assert texts[1] != READS or "/x/data.py:3 in load" in verdict


def test_a_call_on_another_thread(tmp_path):
    """A rank whose backward pass calls a collective on a thread of autograd waits in it, at the main thread's line."""
    thread = "Thread 90 (active)\n    all_gather_into_tensor (torch/distributed/distributed_c10d.py:2709)\n"
    dumps(tmp_path, WAITS, LOADS, BACKWARD + thread)
    [one] = doctor(tmp_path).causes
    assert (one.ranks, one.sites) == ((1,), {0: "train.py:31 in step", 1: "PIL/Image.py:88 in decode"})


# -- errors ------------------------------------------------------------------------------------------------------------

STACK = """\
Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 3, in f
    return f(*args, **kwargs)
  File "/home/me/train.py", line 48, in load
    raise ValueError("a sample has no label")
ValueError: a sample has no label
"""
CLOSED = STACK.replace("ValueError: a sample has no label", "RuntimeError: [gloo/pair.cc:5] Connection closed by peer")
ROOT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-02-03_10:20:31
  host      : node-2
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 70)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-02-03_10:20:30
  host      : node-2
  rank      : 11 (local_rank: 3)
  exitcode  : %d (pid: 77)
  error_file: <N/A>
  traceback : %s
============================================================
"""


FAILED = [("dead", (1,), "likely")]


def error_file(stack=STACK, time=1770000000):
    """An error file as torch writes it."""
    extra = {"py_callstack": stack, "timestamp": str(time)}
    return json.dumps({"message": {"message": stack.splitlines()[-1], "extraInfo": extra}})


@pytest.mark.parametrize("folder", ["train", "recorded"])
@pytest.mark.parametrize("parts", ["", "logs", "torchrun.log"])
def test_real_errors(folder, parts):
    """Rank 1 of three raises; the others lose the connection and are ended, with and without torch's error files."""
    path = Path(__file__).parent / "failures" / folder / parts
    one = doctor(path)
    assert found(path) == FAILED
    assert one.verdict.startswith("failed: rank 1 failed")
    assert (folder, parts) == ("train", "torchrun.log") or "ValueError: a sample has no label" in one.verdict


def test_error_files(tmp_path):
    """The rank with an error of its own failed; the error of the others is how they lost it."""
    dumps(tmp_path, error_file(CLOSED), error_file(time=1770000001), name="attempt_0/{}/error.json")
    one = doctor(tmp_path)
    assert found(tmp_path) == FAILED
    assert one.verdict.startswith(
        "failed: rank 1 failed: ValueError: a sample has no label, at /home/me/train.py:48 in load"
    )


def test_the_first_of_several(tmp_path):
    """Of several own errors the earliest is the first; those of an earlier attempt do not count."""
    dumps(tmp_path, error_file(time=9), error_file(time=5), error_file(time=7), name="attempt_1/{}/error.json")
    dumps(tmp_path, error_file(time=1), name="attempt_0/{}/error.json")
    one = doctor(tmp_path)
    assert found(tmp_path) == FAILED
    assert any("earlier attempts" in note for note in one.notes)


@pytest.mark.parametrize("prefix", ["", "[default0]:", "(Launcher pid=7) ", "2026-02-03T10:20:31Z "])
@pytest.mark.parametrize(
    ("code", "message", "named"),
    [
        (1, "To enable traceback see: https://pytorch.org", True),
        (-9, "Signal 9 (SIGKILL) received by PID 77", True),
        (1, STACK.replace("\n", "\n  "), True),
        (-6, "Signal 6 (SIGABRT) received by PID 77", False),
        (-15, "Signal 15 (SIGTERM) received by PID 77", False),
        (1, CLOSED.replace("\n", "\n  "), False),
    ],
)
def test_the_root_cause_of_torchrun(tmp_path, prefix, code, message, named):
    """The first failure is named, unless a time-out or another rank ended it."""
    text = "".join(f"{prefix}{line}\n" for line in (ROOT % (code, message)).splitlines())
    (tmp_path / "train.log").write_text(text, encoding="utf-8")
    assert found(tmp_path) == ([("dead", (11,), "likely")] if named else [])
    assert ("it may have waited for another rank" in doctor(tmp_path).verdict) != named
    assert "rank 11 failed" in doctor(tmp_path).verdict


def test_files_of_local_ranks(tmp_path):
    """torchrun names folders by local rank: its report says which rank that is; of several hosts nobody knows."""
    dumps(tmp_path, *(error_file(CLOSED if rank != 3 else STACK) for rank in range(4)), name="attempt_0/{}/error.json")
    (tmp_path / "train.log").write_text(ROOT % (1, "To enable traceback"), encoding="utf-8")
    assert found(tmp_path) == [("dead", (11,), "likely")]
    other = ROOT.replace("rank      : 11", "rank      : 3") % (-15, "Signal 15 (SIGTERM)")
    (tmp_path / "other.log").write_text(other, encoding="utf-8")
    assert found(tmp_path) == [("dead", (11,), "likely")]


def test_errors_that_nobody_caught(tmp_path):
    """torch's own prefix marks them; one that a program logs itself names nobody, and who followed is not named."""
    first = "".join(f"[rank2]: {line}\n" for line in STACK.splitlines())
    closed = "".join(f"[rank0]: {line}\n" for line in CLOSED.splitlines())
    (tmp_path / "train.log").write_text(closed + first + ROOT % (1, "To enable traceback"), encoding="utf-8")
    assert found(tmp_path) == [("dead", (2,), "likely")]
    (tmp_path / "train.log").write_text(STACK, encoding="utf-8")
    with pytest.raises(RecordingError):
        doctor(tmp_path)


def test_a_failure_before_its_consequence(tmp_path):
    """Recordings show a rank without a recording, and an error says why."""
    hung = {r: document([call(WORLD, 7, done=False)], {WORLD: (0, 1, 2)}) for r in (0, 2)}
    write(tmp_path, hung)
    (tmp_path / "rank1_error.json").write_text(error_file(), encoding="utf-8")
    one = doctor(tmp_path)
    assert [(cause.cause, cause.ranks) for cause in one.causes] == [("dead", (1,))]
    assert one.verdict.startswith("failed: rank 1 failed: ValueError")


def test_a_failure_in_a_recording(tmp_path):
    """A program that ended by an error of its own failed; one whose peers closed their connections did not."""
    hung = {r: document([call(WORLD, 7, done=False)], {WORLD: (0, 1, 2)}) for r in (0, 2)}
    for error, cause in (("ValueError: no label", "failed"), ("RuntimeError: Connection closed by peer", "absent")):
        ended = document([call(WORLD, 6)], {WORLD: (0, 1, 2)}, rank=1, ended=True, failure=error)
        write(tmp_path, {**hung, 1: ended})
        assert doctor(tmp_path).verdict.startswith(f"{cause}: ")


# -- logs of NCCL -----------------------------------------------------------------------------------------------------


def line(rank, what, host="node-1"):
    """A line of NCCL."""
    return f"{host}:{900 + rank}:{1200 + rank} [{rank % 8}] {what}"


def init(rank, state, size=4, name="0x5ae77eb5ea4ec1ee", release="2.27"):
    """A line about a communicator."""
    begin = "" if release == "2.18" else "ncclCommInitRankConfig "
    about = f"comm 0x5{rank}f0 rank {rank} nranks {size} cudaDev {rank} nvmlDev {rank} busId 5{rank}000 commId {name}"
    return line(rank, f"NCCL INFO {begin}{about} - Init {state}")


@pytest.mark.parametrize("prefix", ["", "[rank0]:", "3: ", "(Worker pid=9, ip=10.0.0.3) "])
@pytest.mark.parametrize("release", ["2.18", "2.27"])
def test_communicators(tmp_path, prefix, release):
    """A rank that did not begin is possibly the one; who began and did not complete, nobody is."""

    def causes_of(begun, done):
        lines = [init(r, "START", release=release) for r in begun] + [
            init(r, "COMPLETE", release=release) for r in done
        ]
        (tmp_path / "nccl.log").write_text("".join(f"{prefix}{one}\n" for one in lines), encoding="utf-8")
        return [one[:2] for one in found(tmp_path / "nccl.log")]

    assert causes_of((0, 1, 3), ()) == [("dead", (2,))]
    assert causes_of((0, 1, 2, 3), (0, 1, 3)) == [("stuck", (2,))]
    assert causes_of((0, 1, 3), (0,)) == []
    assert causes_of((0,), ()) == []
    assert causes_of((0, 1, 2, 3), (0, 1, 2, 3)) == []


def test_errors_of_the_network(tmp_path):
    """The process is shown with its rank and host, and nobody is named."""
    lines = [init(r, state) for r in range(4) for state in ("START", "COMPLETE")]
    what = "Got completion from peer 10.0.0.9<44206> with status=12 opcode=129 len=65536 vendor err 129 (Recv)"
    closed = "misc/socket.cc:58 (socketProgress) NCCL WARN socketProgress: Connection closed by remote peer x"
    lines += ["", line(2, f"net_ib.cc:1615 NCCL WARN NET/IB : {what}"), "", line(3, closed)]
    (tmp_path / "nccl.log").write_text("\r\n".join(lines), encoding="utf-8")
    one = doctor(tmp_path)
    assert one.causes == ()
    assert "rank 2 on node-1: NET/IB : Got completion from peer 10.0.0.9<44206> with status=12" in one.verdict
    (tmp_path / "nccl.log").write_text(line(0, "x.cc:63 NCCL WARN Failed to open libibverbs.so[.1]"), encoding="utf-8")
    with pytest.raises(RecordingError):
        doctor(tmp_path)


def test_versions(tmp_path):
    """Who runs which version of NCCL, where not all run one."""
    lines = [init(r, state) for r in range(4) for state in ("START", "COMPLETE")]
    lines += [line(r, f"NCCL INFO NCCL version 2.2{7 if r != 1 else 6}.3+cuda12.9") for r in range(4)]
    (tmp_path / "nccl.log").write_text("\n".join(lines), encoding="utf-8")
    assert doctor(tmp_path).verdict.startswith("versions: NCCL 2.26.3+cuda12.9 runs in rank 1 on node-1; NCCL 2.27.3")


# -- several sources ---------------------------------------------------------------------------------------------------


def test_facts_of_several_sources(tmp_path):
    """Lines of one rank make one cause; where two sources show that different ranks wait for none, nobody is named."""
    dumps(tmp_path, WAITS, WAITS, LOADS, WAITS)
    nccl = "\n".join(init(r, "START") for r in (0, 1, 3))
    (tmp_path / "nccl.log").write_text(nccl, encoding="utf-8")
    [one] = doctor(tmp_path).causes
    assert (one.cause, one.ranks, one.confidence) == ("late", (2,), "possible")
    assert "nccl.log" in one.source
    assert "it is at PIL/Image.py:88 in decode" in one.evidence
    (tmp_path / "nccl.log").write_text(nccl.replace("rank 3", "rank 2"), encoding="utf-8")
    assert doctor(tmp_path).causes == ()


def test_what_is_not_used(tmp_path):
    """Files of no kind are in a note."""
    dumps(tmp_path, WAITS, LOADS)
    (tmp_path / "notes.md").write_text("nothing\n", encoding="utf-8")
    assert any("notes.md" in note for note in doctor(tmp_path).notes)


REPORT = [(list(range(8)), {"AllReduce": {rank: 10 - (rank == 5) for rank in range(8)}}, [6])]


@settings(max_examples=300 if ALL else 100, deadline=None)
@given(
    st.sampled_from(
        [WAITS, LOADS, ROOT % (1, STACK), error_file(), init(0, "START"), '[{"thread_name": "x"}]',
         "\n".join(BEHIND), as_text(REPORT), as_json(REPORT)]
    ),
    st.lists(st.tuples(st.integers(0, 6000), st.text(max_size=3)), max_size=8),
)  # fmt: skip
def test_changed_files(tmp_path_factory, text, changes):
    """Any text, a watchdog's log and a report of ncclras too, is read without another error than ours."""
    for place, inserted in changes:
        text = text[: place % len(text)] + inserted + text[(place + 1) % len(text) :]
    with suppress(UnicodeEncodeError, RecordingError):
        doctor(dumps(tmp_path_factory.mktemp("changed"), text, WAITS))
