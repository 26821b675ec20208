"""Groups across two hosts: every one proved, and a host that dies or never arrives is named."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.multihost.resolver import ADDRESS

from rankmesh.launch.table import torchrun_variables

HERE = Path(__file__).parent
TIMEOUT = 15
pytestmark = pytest.mark.skipif(not os.environ.get("RANKMESH_CLUSTER"), reason="hosts are emulated: make test-cluster")


def _end(process, limit=150):
    """Status, output and errors of a command, which must end; eight ranks that import torch at once take a minute."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{process.args[-3:]} was not done after {limit} s: {process.communicate()}")
    return process.returncode, out, err


def _await_line(process, token, number):
    """Read its errors until so many lines have the word."""
    seen = []
    while sum(token in line for line in seen) < number:
        line = process.stderr.readline()
        assert line, f"ended early: {''.join(seen)}"
        seen.append(line)


def _errors(text):
    """The command's own error lines, without what torch says."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.fixture
def resolver(hosts):
    """A name server of the first host, whose addresses are all unknown to it."""
    host = hosts[0]
    (host.files / "resolv.conf").write_text(f"nameserver {ADDRESS}\n", encoding="utf-8")
    process = host.start(HERE / "resolver.py")
    assert process.stdout.readline() == "listens\n"
    return process


def _asked(resolver):
    """Stop a name server; the times at which it was asked."""
    resolver.kill()
    return [float(line) for line in resolver.communicate(timeout=10)[0].splitlines()]


def test_every_group_across_two_hosts_is_verified(torchrun):
    """8 ranks, 4 on each host, tp=2,dp=2,pp=2: each group is proved on each member; only rank 0 speaks."""
    first, second = torchrun(4, "-m", "rankmesh", "check", "tp=2,dp=2,pp=2", "--json", "--timeout", "20")
    status, out, err = _end(first)
    assert status == 0, err
    result = json.loads(out)
    assert (result["ok"], result["world_size"], result["failures"]) == (True, 8, [])
    assert {kind["name"]: (kind["proved"], kind["ranks"]) for kind in result["kinds"]} == {
        kind["name"]: (kind["groups"], kind["expected"]) for kind in result["kinds"]
    }
    assert {"tp", "dp", "pp"} <= {kind["name"] for kind in result["kinds"]}
    assert _end(second)[:2] == (0, "")


@pytest.mark.parametrize(
    ("killed", "message"),
    [
        (1, ["error: lost ranks 2, 3: the first does not answer"]),
        (0, ["error: rank 2: no response from rank 0", "error: rank 3: no response from rank 0"]),
    ],
)
def test_a_host_that_dies_is_named_by_the_other(hosts, torchrun, killed, message):
    """4 ranks, 2 on each host; one host is killed amid collectives: the other says who is lost, within the timeout."""
    commands = torchrun(2, HERE / "endless.py", "dp=2,pp=2", "--timeout", TIMEOUT)
    for command in commands:
        _await_line(command, "is proving", 2)
    started = time.monotonic()
    hosts[killed].kill()
    status, out, err = _end(commands[1 - killed])
    assert time.monotonic() - started < TIMEOUT + 25
    assert status != 0
    output = _errors(err)
    assert len(output) == len(message)
    assert all(any(line.startswith(token) for token in message) for line in output), output
    assert f"{os.sep}rankmesh{os.sep}" not in err
    assert "every group was proved" not in out
    # With the first host torchrun too has lost its store, and ends with an error of its own.
    assert killed == 0 or re.search(r"exitcode +: 5", err), err


def test_ranks_that_never_arrive_are_named(hosts, resolver):
    """4 ranks, 2 on each host; those of one never connect: the others name them after 3 s, and ask for no name then."""
    rendezvous = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": "29500"}
    here = hosts[0].start(HERE / "two_ranks.py", "meet", 0, **rendezvous)
    hosts[1].start(HERE / "two_ranks.py", "sleep", 2, **rendezvous)
    status, out, err = _end(here)
    assert status == 0, err
    answer = [json.loads(line) for line in out.splitlines()]
    assert sorted(one["rank"] for one in answer) == [0, 1]
    for one in answer:
        assert one["missing"] == [2, 3]
        assert "ranks 2, 3" in one["message"]
        assert one["ended"] - one["began"] > 2.5
    requested = _asked(resolver)
    assert requested, "torch asks as the ranks join the world"
    joined, ended = (pick(one[when] for one in answer) for pick, when in ((max, "began"), (min, "ended")))
    assert not [at for at in requested if joined + 1 < at < ended + 1]


def test_a_loss_waits_for_no_name_server(hosts, resolver):
    """3 ranks of a job that survives, one of which is killed; from then on a name server gives no answer, for 5 s each.

    Torch asks it for the names of both ends of each connection to a store: the ranks have connections by then.
    """
    slow, commands = 5.0, []
    for rank in range(3):
        variables = torchrun_variables(rank, 3, local_rank=rank, local_world_size=3, port=29500)
        variables |= {"RES_OPTIONS": f"timeout:{slow:g} attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        commands.append(hosts[0].start(HERE / "rank.py", **variables))
    _await_line(commands[2], "three steps", 1)
    time.sleep(2)
    resolver.send_signal(signal.SIGUSR1)
    commands[1].kill()
    ended = [json.loads(_end(commands[rank])[1]) for rank in (0, 2)]
    assert [(one.get("epoch"), one.get("dp")) for one in ended] == [(1, 2)] * 2, ended
    assert all(one["seconds"]["agree"] + one["seconds"]["connect"] < slow for one in ended), ended
    assert _asked(resolver), "torch asks as connections are made"


def test_a_check_asks_no_name_server(hosts, resolver):
    """`rankmesh check` starts ranks on one machine: it asks no name server, which may take seconds not to answer."""
    status, out, err = _end(hosts[0].start("-m", "rankmesh", "check", "tp=2,dp=2"))
    assert status == 0, err
    assert "every group was proved" in out
    assert "hostname" not in err
    assert _asked(resolver) == []


def test_gloo_takes_the_interface_that_is_named(hosts):
    """4 ranks on hosts whose own names resolve to nothing: GLOO_SOCKET_IFNAME leads every group across."""
    rendezvous = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    commands = [
        host.start(HERE / "two_ranks.py", "prove", first, name="elsewhere", **rendezvous)
        for host, first in zip(hosts, (0, 2), strict=True)
    ]
    answer = [json.loads(line) for command in commands for line in _end(command)[1].splitlines()]
    assert sorted(one["rank"] for one in answer) == [0, 1, 2, 3]
    assert all(one["proved"] == ["dp", "pp"] for one in answer)


def _join(hosts, timeout, **environment):
    """What came of `rm.init` on one rank of each host."""
    rendezvous = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": "29500", "WORLD_SIZE": "2", **environment}
    commands = [host.start(HERE / "rank.py", timeout, RANK=str(rank), **rendezvous) for rank, host in enumerate(hosts)]
    return [json.loads(_end(command, limit=timeout + 150)[1]) for command in commands]


@pytest.mark.parametrize("named", ["ab", "b"])
def test_hosts_whose_names_are_loopback_addresses(hosts, named):
    """The own names of 2 hosts, or of one, are 127.0.1.1, as on Debian: refused; what the message says to set works."""
    for host in hosts:
        addresses = {other.name: other.address for other in hosts}
        if host.name[-1] in named:
            addresses[host.name] = "127.0.1.1"
        table = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (host.files / "hosts").write_text(f"127.0.0.1 localhost\n{table}", encoding="utf-8")
    those = ", ".join(f"host{token} listens at 127.0.1.1" for token in named)
    for answer in _join(hosts, TIMEOUT):
        assert f"{those}, where no other host can reach gloo" in answer["message"], answer
        assert answer["message"].count("listens") == len(named)
        assert "set GLOO_SOCKET_IFNAME to the network interface between the hosts" in answer["message"]
        assert answer["seconds"] < TIMEOUT
    assert [answer["sum"] for answer in _join(hosts, TIMEOUT, GLOO_SOCKET_IFNAME="eth0")] == [2.0, 2.0]
