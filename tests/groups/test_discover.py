import os
import warnings

import pytest
import torch.distributed as dist
from tests.counting import Counting

import rankmesh as rm
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.rendezvous import StoreChannel
from rankmesh.runtime import World
from rankmesh.runtime.discover import witness
from rankmesh.sim import run


def _hosts(rank):
    """What srun would say on two hosts, named so that string order is wrong, dealt in turn."""
    return {"SLURMD_NODENAME": f"node{(9, 10)[rank % 2]}", "LOCAL_RANK": str(rank // 2)}


def _found(me):
    os.environ.update(_hosts(me.rank))
    dist.barrier()
    World.current()  # which warns where torch's public API is tested
    before = me.store.num_keys()
    dist.barrier()
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        found = [rm.discover(), rm.discover()]
    dist.barrier()
    return found[0].to_dict(), found[0] == found[1], me.store.num_keys() - before, len(result)


def test_ranks_find_their_cluster(ranks):
    """4 processes on what call themselves two hosts: one cluster on every rank, natural order, one key left."""
    outcomes = ranks(4, _found)
    assert all(tuple(outcome[:3]) == (outcomes[0][0], True, 1) for outcome in outcomes), outcomes
    assert [host["name"] for host in outcomes[0][0]["hosts"]] == ["node9", "node10"]
    assert outcomes[0][0]["rank_map"] == [0, 2, 1, 3]
    assert [outcome[3] for outcome in outcomes] == [2, 0, 0, 0]


def test_store_operations_do_not_grow(monkeypatch):
    """8 and 31 simulated ranks: six store operations each, a fixed number more for three of them."""
    real = StoreChannel.__init__

    def counted(self, store, prefix=None):
        stores.append(Counting(store))
        real(self, stores[-1], prefix)

    monkeypatch.setattr(StoreChannel, "__init__", counted)
    more = set()
    for size in (8, 31):
        stores: list[Counting] = []
        run(rm.discover, size, timeout=60)
        calls = sorted(store.calls.total() for store in stores)
        assert calls[: size - 3] == [6] * (size - 3)
        more.add(sum(calls) - 6 * size)
    assert len(more) == 1
    assert more.pop() < 20


def test_outside_of_a_world():
    """Without an initialised world there is nobody to ask."""
    with pytest.raises(ConnectError, match="init"):
        rm.discover()


def _missing(me):
    if me.rank == 3:
        return None
    return me.error(AgreementError, rm.discover, timeout=5.0)["message"]


def test_a_rank_that_does_not_come(ranks):
    """4 processes, one of which never asks: the others name it."""
    result = [message for message in ranks(4, _missing) if message]
    assert len(result) == 3
    assert all("for rank 3, which did not call discover() (3 of 4 did)" in message for message in result)


def test_what_slurm_says_of_the_network():
    """The address of a host in Slurm's tree, without the host; an address that does not fit its pattern is none."""
    address = {"SLURM_TOPOLOGY_ADDR": "spine.leaf1.node1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert witness(0, address).switches == ("spine", "leaf1")
    assert witness(0, {**address, "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}).switches == ()
    assert witness(5, {"SLURM_LOCALID": "1"}).slot == 1
