"""Another user of this host, for tests of what such a user can read or prepare."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")


def runs(*command):
    """Whether a command that another user runs succeeds."""
    return subprocess.run(command, user=STRANGER, group=STRANGER, extra_groups=[], capture_output=True).returncode == 0


def sparse(path):
    """Make a file of 6 GB of nothing, which takes no room."""
    with path.open("wb") as file:
        file.truncate(6 << 30)


def give_away(folder):
    """Make another user the owner of a folder, and of all that is in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.fixture
def shared():
    """A folder that other users may enter and list, and write to as to /tmp; pytest's are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
