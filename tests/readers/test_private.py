"""Private folders: what is refused, what is read, and what another user of the host can do."""

import os
import stat
import time

import pytest
from tests import limits
from tests.strangers import as_root, give_away, runs, shared, sparse  # noqa: F401

from rankmesh.core.documents import Unreadable
from rankmesh.core.private import PrivateFolder, write_whole


@pytest.fixture
def folder(tmp_path):
    """A private folder that is open."""
    with PrivateFolder.create(tmp_path / "private") as opened:
        yield opened


def test_nobody_else_may_enter(tmp_path):
    """A folder has mode 0700 and its files 0600, whatever the umask is, which folders above it that are made have."""
    before = os.umask(0)
    try:
        with PrivateFolder.create(tmp_path / "a" / "b") as folder, PrivateFolder.create("c", folder) as inner:
            folder.write("text", b"one")
            os.close(inner.create_file("map"))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o777, "b": 0o700, "c": 0o700, "text": 0o600, "map": 0o600}


@as_root
def test_another_user_reads_nothing(shared):  # noqa: F811
    """A second user can enter the folder around a private one, and neither list nor read what is in it."""
    (shared / "public").touch(0o644)
    with PrivateFolder.create(shared / "private") as folder:
        folder.write("text", b"one")
    assert runs("cat", shared / "public")
    assert not runs("ls", shared / "private")
    assert not runs("cat", shared / "private" / "text")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda path: path.mkdir(mode=0o750), "has mode 0750"),
        (lambda path: path.symlink_to(path.parent), "is a symbolic link"),
        (lambda path: path.touch(), "is not a folder"),
        pytest.param(lambda path: path.mkdir(mode=0o700) or give_away(path), "belongs to user 65534", marks=as_root),
    ],
)
def test_what_others_may_have_prepared_is_refused(tmp_path, prepare, why):
    """A folder of another mode or owner, a link and a file are refused, to open and to create."""
    prepare(tmp_path / "place")
    for make in (PrivateFolder, PrivateFolder.create):
        with pytest.raises(Unreadable, match=why):
            make(tmp_path / "place")


def test_a_folder_that_takes_the_place_of_an_open_one(tmp_path):
    """What is written and read is in the folder that was opened and checked, not at its path."""
    with PrivateFolder.create(tmp_path / "place") as folder:
        (tmp_path / "place").rename(tmp_path / "moved")
        (tmp_path / "place").mkdir()
        folder.write("text", b"one")
        assert folder.read("text", 10) == b"one"
    assert (tmp_path / "moved" / "text").exists()
    assert not list((tmp_path / "place").iterdir())


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (os.mkfifo, "is a FIFO"),
        (lambda path: path.symlink_to("/etc/passwd"), "is a symbolic link"),
        (lambda path: path.mkdir(), "is a folder"),
        (sparse, "is larger than 1 KiB"),
        pytest.param(lambda path: path.touch() or os.chown(path, 65534, 65534), "belongs to user", marks=as_root),
        pytest.param(lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)), "is a device", marks=as_root),
    ],
)
def test_only_regular_files_of_this_user_are_read(tmp_path, folder, prepare, why):
    """A FIFO, a link, a folder, 6 GB of nothing, another user's file and /dev/zero are refused at once."""
    try:
        prepare(tmp_path / "private" / "text")
    except PermissionError:
        pytest.skip("this machine does not let root make a device")
    started = time.monotonic()
    with pytest.raises(Unreadable, match=why):
        folder.read("text", 1024)
    assert time.monotonic() - started < limits.AT_ONCE


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """A file that cannot be moved to its place leaves no draft, and what was there stays."""
    write_whole(tmp_path / "text", b"one")

    def fails(*_, **__):
        raise OSError("by the test")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="by the test"):
        write_whole(tmp_path / "text", b"two")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"one"]


def test_a_folder_goes_with_its_files(tmp_path, folder):
    """``remove`` deletes a file, a folder with files, and does nothing where there is neither."""
    with PrivateFolder.create("inner", folder) as inner:
        inner.write("text", b"one")
    folder.write("text", b"two")
    for name in ("inner", "text", "absent"):
        folder.remove(name)
    assert folder.names() == []
