"""Files from anybody: whatever they hold, a reader answers with a value or an error of ours, soon and in little memory.

Each is read by every reader that could take it: 60 files by themselves, 1,500 with ``make test-sweeps``, 20,000 with
``make test-sweeps SWEEP=all``.
"""

import os
import resource
import time

import pytest
from tests.readers import hostile

import rankmesh as rm
from rankmesh.cli.look.explore import explored
from rankmesh.core import documents
from rankmesh.core.documents import DOCUMENT, Unreadable, open_regular, read_bytes
from rankmesh.core.nccl_config import with_nccl_config
from rankmesh.debug.doctor.reader import document
from rankmesh.debug.doctor.recording import recording_of
from rankmesh.errors import RankmeshError
from rankmesh.placement import Traffic
from rankmesh.readers import source
from rankmesh.readers.model import read_model
from rankmesh.transfer.files import Checkpoint
from rankmesh.transfer.planning.tensors_file import read_tensors

COUNT = {"": 60, "1": 1_500, "all": 20_000}[os.environ.get("RANKMESH_TEST_SWEEP", "")]
SECONDS, MEMORY = 2.0, 200 << 20
MESH = rm.Mesh(tp=2, dp=2)

READERS = {
    "spec": lambda path: source.read(path, world_size=16),
    "variables": lambda path: source.read(path, variables={"ARGS": "--a", "TP": "4"}),
    "model": lambda path: read_model(str(path)),
    "cluster": lambda path: rm.Cluster.read(path),
    "traffic": lambda path: Traffic.read(path),
    "tensors": lambda path: read_tensors(path, MESH, MESH),
    "plan": lambda path: rm.Plan.from_json(path.read_bytes().decode("utf-8", "replace")),
    "nccl": lambda path: with_nccl_config(rm.recipes.axes(MESH), path),
    "measured": lambda path: explored("tp=2,dp=2", measured=path),
    "recording": lambda path: recording_of(document(path), 3, path.name),
    "checkpoint": lambda path: Checkpoint.open(path.parent),
}
# The readers that a file of this name is meant for; all others get it now and then.
MEANT = {
    "sh": ("spec", "variables", "model"), "toml": ("spec",), "conf": ("cluster",), "safetensors": ("checkpoint",),
    "metadata": ("checkpoint",), "yaml": ("spec", "model", "cluster", "traffic", "tensors", "nccl"),
    "json": ("spec", "model", "cluster", "traffic", "tensors", "plan", "measured", "recording", "checkpoint"),
}  # fmt: skip


def _problem(reader, path):
    """What is wrong with a reader's answer to a file, nothing where it is a value or an error of ours."""
    began = time.process_time()
    try:
        READERS[reader](path)
    except RankmeshError as error:
        if len(str(error)) > 4000:
            return f"{reader}: a message of {len(str(error))} characters"
        str(error).encode()
    except Exception as error:  # noqa: BLE001  - what this test looks for
        return f"{reader}: {type(error).__name__}: {str(error)[:200]}"
    took = time.process_time() - began
    return f"{reader}: {took:.1f} s" if took > SECONDS else None


def test_hostile_files(tmp_path):
    """Only values and errors of ours, each within two seconds of work, all within 200 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = []
    for number, (name, data) in enumerate(hostile.inputs(COUNT)):
        folder = tmp_path / str(number % 50)
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_bytes(data)
        readers = MEANT[name.rpartition(".")[2]] if number % 10 else READERS
        problems += [(number, name, data[:200], what) for reader in readers if (what := _problem(reader, path))]
        path.unlink()
    assert problems == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize("reader", [name for name in READERS if name not in ("plan", "checkpoint")])
def test_only_regular_files_are_opened(tmp_path, kind, reader):
    """A FIFO, a folder and a link to a device are refused by every reader at once, as what they are."""
    path = tmp_path / "file.yaml"
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(RankmeshError, match=f"is a {kind.replace('fifo', 'FIFO')}, and only regular files are read"):
        READERS[reader](path)


@pytest.mark.parametrize("path", ["a\0b.yaml", "a\ud800b.yaml", "x" * 5000 + ".yaml"])
@pytest.mark.parametrize("reader", ["spec", "model", "cluster", "traffic", "tensors"])
def test_paths_that_no_file_has(reader, path):
    """A NUL, half of a surrogate pair and a name that is too long are errors of ours."""
    with pytest.raises(RankmeshError):
        READERS[reader](path)


def test_files_have_a_size(tmp_path):
    """A file beyond the limit is refused without being read to its end."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unreadable, match="is larger than 4 MiB"):
        read_bytes(path, DOCUMENT.size)
    with open_regular(path) as file:
        assert file.read(1) == b"\0"


def test_a_file_of_the_kernel_that_has_nothing_to_read_is_refused(monkeypatch):
    """Python returns None for it, as for /proc/kmsg, which a folder of recordings may have a link to."""
    ends = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(documents, "opened", lambda *_: ends[0])
    with pytest.raises(documents.Unreadable, match="nothing to read now"):
        documents.read_text("kmsg")
    os.close(ends[1])
