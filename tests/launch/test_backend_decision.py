"""Ranks decide on a backend, here threads of one process over a store: who differs, comes twice, or is missing."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from tests import limits
from torch.distributed import HashStore, TCPStore

from rankmesh import AgreementError, ConnectError
from rankmesh.launch.started import Launch
from rankmesh.rendezvous import Outcome
from rankmesh.rendezvous.channel import LARGEST_LIST
from rankmesh.rendezvous.stores import _BLOCK
from rankmesh.runtime.devices import Capabilities, decide
from rankmesh.runtime.served_store import open_store


def _capability(rank, size=3, **more):
    return replace(Capabilities(rank, size, f"host{rank}", 100 + rank, None, 0, "gpu", ""), **more)


def _all(capabilities, seconds=20.0):
    """What each rank got, its choice or its error, and how many keys were left."""
    store = HashStore()

    def one(local):
        try:
            decision, among = decide(store, "muster", local, seconds, serves=local.rank == 0)
            among.leave(Outcome())
            return decision
        except (ConnectError, AgreementError) as error:
            return error

    with ThreadPoolExecutor(len(capabilities)) as threads:
        return list(threads.map(one, capabilities)), store.num_keys()


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_all_have_come(size):
    """Every rank has the same choice, and one key is left in the store."""
    choices, left = _all([_capability(rank, size) for rank in range(size)])
    assert {decision.backend for decision in choices} == {"nccl"}
    assert left == 1, "the number of the next epoch"


@pytest.mark.long
def test_a_large_world_decides():
    """131,072 ranks with more than 260 bytes each, of which the last arrives here: it decides for all."""
    size = 131_072
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    step, others = "muster/init/0/capabilities", range(size - 1)
    one = asdict(_capability(0, size, device=f"GPU-{'0' * 100}")) | {"host": "hostRANK", "rank": "RANK"}
    line = f"RANK {json.dumps(one)}\n".replace('"RANK"', "RANK")
    for start in range(0, size - 1, 10_000):
        some = (line.replace("RANK", str(rank)) for rank in others[start : start + 10_000])
        store.append(f"{step}/texts", "".join(some))
    for start in range(0, size, _BLOCK):
        store.add(f"{step}/arrived/{start // _BLOCK}", sum(4**place for place in range(len(others[start:][:_BLOCK]))))
    store.add(f"{step}/arrived/blocks", size // _BLOCK)
    assert len(store.get(f"{step}/texts")) > 260 * size > LARGEST_LIST
    decision, _ = decide(store, "muster", _capability(size - 1, size), 20, serves=False)
    assert decision.backend == "nccl"


@pytest.mark.parametrize(
    ("odd", "message", "ranks"),
    [
        (_capability(1, host="host2", process=102), "two processes claim rank 1: process", (1,)),
        (_capability(2, size=4), "host2 a world of 4 ranks; they must say the same", (2,)),
        (_capability(2, asked="gloo"), "host2 backend gloo; they must say the same", (2,)),
    ],
)
def test_a_rank_that_differs(odd, message, ranks):
    """Three ranks, one of which says something else: the same error on all of them, naming it."""
    errors, _ = _all([_capability(0), _capability(1), odd])
    for error in errors:
        assert isinstance(error, ConnectError), errors
        assert message in str(error)
        assert error.ranks == ranks


def test_ranks_that_do_not_come():
    """Two ranks of four: both say which are missing, at the timeout."""
    started = time.monotonic()
    errors, _ = _all([_capability(0, 4), _capability(2, 4)], seconds=0.3)
    assert time.monotonic() - started < limits.AT_ONCE
    for error in errors:
        assert isinstance(error, AgreementError)
        assert error.missing == (1, 3)
        assert "waited 0.3 s for ranks 1, 3, which did not call init() (2 of 4 did)" in str(error)


def test_a_store_that_accepts_and_says_nothing():
    """A meeting place whose process is stopped: an error soon after the timeout, where torch's client tries on."""
    with socket.socket() as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        unresponsive.listen()
        launch = Launch("environment", 1, 2, address="127.0.0.1", port=unresponsive.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(ConnectError) as error:
            open_store(launch, timedelta(seconds=0.5))
    assert time.monotonic() - started < limits.AT_ONCE
    assert error.value.missing == (0,)


def test_one_local_rank_of_two_ranks_is_noted():
    """Ranks of a host with one local rank decide on a backend, and all get a note that names both."""
    two = [_capability(rank, 2, host="node7", device=None, local_rank=1, local_size=2) for rank in (0, 1)]
    notes = [each.note for each in _all(two)[0]]
    assert notes[0].startswith("ranks 0 and 1 on node7 have one local rank each, so they would share a GPU; give each")
    assert notes[0] == notes[1]
    assert _all([replace(each, local_rank=each.rank) for each in two])[0][0].note == ""
    assert _all([replace(each, visible=f"GPU-{each.rank}") for each in two])[0][0].note == ""
