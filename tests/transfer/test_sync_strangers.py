"""Strangers to a sync: in its folder, what they can do and what is never deleted; in its store, who lacks the key."""

import os
import shutil
import stat
import threading
import time

import pytest
import torch
from tests import limits
from tests.strangers import as_root, give_away, sparse

import rankmesh as rm
from rankmesh.core.private import PrivateFolder
from rankmesh.errors import AgreementError, ConnectError, TransferError
from rankmesh.rendezvous import StoreChannel
from rankmesh.transfer.sync import direct

ONE = {"w": rm.Sharding(rm.Mesh(dp=1), (None,), (8,))}


def _sync(folder, value=0.0):
    return rm.Sync(ONE, ONE, {"w": torch.full((8,), value)}, at=str(folder), timeout=3)


def _index(folder):
    (path,) = folder.glob("*index")
    return path


def test_a_folder_is_for_one_user(tmp_path):
    """The folder that a trainer makes has mode 0700, and what is in it 0600, whatever the umask is."""
    before = os.umask(0)
    try:
        with _sync(tmp_path / "sync") as trainer:
            trainer.publish(1)
            modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "sync").iterdir()}
            assert modes == {0o600}
            assert stat.S_IMODE((tmp_path / "sync").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def _loose(folder):
    folder.mkdir(mode=0o755)


def _linked(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def _poisoned(folder):
    with _sync(folder.parent / "first", 1.0) as trainer:
        trainer.publish(1)
        shutil.copytree(folder.parent / "first", folder)
    give_away(folder)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (_loose, "which has mode 0755"),
        (_linked, "which is a symbolic link"),
        pytest.param(_poisoned, "which belongs to user 65534, and this process is of user 0", marks=as_root),
    ],
)
def test_a_folder_that_is_not_private_is_refused(tmp_path, prepare, why):
    """One that others may enter, a link, another user's with a version: both sides name the problem and the fix."""
    prepare(tmp_path / "sync")
    there = sorted((tmp_path / "sync").iterdir())
    for call in (lambda sync: sync.publish(1), lambda sync: sync.receive(wait=0)):
        with _sync(tmp_path / "sync") as sync, pytest.raises(TransferError, match=why) as caught:
            call(sync)
        assert "give a folder that does not exist yet" in str(caught.value)
        assert not sync.tensors["w"].any()
    assert sorted((tmp_path / "sync").iterdir()) == there


def test_files_that_are_not_of_a_sync_are_never_deleted(tmp_path):
    """A folder of the user's with files named as a sync's once were: refused, and every file is as it was."""
    files = {"index": "mine", "0-notes": "mine", "0-8f1c0a1b2c3d-1": "mine", "rankmesh-notes": "mine"}
    folder = tmp_path / "sync"
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        (folder / name).write_text(text)
    with _sync(folder) as trainer, pytest.raises(TransferError, match="holds 4 files that are not of a sync"):
        trainer.publish(1)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_a_trainer_that_was_killed_is_followed_by_another(tmp_path):
    """What a trainer left that did not close is deleted by the next one, whose version an engine receives."""
    _sync(tmp_path / "sync", 1.0).publish(1)
    left = set((tmp_path / "sync").iterdir())
    with _sync(tmp_path / "sync", 2.0) as trainer, _sync(tmp_path / "sync") as engine:
        trainer.publish(1)
        assert len(left & set((tmp_path / "sync").iterdir())) == 1, "the index, which is new"
        engine.receive()
        assert float(engine.tensors["w"][0]) == 2
    assert not (tmp_path / "sync").exists()


@pytest.mark.parametrize(
    ("prepare", "why"),
    [(os.mkfifo, "is a FIFO"), (sparse, "is larger than"), (lambda path: path.write_text("{"), "is not an index")],
)
def test_what_is_in_place_of_the_index_holds_nobody(tmp_path, prepare, why):
    """A FIFO, 6 GB of nothing, and half of a text in place of the index: an error at once."""
    with _sync(tmp_path / "sync") as trainer, _sync(tmp_path / "sync") as engine:
        trainer.publish(1)
        index = _index(tmp_path / "sync")
        index.unlink()
        prepare(index)
        started = time.monotonic()
        with pytest.raises(TransferError, match=why):
            engine.receive()
        assert time.monotonic() - started < limits.AT_ONCE
        trainer.publish(2)  # another index takes its place
        assert engine.receive().version == 2


def test_a_file_system_that_does_not_answer_holds_nobody(tmp_path, monkeypatch):
    """A read that never ends: an error soon after the wait, and the version once the file system answers again."""
    answers = threading.Event()
    read = PrivateFolder.read
    monkeypatch.setattr(PrivateFolder, "read", lambda *given: answers.wait(limits.LONG) and read(*given))
    with _sync(tmp_path / "sync") as trainer, _sync(tmp_path / "sync") as engine:
        trainer.publish(1)
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(ConnectError, match=r"the file system of .* does not answer"):
                engine.receive(wait=0.1)
            assert time.monotonic() - started < limits.AT_ONCE
        answers.set()
        assert engine.receive().version == 1


# -- in the store ---------------------------------------------------------------------------------------------------

KEY = "a key that is only for this test"


def test_who_lacks_the_key_of_a_job_gets_no_weights(ranks):
    """A trainer and an engine with one key, a forged request, an engine without the key: one engine is served."""
    failed, logged, received = ranks(2, _strangers, world=None)[0]
    assert (failed, received) == ({}, 1)
    assert len([line for line in logged if "was not written with the job key; set RANKMESH_JOB_KEY" in line]) == 1
    assert ranks(2, _another_key, world=None)[1].startswith("'go/")


def _strangers(me):
    os.environ["RANKMESH_JOB_KEY"] = KEY
    lines, channel = [], StoreChannel(me.store, direct.PREFIX)
    direct._log.addFilter(lambda record: lines.append(record.getMessage()))
    if me.rank == 0:
        with rm.Sync(ONE, ONE, {"w": torch.ones(8)}, at=me.store, timeout=20) as trainer:
            channel.post("engines", 0, "stranger")
            channel.write("request/stranger", '{"number": 0, "version": null, "run": "", "group": "", "digest": ""}')
            me.meet("asked")
            failed = dict(trainer.publish(1).failed)
            groups = list(trainer._publisher._groups)
            me.meet("over")
        assert len(groups) == 1
        assert not channel.wait("go/stranger/0", 0)
        return failed, lines, int(me.store.get("received"))
    with rm.Sync(ONE, ONE, {"w": torch.zeros(8)}, at=me.store, timeout=20) as engine:
        me.meet("asked")
        me.store.set("received", str(engine.receive().version))
        me.meet("over")
    return None


def _another_key(me):
    sync = rm.Sync(ONE, ONE, {"w": torch.ones(8)}, at=me.store, timeout=20)
    os.environ["RANKMESH_JOB_KEY"] = KEY if me.rank else KEY[::-1]
    if me.rank == 0:
        forged = sync._publishes(sync._begin("trainer"))
        forged.put(f"go/{me.store.get('engine').decode()}/0", "{}")
        me.meet("over")
        return None
    assert sync.receive(wait=0) is None
    me.store.set("engine", sync._receiver.side.id)
    error = me.error(AgreementError, sync.receive)["message"]
    me.meet("over")
    return error
