"""Files: formats, versions, torn and hostile ones, those of other jobs and attempts."""

import gzip
import json
import os
import pickle
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.doctor.making import WORLD, call, document, recordings, write
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh.debug.doctor import diagnose, doctor, reader, recording_of
from rankmesh.debug.doctor.folder import read_paths
from rankmesh.debug.doctor.reader import document as read_document
from rankmesh.errors import RecordingError

RANKS = (0, 1, 2, 3)
PLAN = rm.recipes.axes(rm.Mesh(tp=2, dp=2))


def hung(without=(3,), version="2.10", **about):
    """Four ranks in one call, but for those without a recording."""
    return {
        rank: document([call(WORLD, 1), call(WORLD, 2, done=False)], {WORLD: RANKS}, version, **about)
        for rank in RANKS
        if rank not in without
    }


def causes(folder):
    """Cause and ranks of each cause of a folder."""
    return [(cause.cause, cause.ranks) for cause in doctor(folder).causes]


@pytest.mark.parametrize("version", ["2.1", "2.5", "2.10", "2.99"])
def test_versions(version):
    """Formats 2.1 and newer are read, with the fields that they have."""
    documents = hung(version=version)
    for data in documents.values():
        for entry in data["entries"]:
            for name in ("input_dtypes", "output_dtypes", "timeout_ms", "is_p2p") if version == "2.1" else ():
                del entry[name]
    found = diagnose(recordings(documents))
    assert [(cause.cause, cause.ranks) for cause in found.causes] == [("dead", (3,))]


@pytest.mark.parametrize("version", ["1.5", "3.0", "2.0", "", "x"])
def test_other_versions_are_refused(version):
    """A format that is not known is refused with the name of the file."""
    with pytest.raises(RecordingError, match="nccl_trace_rank_0"):
        recording_of(hung(version=version)[0], 0, "nccl_trace_rank_0")


class Evil:
    """What a pickle can do: run a command when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


HOSTILE = {
    "memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "long": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "nested lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested json": b"[" * 200_000,
    "deep json": b'{"version": "2.1", "entries": ' + b"[" * 200_000,
    "gzip bomb": b"",  # packed by the test
    "huge number": b'{"version": "2.1", "entries": [' + b"9" * 2**20 + b"]}",
    "huge long": b"\x80\x02\x8b" + struct.pack("<i", 2**24) + bytes(2**24 - 1) + b"\x7f.",
    "huge text": b'{"version": "' + b"x" * 2**24 + b'", "entries": []}',
    "a list": b"[1, 2]",
    "no entries": b'{"version": "2.1"}',
    "entries of nothing": b'{"version": "2.1", "entries": [null, 3]}',
    "nan": b'{"version": "2.1", "entries": [{"process_group": NaN}]}',
    "binary": bytes(range(256)),
    "empty": b"",
    "torn": pickle.dumps({"version": "2.1", "entries": [1, 2, 3]})[:-6],
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02Vx\nQ.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "hash": b"\x80\x02" + b"".join([b"N", *[b"2\x86" for _ in range(45)], b"}", b"00."]),
}


def test_hostile_files(tmp_path):
    """Files that are no recordings are each named and left out, and the others are read; it does not take long."""
    write(tmp_path, hung())
    bomb = {"gzip bomb": gzip.compress(b'{"version": "' + bytes(200 * 2**20), compresslevel=1)}
    for place, content in enumerate((HOSTILE | bomb).values(), 100):
        (tmp_path / f"nccl_trace_rank_{place}").write_bytes(content)
    started = time.monotonic()
    found = doctor(tmp_path)
    assert time.monotonic() - started < 60
    assert [(cause.cause, cause.ranks) for cause in found.causes] == [("dead", (3,))]
    for place, name in enumerate(HOSTILE, 100):
        assert any(f"nccl_trace_rank_{place}" in note for note in found.notes), name


def test_no_code_runs(tmp_path):
    """A pickle that would run a command is refused, and says what it asked for."""
    write(tmp_path, hung())
    evil = pickle.dumps({"version": "2.10", "entries": [Evil(tmp_path / "ran")]}, protocol=2)
    (tmp_path / "nccl_trace_rank_3").write_bytes(evil)
    found = doctor(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert any("system" in note and "plain data" in note for note in found.notes)


def test_no_module_of_the_folder_runs(tmp_path, monkeypatch):
    """In the folder that is read, a file named as a module of Python's is not imported."""
    write(tmp_path, hung())
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert causes(Path()) == [("dead", (3,))]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("started", [True, False])
def test_contents_are_read_as_files_are(tmp_path, monkeypatch, started):
    """In their order, the unreadable ones among them, also where no reader can be started."""
    write(tmp_path, dict.fromkeys(range(100), hung()[1]))
    files = [tmp_path / f"nccl_trace_rank_{rank}" for rank in range(100)]
    files[7].write_bytes(b"{}")
    if not started:
        monkeypatch.setattr(sys, "executable", "/no/python")
    answers = reader.read_many([(path.read_bytes(), rank) for rank, path in enumerate(files)])
    assert [answer if isinstance(answer, str) else answer.rank for answer in answers] == [
        *range(7),
        "rank7 is not a recording: it has no version, or no entries",
        *range(8, 100),
    ]


def test_a_reader_that_is_ended_is_replaced(tmp_path, monkeypatch):
    """A file that ends its reader is named, and the files after it are read."""
    monkeypatch.setattr("rankmesh.debug.doctor.reader._SECONDS", 1)
    write(tmp_path, hung(without=(0,)))
    (tmp_path / "nccl_trace_rank_0").write_bytes(_endless())
    found = doctor(tmp_path)
    assert any("nccl_trace_rank_0" in note for note in found.notes)
    assert set(found.history.recordings) == {1, 2, 3}


def test_a_reader_that_ends_by_chance_costs_no_recording(tmp_path, monkeypatch):
    """On a loaded machine one may end before it has begun: its file is given to the next one, once."""
    asked, calls = reader._asked, []

    def ends_first(process, path, rank):
        calls.append(path.name)
        if len(calls) == 1:
            raise EOFError
        return asked(process, path, rank)

    monkeypatch.setattr(reader, "_asked", ends_first)
    write(tmp_path, hung(without=()))
    found = doctor(tmp_path)
    assert set(found.history.recordings) == {0, 1, 2, 3}
    assert calls[0] == calls[1]
    assert len(calls) == 5


def _endless():
    """A dictionary whose key is a tuple of tuples of tuples: hashing it visits 2 to the power of 60."""
    return b"\x80\x02}" + b"N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60)) + b"Ns."


@settings(max_examples=300 if ALL else 100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["json", "pickle"]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=12),
    st.integers(0, 3000),
)
def test_fuzzed_files(tmp_path, form, changes, cut):
    """Changed and torn bytes give a recording or a RecordingError, never another error."""
    data = hung()[0]
    raw = bytearray(json.dumps(data).encode() if form == "json" else pickle.dumps(data, protocol=2))
    for place, value in changes:
        raw[place % len(raw)] = value
    path = tmp_path / "rank_0"
    path.write_bytes(raw[: len(raw) - cut if cut < len(raw) // 4 else len(raw)])
    with suppress(RecordingError):
        recording_of(read_document(path), 0, path.name)


def test_other_jobs_and_attempts(tmp_path):
    """Of several jobs the one with the most recordings counts, of its attempts the last; the rest is told."""
    for rank, data in hung().items():
        local = {"rank": rank, "run": "this", "attempt": 2, "time_ns": 5}
        (tmp_path / f"b{rank}.json").write_text(json.dumps({**data, "rankmesh": local}), encoding="utf-8")
        old = {**local, "attempt": 1}
        (tmp_path / f"a{rank}.json").write_text(json.dumps({**data, "rankmesh": old}), encoding="utf-8")
    other = {"rank": 3, "run": "that", "attempt": 9}
    (tmp_path / "c3.json").write_text(json.dumps({**hung(())[3], "rankmesh": other}), encoding="utf-8")
    found = read_paths([tmp_path])
    assert sorted(found.recordings) == [0, 1, 2]
    assert {recording.attempt for recording in found.recordings.values()} == {2}
    assert any("another job" in note for note in found.notes)
    assert any("earlier attempt" in note for note in found.notes)


def test_an_older_life_without_a_word(tmp_path):
    """Recordings of torch do not say their attempt: a rank that went on long before the others came is of another."""
    documents = hung(())
    for entry in documents[3]["entries"]:
        entry["time_created_ns"] -= 3600 * 10**9
    write(tmp_path, documents)
    assert causes(tmp_path) == [("dead", (3,))]


def test_subfolders(tmp_path):
    """A folder of folders stands for the newest of them."""
    for name, without in (("old", (1,)), ("new", (2,))):
        (tmp_path / name).mkdir()
        write(tmp_path / name, hung(without))
    os.utime(tmp_path / "old", (1, 1))
    assert causes(tmp_path) == [("dead", (2,))]


@pytest.mark.parametrize("form", ["json", "pickle", "gzip"])
def test_the_members_of_the_world_are_kept_once(tmp_path, form):
    """Not once for each of 64 ranks, whichever reader has them: memory would grow with the square of the world."""
    entries = [call(WORLD, 1), call(("1", "tp"), 1)]
    write(tmp_path, {r: document(entries, {WORLD: range(64), ("1", "tp"): (r, r ^ 1)}) for r in range(64)}, form)
    found = read_paths([tmp_path]).recordings
    worlds = {id(one.groups[0].members): one.groups[0].members for one in found.values()}
    assert len(worlds) <= 2  # readers that work at the same time
    assert set(worlds.values()) == {tuple(range(64))}
    assert all(sorted(one.groups[1].members) == sorted((rank, rank ^ 1)) for rank, one in found.items())


def test_no_recordings(tmp_path):
    """A folder without recordings, and what is no folder, are refused with what would be one."""
    (tmp_path / "train.log").write_text("hello", encoding="utf-8")
    with pytest.raises(RecordingError, match="nccl_trace_rank_3"):
        doctor(tmp_path)
    with pytest.raises(RecordingError, match="not a folder"):
        doctor(tmp_path / "absent")


ODD = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 2**31, 2**64, -(2**70), 10**400, 1.5, float("nan"), float("inf"), "", "[0, 999999999999]"]
    ),
    st.sampled_from(
        ["[0, 5, 1048577]", "x" * 5000, [], [[]], [[2**64] * 70], {"a": {}}, [None], ["Float"] * 9, {}, b"x"]
    ),
    st.text(max_size=20),
    st.lists(st.integers(-(2**80), 2**80), max_size=6),
)
FIELDS = (
    *("record_id", "process_group", "collective_seq_id", "profiling_name", "time_created_ns", "input_sizes"),
    *("input_dtypes", "output_sizes", "output_dtypes", "state", "retired", "is_p2p", "frames"),
    *("pg_id", "timeout_ms", "p2p_seq_id"),
)
ABOUT = ("rank", "world_size", "run", "attempt", "host", "time_ns", "ended", "state", "in_call")


@settings(max_examples=400 if ALL else 130, deadline=None)
@given(
    st.sampled_from([None, PLAN]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from(FIELDS), ODD), max_size=4),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ABOUT), ODD), max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["name", "desc", "ranks"]), ODD), max_size=2),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["version", "pg_config", "pg_status", "stacks", "rankmesh"]), ODD),
        max_size=1,
    ),
)
def test_odd_values(plan, fields, about, groups, tops):
    """Any value in any field gives a diagnosis soon, or a RecordingError that leaves the file out."""
    documents = {rank: data | {"rankmesh": {"rank": rank}} for rank, data in hung().items()}
    for rank, place, name, value in fields:
        documents[rank]["entries"][place][name] = value
    for rank, name, value in about:
        documents[rank]["rankmesh"][name] = value
    for rank, name, value in groups:
        documents[rank]["pg_config"]["0"][name] = value
    for rank, name, value in tops:
        documents[rank][name] = value
    found = {}
    for rank, data in documents.items():
        with suppress(RecordingError):
            found[rank] = recording_of(data, rank, f"rank{rank}")
    result = diagnose(found, plan)
    assert result.world_size <= 2**20
    json.dumps(result.to_dict())


MAIN, TORCH, FRAMEWORK = "/home/me/main.py", "/site-packages/torch/nn/a.py", "/site-packages/accelerate/b.py"


@pytest.mark.parametrize(
    ("inner", "shown"),
    [
        # Torch, rankmesh and Python's own modules are passed over, and frameworks where the program has a line.
        ("/opt/python/lib/python3.12/selectors.py", MAIN),
        ("/usr/lib64/python3.11/subprocess.py", MAIN),
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", MAIN),
        ("/venv/lib/python3.11/site-packages/rankmesh/runtime/groups.py", MAIN),
        ("/site-packages/megatron/utils.py", MAIN),
        ("/opt/packages/accelerate-1.15.0/accelerate/accelerator.py", MAIN),
        # Of other packages, of a checkout, and in folders that are named like one.
        ("/home/me/Megatron-LM/megatron/utils.py", "/home/me/Megatron-LM/megatron/utils.py"),
        ("/site-packages/layers/attention.py", "/site-packages/layers/attention.py"),
        ("/home/me/rankmesh/train.py", "/home/me/rankmesh/train.py"),
    ],
)
def test_the_line_of_a_call(inner, shown):
    """It is the innermost of the program, else the innermost of a framework; none if all are of torch."""
    assert sites_of(inner, MAIN, "/home/me/outer.py") == [f"{shown}:7 in f"]
    assert sites_of(TORCH, FRAMEWORK, TORCH, "/site-packages/accelerate/d.py") == [f"{FRAMEWORK}:7 in f"]
    assert sites_of(TORCH, TORCH) == []


def sites_of(*files):
    """The lines of a recording of one call with these frames."""
    frames = [{"filename": name, "line": 7, "name": "f"} for name in files]
    one = recording_of(document([call(WORLD, 1, frames=frames)], {WORLD: (0,)}), 0)
    assert one.site.tolist() == [0 if one.sites else -1]
    return one.sites


def test_members_as_ranges():
    """A watch writes members as ranges: they are those of torch's text, and one object where equal."""
    documents = {rank: document([call(WORLD, 1)], {WORLD: range(16)}) for rank in range(4)}
    for rank in (1, 2):
        documents[rank]["pg_config"]["0"] = {"desc": WORLD[1], "ranges": [[0, 8, 1], [8, 16, 1]]}
    found = [one.groups[0].members for one in recordings(documents).values()]
    assert found == [tuple(range(16))] * 4
    assert found[1] is found[2]


@pytest.mark.parametrize(
    "ranges", [[[0, 2**40, 1]], [[0, 4, 0]], [[-4, 2, 1]], [[0, 2**20, 1]] * 3, [[0]] * 2, [["a"]]]
)
def test_ranges_of_no_world_are_refused(ranges):
    """More ranks than any world has, no step, a negative rank: refused, and nothing as large is made."""
    one = document([call(WORLD, 1)], {WORLD: RANKS})
    one["pg_config"]["0"] = {"ranges": ranges}
    with pytest.raises(RecordingError):
        recording_of(one, 0, "rank0")


def test_progress(tmp_path):
    """How many recordings are read is reported now and then."""
    write(tmp_path, {rank: document([call(WORLD, 1)], {WORLD: range(70)}) for rank in range(70)})
    found = []
    doctor(tmp_path, progress=lambda *far: found.append(far))
    assert sorted(found) == [(32, 70), (64, 70)]
