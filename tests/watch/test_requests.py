"""A dump request without ranks: what is asked of the store, and which recordings count."""

import gzip
import os
import stat
import threading
import time
from collections import Counter
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from tests.limits import AT_ONCE, LONG
from tests.rendezvous.transports import LostChannel, Mortal

from rankmesh.debug.doctor.folder import chosen, read_paths
from rankmesh.debug.doctor.recording import recording_of
from rankmesh.debug.watch.host import Look
from rankmesh.debug.watch.recordings import Recordings
from rankmesh.debug.watch.requests import DumpRequests, Pace
from rankmesh.rendezvous import BoundedChannel, Outcome, Round, StoreChannel


class _Recorder:
    """A rank that has made no calls."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def document(self, reason, mark=None, *, ended=False):
        about = {"rank": self.rank, "reason": reason, "ended": ended, "time_ns": 1}
        return {"version": "2.10", "entries": [], "rankmesh": about}

    def unresponsive(self, rank, look):
        about = {"rank": rank, "state": look.state, "alive": look.alive, "time_ns": 1}
        return {"version": "2.10", "entries": [], "rankmesh": about}


class _HostRanks:
    """A host with all ranks, of which the unresponsive ones are stopped; or with this rank alone."""

    def __init__(self, *, shared=False):
        self.shared, self.ends = shared, False

    def terminated(self):
        return self.ends

    def look(self, ranks):
        return {rank: Look("stopped by a signal") for rank in ranks} if self.shared else {}

    def signalled(self):
        return False


class _Counted(Mortal):
    """A channel that counts its calls by name."""

    def __init__(self, inner, counted):
        super().__init__(inner, 0)
        self._counted = counted

    def __getattr__(self, name):
        found = super().__getattr__(name)
        if not callable(found):
            return found
        return lambda *args, **more: self._counted.update([name]) or found(*args, **more)


def _requests(rank, world_size, *, store, folder=None, counted=None, grace=LONG, shared=False):
    """The dump requests of one rank, which are taken quickly."""
    pace = Pace(0.5, world_size)
    pace.grace = grace
    counted = Counter() if counted is None else counted
    channel = _Counted(store if isinstance(store, LostChannel) else StoreChannel(store, "watch"), counted)
    recordings = Recordings("s", folder, BoundedChannel(channel))
    return DumpRequests(channel, recordings, _Recorder(rank, world_size), _HostRanks(shared=shared), pace)


def _respond(*each):
    """All of these respond side by side; what each of them is given."""
    given = {}

    def respond(number, one):
        one.respond("a test", None, lambda *diagnosed: given.update({number: diagnosed}))

    threads = [threading.Thread(target=respond, args=both) for both in enumerate(each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return given


def test_a_request_asks_as_much_in_a_large_world():
    """The last rank of 8 and of 1,024, the others having responded: what it asks of the store does not grow."""
    found = []
    for size in (8, 1024):
        store, counted = dist.HashStore(), Counter()
        for rank in range(size - 1):
            _requests(rank, size, store=store)._round.arrive("recordings")
        others = _requests(0, size, store=store)
        others._round.conclude("diagnosis", lambda _: Outcome(message="all is well"))
        last = _requests(size - 1, size, store=store, counted=counted)
        diagnosed = Mock()
        last.respond("a test", None, diagnosed)
        diagnosed.assert_called_once_with("all is well", (), None)
        found.append(dict(counted))
    assert found[0] == found[1]
    assert sum(found[0].values()) < 20, found


def test_a_rank_that_waits_for_a_request_asks_once_a_look():
    """21 looks are 21 questions; where the store is lost, nobody has asked."""
    counted = Counter()
    waits = _requests(0, 4, store=dist.HashStore(), counted=counted)
    assert not any(waits.requested() for _ in range(21))
    assert counted == {"wait": 21}
    assert not _requests(2, 4, store=LostChannel()).requested()


@pytest.mark.parametrize("with_folder", [False, True])
def test_one_diagnoses_and_all_get_it(tmp_path, with_folder):
    """4 ranks as threads: the lowest of them diagnoses, with a folder or without; the next request is another."""
    store = dist.HashStore()
    ranks = [_requests(rank, 4, store=store, folder=tmp_path if with_folder else None, grace=2.0) for rank in range(4)]
    for number in range(2):
        given = _respond(*ranks)
        assert sorted(given) == [0, 1, 2, 3]
        assert len({diagnosis for diagnosis, _, _ in given.values()}) == 1
        assert [rank for rank, (_, _, report) in sorted(given.items()) if report] == [0]
        assert [rank.number for rank in ranks] == [number + 1] * 4


def test_an_unresponsive_rank_is_described_and_the_lowest_of_the_others_diagnoses(tmp_path):
    """4 ranks, of which rank 0 does not respond: the others record what it looks like, and rank 1 diagnoses."""
    store = dist.HashStore()
    ranks = [_requests(rank, 4, store=store, folder=tmp_path, grace=0.5, shared=True) for rank in range(1, 4)]
    given = _respond(*ranks)
    assert [bool(given[number][2]) for number in range(3)] == [True, False, False]
    assert len({diagnosis for diagnosis, _, _ in given.values()}) == 1
    assert read_paths([tmp_path]).recordings[0].state == "stopped by a signal"
    assert not [key for key in range(4) if store.check([f"watch/recording/0/{key}"])]


def test_a_rank_that_dies_as_it_diagnoses(tmp_path, monkeypatch):
    """3 ranks, the lowest of which is to diagnose and never does: the next does in its place."""
    store = dist.HashStore()
    ranks = [_requests(rank, 3, store=store, grace=0.3) for rank in range(3)]
    reported = Round.reported
    monkeypatch.setattr(Round, "reported", lambda among, *rest: None if among.rank == 0 else reported(among, *rest))
    monkeypatch.setattr("threading.excepthook", lambda *_: None)  # rank 0 ends here
    given = _respond(*ranks)
    assert sorted(given) == [1, 2]
    assert sum(bool(report) for _, _, report in given.values()) == 1


def test_a_rank_that_is_to_end(tmp_path):
    """Of 3 ranks, two get SIGTERM: once their recordings are written they end, and rank 0 diagnoses all three."""
    store = dist.HashStore()
    ranks = [_requests(rank, 3, store=store, folder=folder) for rank, folder in enumerate((None, tmp_path, None))]
    first, *others = ranks
    read_all, read = first._recordings.read_all, []
    for one in others:
        one._host.ends = True

    def after_the_others(*given):
        for thread in threads:
            thread.join(LONG)
        read.append(read_all(*given))
        return read[0]

    first._recordings.read_all = after_the_others
    threads = [threading.Thread(target=one.respond, args=("a test", None, Mock())) for one in others]
    for thread in threads:
        thread.start()
    diagnosed = Mock()
    first.respond("a test", None, diagnosed)
    assert sorted(read[0]) == [0, 1, 2]
    diagnosed.assert_called_once()
    assert [one.hung for one in others] == [True, True], "what they wrote stays"


def test_nothing_is_left(tmp_path):
    """What 3 ranks leave in two requests is gone when the last of them closes: but the recordings in the folder."""
    store = dist.HashStore()
    ranks = [_requests(rank, 3, store=store, folder=tmp_path) for rank in range(3)]
    for _ in range(2):
        _respond(*ranks)
    assert not [key for key in ("recording/0/0", "recording/1/2") if store.check([f"watch/{key}"])]
    ranks[0]._round.conclude(
        "request", lambda _: Outcome(message="all is well")
    )  # one more, in which nobody takes part
    for one in ranks:
        one.close()
    assert store.num_keys() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"rank{n}.json.gz" for n in range(3)), "verdict.json"]


def test_a_folder_that_takes_nothing(tmp_path, caplog):
    """A warning says so, and the ranks use the store."""
    (tmp_path / "file").touch()
    diagnosed = Mock()
    single = _requests(0, 1, store=dist.HashStore(), folder=tmp_path / "file" / "folder")
    single.respond("a test", None, diagnosed)
    assert diagnosed.call_args.args[0].startswith("no rank waits")
    assert "rank0.json.gz cannot be written: " in caplog.text


def test_a_lost_store(tmp_path, caplog):
    """3 of 4 ranks that have lost the store, as rank 0 served it: a warning, and the doctor finds their recordings."""
    for rank in (1, 2, 3):
        diagnosed = Mock()
        single = _requests(rank, 4, store=LostChannel(), folder=tmp_path)
        assert not single.requested()
        single.respond("a test", None, diagnosed)
        diagnosed.assert_not_called()
        assert f"rank {rank} reaches no other rank" in caplog.text
        assert (single.store_lost, single.hung) == (True, False), "nobody knows whether the job hangs"
        assert single.number == 1
        single.close()
    assert sorted(read_paths([tmp_path]).recordings) == [1, 2, 3]


def test_recordings_of_before_are_not_of_now(tmp_path):
    """A folder has the recording of an earlier watch, an earlier request, this one, and a program that ended."""
    document = _Recorder(0, 4).document

    def recordings(session):
        # Another store each time: what counts here is the folder.
        return Recordings(session, tmp_path, BoundedChannel(StoreChannel(dist.HashStore(), "watch")))

    recordings("old").put(0, 0, document("before", ended=True))
    recordings("new").put(1, 0, document("before"))
    recordings("new").put(2, 1, document("now"))
    recordings("new").put(3, 2, document("the end", ended=True))
    now = recordings("new")
    assert [now.read(rank, 1) is not None for rank in range(4)] == [False, False, True, True]
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b torn")
    assert now.read(2, 1) is None


@pytest.mark.parametrize(
    "prepare",
    [
        os.mkfifo,  # as whatever else no private folder reads (tests/readers/test_private.py)
        lambda path: path.write_bytes(b'{"a":' * 100_000),
        lambda path: path.write_bytes(gzip.compress(b"{}" + b" " * (200 << 20), 1)),
    ],
)
def test_a_recording_that_cannot_be_read(tmp_path, prepare, caplog):
    """A FIFO, deep nesting and 200 MB packed as the recording of rank 1: none, at once."""
    recordings = Recordings("new", tmp_path, BoundedChannel(StoreChannel(dist.HashStore(), "watch")))
    prepare(tmp_path / "rank1.json.gz")
    started = time.monotonic()
    assert recordings.read(1, 0) is None
    assert time.monotonic() - started < AT_ONCE
    assert "the recording of rank 1 cannot be read" in caplog.text


def test_recordings_are_written_where_nobody_else_reads(tmp_path):
    """A recording has mode 0600, whatever the umask is; a link at its place is replaced, not followed."""
    (tmp_path / "rank1.json.gz").symlink_to(tmp_path / "mine")
    before = os.umask(0)
    try:
        Recordings("new", tmp_path, BoundedChannel(LostChannel())).put(1, 0, _Recorder(1, 4).document("now"))
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_a_recording_in_the_store():
    """It is there for ranks without the folder until its rank takes it back; one that is no recording is none."""
    store = BoundedChannel(StoreChannel(dist.HashStore(), "watch"))
    recordings = Recordings("new", None, store)
    recordings.put(2, 1, _Recorder(2, 4).document("now"), share=2000)
    assert recordings.read(2, 1).rank == 2
    recordings.unshare(2, 1)
    assert recordings.read(2, 1) is None
    store.ask(lambda channel: channel.write("recording/1/2", "AAAA not base64"))
    assert recordings.read(2, 1) is None


def _left(rank, session="", request=0, written=1, *, ended=False):
    about = {"rank": rank, "session": session, "inquiry": request, "time_ns": written, "ended": ended}
    return recording_of({"version": "2.10", "entries": [], "rankmesh": about}, rank, f"rank{rank}")


def test_the_doctor_leaves_out_what_was_before():
    """Without a watch, from its folder: the last watch and its last request count; torch's own recordings always."""
    found = chosen(
        [
            _left(0, "old", 3, written=5, ended=True),
            _left(1, "new", 0, written=8),
            _left(2, "new", 1, written=9),
            _left(3, "new", 2, written=9, ended=True),
            _left(4),
        ],
        [],
    )
    assert sorted(found.recordings) == [2, 3, 4]
    assert found.notes == (
        "left out: 1 of an earlier watch (rank 0)",
        "left out: 1 of an earlier time that all ranks were asked (rank 1)",
    )


def test_the_pace_of_a_large_world():
    """10,240 ranks ask the store no more than 4,000 questions a second, and give each other a tick more."""
    small, large = Pace(300, 8), Pace(300, 10_240)
    assert small.tick == 1.0
    assert 10_240 / large.tick <= 4000
    assert large.grace - small.grace == pytest.approx(large.tick - small.tick)
    assert Pace(1, 10_240).tick == pytest.approx(0.1), "a tick is never more than a tenth of the limit"
