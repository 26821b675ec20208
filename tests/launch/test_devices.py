"""Which devices ranks use together: one backend for all of them, whatever each of them has."""

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.launch import Launch
from rankmesh.runtime.devices import Capabilities, capabilities, choose, loopback_address, pick


def _capabilities(devices, asked=None):
    """Ranks with these devices, two on each host; None is none."""
    return [
        Capabilities(
            rank, len(devices), f"host{rank // 2}", 100 + rank, asked, None if device is None else 0, device, "no GPU"
        )
        for rank, device in enumerate(devices)
    ]


def test_a_device_for_some():
    """One rank of four without a device, or two that share one: gloo on all of them, and which rank is why."""
    assert choose(_capabilities(["a", "b", None, "b"])).backend == "gloo"
    decision = choose(_capabilities(["a", "a", "a", "b"]))
    assert (decision.backend, decision.ranks) == ("gloo", (1,))
    assert decision.why == "rank 1 on host0 has no GPU of its own: it shares one with rank 0"


def test_a_share_of_a_device(monkeypatch):
    """Where NCCL was told that ranks may share a GPU and knows how, each one's share is a device of its own."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)

    def chosen(version):
        monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)
        found = [capabilities(Launch("torchrun", rank, 4, rank, host="host"), None) for rank in range(4)]
        return choose(found).backend, [one.index for one in found]

    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert chosen((2, 30, 7)) == ("gloo", [0, 1, None, None])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert chosen((2, 30, 7)) == ("nccl", [0, 1, 0, 1])
    assert chosen((2, 28, 9)) == ("gloo", [0, 1, None, None])


def test_nccl_that_was_asked_for():
    """Ranks that cannot do what was asked for are named, and nobody goes on."""
    decision = choose(_capabilities(["a", None, "a", None], asked="nccl"))
    assert (decision.backend, decision.ranks) == (None, (1, 3))
    assert "backend 'nccl' needs a GPU for each rank; rank 1 on host0 has no GPU of its own" in decision.why
    assert choose(_capabilities(["a", "b"], asked="nccl")).backend == "nccl"
    assert choose(_capabilities([None, None], asked="gloo")).backend == "gloo"


@given(st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=8))
def test_never_nccl_on_some(devices):
    """NCCL exactly where no rank is without a device and no two of one host share one."""
    seen = [(rank // 2, device) for rank, device in enumerate(devices)]
    mine = None not in devices and len(set(seen)) == len(seen)
    assert choose(_capabilities(devices)).backend == ("nccl" if mine else "gloo")


@pytest.mark.parametrize(
    ("seen", "local", "index"), [(0, 0, None), (1, 3, 0), (1, None, 0), (8, 3, 3), (8, None, None), (2, 2, None)]
)
def test_which_device(seen, local, index):
    """The only one that a task sees, else that of the local rank; none where there are too few."""
    assert pick(seen, local)[0] == index


def test_a_host_that_listens_where_nobody_reaches_it():
    """Gloo on two hosts, one of which would listen at 127.0.1.1: nobody goes on, and the host is named."""
    capabilities = [replace(one, loopback="127.0.1.1", network="a") for one in _capabilities([None] * 2)]
    assert choose(capabilities).backend == "gloo"
    away = [replace(one, host="node-b", network="b", loopback="") for one in capabilities]
    decision = choose([*capabilities, *away])
    assert (decision.backend, decision.ranks) == (None, (0, 1))
    assert decision.why.startswith(
        "host0 listens at 127.0.1.1, where no other host can reach gloo; set GLOO_SOCKET_IFN"
    )
    assert choose([replace(one, device=str(one.rank)) for one in (capabilities[0], away[1])]).backend == "nccl"


@pytest.mark.parametrize(
    ("addresses", "address"),
    [(["127.0.1.1"], "127.0.1.1"), (["192.0.2.1", "127.0.1.1"], "127.0.1.1"), ([], "127.0.0.1"), (["0.0.0.0"], "")],  # noqa: S104
)
def test_where_gloo_would_listen(monkeypatch, addresses, address):
    """The first address of the host's name that is this host's, the loopback address where there is none."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (one, 0)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert loopback_address() == address
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert loopback_address() == ""
