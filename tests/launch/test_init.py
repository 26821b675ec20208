"""rm.init: from a launcher's variables to a world and back, on real processes, and what is said when it fails."""

import gc
import os
import runpy
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.sockets import free_port, kept
from torch.distributed import TCPStore

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.rendezvous import Round
from rankmesh.runtime import devices


def _settled(before):
    """How many sockets and threads there are more than before, once those that end in the background have."""
    limits.until(lambda: kept() == before, 10)
    return [now - then for now, then in zip(kept(), before, strict=True)]


def _there_and_back(me, port):
    me.launched(port)
    time.sleep(0.2)
    before, had, seen = dict(os.environ), kept(), []
    for _ in range(3):
        with rm.init(timeout=20) as rank, rm.connect("tp=2,dp=*") as groups:
            x = torch.ones(1, device=rank.device)
            dist.all_reduce(x, group=groups["dp"].pg)
            seen.append([rank.rank, rank.world_size, rank.local_rank, rank.launcher, rank.backend, x.item()])
        seen[-1].append(dist.is_initialized())
    rank.close()
    # gloo's switch stays: a variable that is removed moves the others under threads that read them.
    assert dict(os.environ) == {"GLOO_ENABLE_STORE_V2_API": "1", **before}
    del groups  # closed, it still knows its world, and that its store
    gc.collect()
    left = _settled(had)
    me.meet("all have counted")
    return seen, left, registries()["pg_map"]


def test_three_worlds_one_after_the_other(ranks):
    """4 ranks: each world is joined and left three times; no variable, group, socket or thread is left of any.

    The one variable that stays says what gloo does without it.
    """
    for rank, (seen, left, groups) in enumerate(ranks(4, _there_and_back, free_port(), world=None)):
        assert seen == [[rank, 4, rank, "environment", "gloo", 2.0, False]] * 3
        assert (left, groups) == ([0, 0], 0)


def _of_an_agent(me, port):
    me.launched(port)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="job")
    with rm.init(timeout=20) as rank, rm.connect("tp=2,dp=*") as groups:
        x = torch.ones(1)
        dist.all_reduce(x, group=groups["dp"].pg)
        result = [rank.launcher, x.item()]
    return result, [rm.check(rm.read(plan), timeout=10).ok for plan in ("tp=2,dp=2", "tp=4")]


@pytest.mark.long
def test_one_command_after_the_other_under_one_agent(ranks):
    """4 ranks, twice: processes that follow each other, as in a shell that torchrun starts, share its store."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        assert ranks(4, _of_an_agent, agent.port, world=None) == [[["torchrun", 2.0], [True, True]]] * 4


def _again(me, port):
    me.launched(port)
    return [rm.check(rm.read("tp=2"), timeout=20).ok for _ in range(3)]


def test_checks_one_after_the_other(ranks):
    """2 ranks, three checks in a process, each with a store of its own: none is taken for the one before."""
    assert ranks(2, _again, free_port(), world=None) == [[True] * 3] * 2


def _in_a_world(me):
    if me.rank == 1:
        # Nobody's numbers: what is initialised counts.
        os.environ.update(RANK="7", WORLD_SIZE="2")
    with rm.init() as rank:
        result = [rank.rank, rank.world_size, rank.backend]
    return result, dist.is_initialized()


def test_a_world_that_is_there_stays(ranks):
    """3 ranks with an initialised world: it is taken as it is, and still there afterwards."""
    assert ranks(3, _in_a_world) == [[[rank, 3, "gloo"], True] for rank in range(3)]


def _loses_the_first(me, port):
    me.launched(port)

    def dies(self, _):
        """Rank 0 has named its process, which the others see first, and is killed when they have named theirs."""
        self.channel.first(self.identity_key(0), self.identity)
        me.meet("rank 0 is there")
        limits.until(lambda: self.seen(1) and self.seen(2))
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == 0:
        Round._arrive = dies
    else:
        me.meet("rank 0 is there")
    error = me.error(rm.ConnectError, rm.init, timeout=limits.LONG)
    return error["message"], error["missing"], error["seconds"], error["rank"]


def test_the_rank_that_serves_the_store_dies(outcomes):
    """3 ranks that come together when rank 0 is killed: the others name it and its place at once."""
    port = free_port()
    first, *others = outcomes(3, _loses_the_first, port, world=None)
    assert first.code == -signal.SIGKILL
    for one in others:
        message, missing, seconds, rank = one.value
        assert f"rank {rank} of 3: rank 0 is gone, which served the store of the job at 127.0.0.1:{port}" in message
        assert missing == [0]
        assert seconds < limits.AT_ONCE


def _forks(me, port):
    """Children of rank 0 and 1 use what they have from their parent: one asks for more, the other leaves."""
    me.launched(port)
    codes, total = [], torch.ones(1)
    with rm.init(timeout=20) as live, rm.connect("tp=2", timeout=20) as groups:
        me.meet("all have joined")
        for way in (_is_refused, _leaves):
            child = os.fork()
            if child == 0:
                os._exit(way(me, live, groups))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        dist.all_reduce(total, group=groups["tp"].pg)
        with rm.connect("dp=2", timeout=20) as others:
            dist.all_reduce(total, group=others["dp"].pg)
    return codes, total.item()


def _is_refused(me, _, groups):
    calls = [rm.init, rm.discover, groups.measure, groups.warm_up, groups.report, lambda: rm.connect("tp=2")]
    messages = [me.error(rm.ConnectError, call)["message"] for call in calls]
    return 7 if all("was forked by process" in message for message in messages) else 9


def _leaves(_, live, groups):
    groups.close()
    live.close()
    live.close()
    return 7


def test_a_forked_child_is_refused_or_forgets(ranks):
    """2 ranks that fork: their children get errors or leave the world, and the parents go on as before."""
    assert ranks(2, _forks, free_port(), world=None) == [[[7, 7], 4.0]] * 2


def _on_no_interface(me, port, odd):
    """Initialise where one rank has a network interface that is not there; who serves the store ends at once."""
    me.launched(port)
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0" if me.rank == odd else "lo"
    error = me.error(rm.ConnectError, rm.init, timeout=limits.LONG)
    named = list(error["ranks"] if "ranks" in error else [error["rank"]]) == [odd] and "=nowhere0" in error["message"]
    os.write(1, error["message"].encode())
    os._exit(0 if named and error["seconds"] < limits.AT_ONCE and not dist.is_initialized() else 9)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_cannot_make_the_world_is_named_on_all(outcomes, odd):
    """3 ranks, one has a wrong GLOO_SOCKET_IFNAME: all name it and the variable, long before their limit."""
    ended = outcomes(3, _on_no_interface, free_port(), odd, world=None)
    assert [one.code for one in ended] == [0] * 3, ended


# -- one rank ----------------------------------------------------------------------------------------------------------


def _nowhere(_, variables):
    os.environ.update({"RANK": "1", "WORLD_SIZE": "2", **variables})
    started = time.monotonic()
    try:
        rm.init(timeout=1)
    except rm.ConnectError as error:
        return str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "no store could be reached at 127.0.0.1:1 (Connection refused)",
        ),
        ({}, "MASTER_ADDR is not set in a job of 2 ranks (launcher: environment)"),
    ],
)
def test_no_rendezvous_address(ranks, variables, expected):
    """1 rank of 2 whose meeting place does not resolve, does not answer, or is not told: said at once, in one line."""
    ((message, seconds),) = ranks(1, _nowhere, variables, world=None)
    assert expected in message
    assert seconds < limits.AT_ONCE


def _on_another_host(me, port):
    """Initialise where this rank's host name stands for 127.0.1.1, as on Debian, and each rank has its own network."""
    devices.loopback_address, devices._network = lambda: "127.0.1.1", lambda: f"network {me.rank}"
    me.launched(port)
    return me.error(rm.ConnectError, rm.init, "gloo", timeout=20)


def test_hosts_that_listen_at_a_loopback_address_are_named(ranks):
    """2 ranks on two hosts: told at once which host listens where, with what to set."""
    for error in ranks(2, _on_another_host, free_port(), world=None):
        assert "listens at 127.0.1.1" in error["message"]
        assert "set GLOO_SOCKET_IFNAME" in error["message"]
        assert error["seconds"] < limits.AT_ONCE


def _without_launcher(_):
    """What is said of plans of several ranks, and the size of a group of a plan of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.argv, messages = ["/work/job.py"], []
    with rm.init() as me:
        for plan in ("tp=2,dp=2,pp=2", "tp=2,dp=*", rm.Mesh(tp=8, dp=4), {"a": "dp=2", "b": rm.read("dp=6")}):
            with pytest.raises(rm.ConnectError) as refused:
                rm.connect(plan)
            messages.append(str(refused.value).partition("start them all: ")[2])
        with rm.connect("tp=1,dp=*") as groups:
            seen = [me.rank, me.world_size, me.launcher, groups["dp"].size]
    return messages, seen, dist.is_initialized()


def test_a_job_that_is_started_alone_says_how_to_start_it(ranks):
    """Plain python is a world of one; a plan of several ranks names torchrun with their number, one of one connects."""
    ((messages, seen, is_left),) = ranks(1, _without_launcher, world=None)
    assert (seen, is_left) == ([0, 1, "none", 1], False)
    assert messages == [
        "torchrun --nproc-per-node 8 job.py",
        "torchrun --nproc-per-node 2 job.py",
        "torchrun --nnodes 4 --nproc-per-node 8 job.py",
        "torchrun --nproc-per-node 6 job.py",
    ]


@pytest.mark.parametrize(
    "program", ["import rankmesh as rm\nrm.init()\n", "def main():\n    rm.init()\nimport rankmesh as rm\nmain()\n"]
)
def test_a_worker_that_imports_the_main_module_again_is_not_a_rank(tmp_path, program):
    """What multiprocessing's spawn does without ``if __name__ == "__main__"``: the error has the file and the fix."""
    (tmp_path / "train.py").write_text(f"import rankmesh as rm\n{program}")
    with pytest.raises(rm.ConnectError) as refused:
        runpy.run_path(str(tmp_path / "train.py"), run_name="__mp_main__")
    assert f"imports {tmp_path}/train.py again" in str(refused.value)
    assert 'below `if __name__ == "__main__":`' in str(refused.value)
