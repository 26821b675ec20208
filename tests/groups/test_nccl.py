"""What rankmesh asks of NCCL where members may be lost, with stand-ins for a GPU and for torch's backend."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests import limits
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend import nccl
from rankmesh.backend.protocol import NotJoined
from rankmesh.backend.world_group import WorldGroup

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """torch's variables as a user has them."""
    for name in (HANDLING, "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_TEARDOWN_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is done after ``looks`` looks."""

    class Event:
        looks = 3

        def record(self, stream):
            assert stream == f"the stream of {DEVICE}"

        def query(self):
            Event.looks -= 1
            return Event.looks < 0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return Event


@pytest.fixture
def made(monkeypatch):
    """What was asked of torch's backend, in order."""
    asked = []

    class Backend:
        def __init__(self, store, rank, size, options):
            asked.append(("made", rank, size, os.environ[HANDLING], options._timeout > timedelta(days=1)))

        def __getattr__(self, name):
            def call(*given):
                asked.append((name, *given))
                return Work() if name == "_end_coalescing" else None

            return call

    class Work:
        def wait(self):
            asked.append(("wait",))

    Backend.Options = type("Options", (), {})
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(nccl, "check_backend", lambda backend: None)
    return asked


def _communicator(store, limit=5.0):
    return nccl.Communicator(store, 0, 2, name="weights", limit=timedelta(seconds=limit), device=DEVICE)


def test_the_watchdog_leaves_the_process_alone():
    """For as long as the process lives where a job survives, and only for groups of NCCL."""
    nccl.outlive_errors("gloo")
    assert HANDLING not in os.environ
    nccl.outlive_errors("cpu:gloo,cuda:nccl")
    assert os.environ[HANDLING] == "0"


@pytest.mark.parametrize("before", [None, "1"])
def test_other_communicators_keep_their_watchdog(monkeypatch, made, before):
    """The variable has its value again once the communicator is made; torch's own where there was none."""
    if before:
        monkeypatch.setenv(HANDLING, before)
    store = dist.HashStore()
    store.set("here/1", "")
    _communicator(store)
    assert made == [("made", 0, 2, "0", True), ("eager_connect_single_device", DEVICE)]
    assert os.environ[HANDLING] == (before or "3")


def test_a_member_that_does_not_come(made):
    """It is waited for in the store, within the limit: NCCL is not begun."""
    started = time.monotonic()
    with pytest.raises(NotJoined, match=r"not all of its members have come within 0\.3 s"):
        _communicator(dist.HashStore(), limit=0.3)
    assert time.monotonic() - started < limits.AT_ONCE
    assert made == []


def test_calls_start_together(made, gpu):
    """Sends and receives as one; they are done when the GPU is; the end aborts, and leaves no key."""
    store = dist.HashStore()
    store.set("here/1", "")
    one, made_by_nccl = _communicator(store), len(made)
    sent, came = torch.ones(1), torch.zeros(1)
    one.start([(sent, 1, True), (came, 1, False)]).wait(timedelta(seconds=limits.LONG))
    one.close()
    assert [call[0] for call in made[made_by_nccl:]] == [
        "_start_coalescing", "send", "recv", "_end_coalescing", "wait", "abort"
    ]  # fmt: skip
    assert made[made_by_nccl + 1][1:] == ([sent], 1, 0)
    assert gpu.looks == -1
    assert not store.check(["here/0"])


def test_calls_have_a_limit(made, gpu):
    """That of the wait: a GPU that waits for a lost member is not waited for."""
    gpu.looks = 10**9
    store = dist.HashStore()
    store.set("here/1", "")
    batch = _communicator(store).start([(torch.ones(1), 1, True)])
    with pytest.raises(RuntimeError, match=r"the GPU did not finish within 0\.1 s"):
        batch.wait(timedelta(seconds=0.1))


@pytest.mark.parametrize(("backend", "known"), [("nccl", True), ("nccl", False), ("cpu:gloo,cuda:nccl", True)])
def test_a_world_that_may_be_left_connects_later(monkeypatch, backend, known):
    """torch 2.15 would connect NCCL as the world is made, and wait there for a lost member: it is asked not to."""
    options, given = type("Options", (), {"lazy_init": False} if known else {}), {}
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", type("Backend", (), {"Options": options}), raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: given.update(how))
    WorldGroup(backend, None, 0, 2, timeout=timedelta(seconds=1), eager_size=1, drain=None).install()
    assert getattr(given["pg_options"], "lazy_init", None) == (True if known and backend == "nccl" else None)
