"""An inquiry without ranks: what is asked of the posts, and which recordings count."""

import threading
from collections import Counter
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from tests.limits import LONG

from rankmesh.debug.doctor.folder import chosen
from rankmesh.debug.doctor.recording import recording_of
from rankmesh.debug.watch import posts
from rankmesh.debug.watch.board import Board
from rankmesh.debug.watch.inquiries import Inquiries, Pace
from rankmesh.debug.watch.posts import FolderPost, StorePost


class _Recorder:
    """A rank that has made no calls."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def document(self, reason, mark=None, *, ended=False):
        about = {"rank": self.rank, "reason": reason, "ended": ended, "time_ns": 1}
        return {"version": "2.10", "entries": [], "rankmesh": about}

    def with_lines(self, document):
        return document


class _HostRanks:
    """No other rank on this host."""

    def unresponsive(self, responded):
        return {}

    def signalled(self):
        return False


def _inquiries(board, rank, world_size):
    """Inquiries that are taken quickly, and where nobody is given up."""
    pace = Pace(0.5, world_size)
    pace.grace = LONG
    return Inquiries(board, _Recorder(rank, world_size), _HostRanks(), pace)


@pytest.fixture
def requested(monkeypatch):
    """How often each post is asked."""
    counted = Counter()
    for kind in (StorePost, FolderPost):
        for name in ("put", "get", "has", "join", "count", "joined", "claim"):
            real = getattr(kind, name)

            def act(self, *given, kind=kind, real=real, name=name):
                counted[kind, name] += 1
                return real(self, *given)

            monkeypatch.setattr(kind, name, act)
    return counted


@pytest.mark.parametrize("folder", [False, True])
def test_an_inquiry_asks_as_much_in_a_large_world(requested, tmp_path, folder):
    """The last rank of 8 and of 1,024, the others having spoken: what it asks of the posts does not grow."""
    found = []
    for size in (8, 1024):
        store = dist.HashStore()
        place = tmp_path / str(size) if folder else None
        others = Board("s", None, store)
        for rank in range(size - 1):
            others.join("said/0", rank)
        assert others.claim("gather/0")
        others.tell(0, "all is well", {})
        requested.clear()
        inquiries = _inquiries(Board("s", place, store), size - 1, size)
        received = Mock()
        inquiries.speak("a test", None, received)
        received.assert_called_once_with("all is well", "")
        found.append(dict(requested))
    assert found[0] == found[1]
    assert sum(found[0].values()) < 20


def test_a_folder_is_not_looked_at_all_the_time(requested, tmp_path):
    """By ranks whose store answers, which still hear of one that has lost it; such a one looks each time."""
    inquiries = _inquiries(Board("s", tmp_path, dist.HashStore()), 0, 4)
    assert not any(inquiries.asked() for _ in range(21))
    assert requested[FolderPost, "has"] == 7
    Board("s", tmp_path, None).put("ask/0")
    assert any(inquiries.asked() for _ in range(3))
    requested.clear()
    assert _inquiries(Board("s", tmp_path, None), 0, 4).asked()
    assert requested[FolderPost, "has"] == 1


@pytest.mark.parametrize("with_store", [False, True])
def test_one_gathers_and_all_hear(tmp_path, with_store):
    """4 ranks as threads: the first of them gathers, through a folder or a store alone; the next inquiry is another."""
    store = dist.HashStore() if with_store else None
    place = None if with_store else tmp_path
    received = {}

    def rank(number):
        inquiries = _inquiries(Board("s", place, store), number, 4)
        for _ in range(2):
            inquiries.speak("a test", None, lambda *result: received.update({(inquiries.number, number): result}))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(received) == [(inquiry, number) for inquiry in range(2) for number in range(4)]
    assert [key for key, (_, report) in sorted(received.items()) if report] == [(0, 0), (1, 0)]
    assert all(verdict for verdict, _ in received.values())


def test_nothing_is_left_on_the_posts(tmp_path):
    """What 3 ranks leave in two inquiries is gone when the last of them clears."""
    store = dist.HashStore()
    inquiries = [_inquiries(Board("s", tmp_path, store), rank, 3) for rank in range(3)]
    for _ in range(2):
        threads = [threading.Thread(target=one.speak, args=("a test", None, print)) for one in inquiries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in inquiries:
        one.clear(shared=one is inquiries[-1])
    assert store.num_keys() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"rank{n}.json.gz" for n in range(3)), "verdict.json"]


def test_a_folder_that_takes_nothing(tmp_path, caplog):
    """It is told of, and the ranks speak through the store."""
    (tmp_path / "file").touch()
    received = Mock()
    _inquiries(Board("s", tmp_path / "file" / "folder", dist.HashStore()), 0, 1).speak("a test", None, received)
    assert received.call_args.args[0].startswith("no rank waits")
    assert "rank0.json.gz cannot be written: " in caplog.text


def test_a_store_that_stood_still_is_asked_again(monkeypatch):
    """It owes an answer for a while: meanwhile nobody waits for it, and after that it answers as before."""
    monkeypatch.setattr(posts, "_PATIENT", 0.1)
    post = StorePost(dist.HashStore(), "s")
    post.put("word", b"1")
    goes_on = threading.Event()
    assert post._ask(goes_on.wait, None) is None
    assert not post.has("word")
    assert post.count("said") is None
    goes_on.set()
    post._asking.join()
    monkeypatch.setattr(posts, "_PATIENT", LONG)
    assert post.has("word")
    assert post.count("said") == 0


def test_recordings_of_before_are_not_of_now(tmp_path):
    """A folder has the recording of an earlier watch, an earlier inquiry, this one, and a program that ended."""
    document = _Recorder(0, 4).document

    def board(session):
        return Board(session, tmp_path, dist.HashStore())  # another store each time: what counts here is the folder

    board("old").leave(0, 0, document("before", ended=True))
    board("new").leave(1, 0, document("before"))
    board("new").leave(2, 1, document("now"))
    board("new").leave(3, 2, document("the end", ended=True))
    now = board("new")
    assert [now.recording(rank, 1) is not None for rank in range(4)] == [False, False, True, True]
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b torn")
    assert now.recording(2, 1) is None


def _left(rank, session="", inquiry=0, written=1, *, ended=False):
    about = {"rank": rank, "session": session, "inquiry": inquiry, "time_ns": written, "ended": ended}
    return recording_of({"version": "2.10", "entries": [], "rankmesh": about}, rank, f"rank{rank}")


def test_the_doctor_leaves_out_what_was_before():
    """Without a watch, from its folder: the last watch and its last inquiry count; torch's own recordings always."""
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
