"""Run by ``test_exit``: processes that end while threads of ours are at work, several in each state; writes statuses.

Each is forked off one that has loaded torch, and ends as Python does: its threads, its exit handlers, its modules.
"""

import gc
import json
import os
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.sockets import free_port
from torch.distributed import HashStore, TCPStore

import rankmesh as rm
import rankmesh.debug.watch.watch  # loaded once, before the forks
from rankmesh.debug.watch import start
from rankmesh.errors import RankmeshError
from rankmesh.launch.table import torchrun_variables
from rankmesh.rendezvous import Outcome, Proposal, Round, StoreChannel, WaitPolicy
from rankmesh.rendezvous.waiting import submit
from rankmesh.runtime.served_store import open_at

_OPEN = []  # what a process holds until its end


@contextmanager
def _interrupted(seconds=0.05):
    """Inside, the main thread is interrupted as by Ctrl+C; whatever that leaves, the process goes on to its end."""

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with suppress(KeyboardInterrupt, RankmeshError):
        yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _served():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def a_call_under_way(number):
    """A call of a store returns about when the process ends."""
    store = _served()
    _OPEN.append(submit(lambda: store.wait(["never"], timedelta(milliseconds=1 + number)), "rankmesh-test"))


def a_round_that_is_left(_):
    """The other participant never arrives."""
    among = Round(StoreChannel(_served(), "test"), "left", range(2), 0, serves=True, epoch=0)
    with _interrupted():
        among.step("one", Proposal(), lambda _: Outcome(), WaitPolicy(60))


def a_store_that_never_answers(_):
    """What listens at the address accepts, and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    _OPEN.append(listening)
    with _interrupted():
        open_at("127.0.0.1", listening.getsockname()[1], timedelta(seconds=1), serves=False)


def _sync(at, timeout):
    whole = {"w": rm.Sharding(rm.Mesh(tp=1), None, (1 << 16,))}
    return rm.Sync(whole, whole, {"w": torch.zeros(1 << 16)}, at=at, timeout=timeout)


def a_version_that_is_not_received(_):
    """An engine asks, and does not take what the trainer sends."""
    store = HashStore()
    trainer, engine = _sync(store, 1.0), _sync(store, 1.0)
    _OPEN.extend([trainer, engine])
    engine.receive(wait=0)
    with _interrupted(0.2):
        trainer.publish(1)


def a_version_that_is_not_published(_):
    """An engine looks into a folder without a trainer."""
    engine = _sync(f"{tempfile.gettempdir()}/rankmesh-no-trainer-{os.getpid()}", 60.0)
    _OPEN.append(engine)
    with _interrupted():
        engine.receive()


def _world():
    dist.init_process_group("gloo", store=_served(), rank=0, world_size=1)


def a_watch(_):
    """Nobody closes it."""
    _world()
    _OPEN.append(start(tempfile.mkdtemp(), timeout=60))


def a_watch_that_records(_):
    """It is asked for a recording just before the end."""
    a_watch(_)
    _OPEN[-1]._started.wait()  # before that the signal would end the process
    os.kill(os.getpid(), signal.SIGUSR1)


def groups_that_are_not_closed(_):
    """A plan is connected, and its groups are used."""
    _world()
    groups = rm.connect("tp=1")
    dist.all_reduce(torch.ones(1), group=groups["tp"].pg)
    _OPEN.append(groups)


def a_forked_child(_):
    """Each of 2 ranks forks a child that ends with what it has from its parent, whose world goes on."""
    port, first = free_port(), os.fork()
    rank = int(first == 0)
    os.environ |= torchrun_variables(rank, 2, local_rank=rank, local_world_size=2, port=port)
    live = rm.init(timeout=60)
    groups = rm.connect("tp=2", timeout=60)
    _OPEN.extend([live, groups])
    child = os.fork()
    if child == 0:
        return
    total = torch.ones(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(total, group=groups["tp"].pg)
    assert total.item() == 2
    groups.close()
    live.close()
    assert rank or os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 7


STATES = (
    a_call_under_way,
    a_round_that_is_left,
    a_store_that_never_answers,
    a_version_that_is_not_received,
    a_version_that_is_not_published,
    a_watch,
    a_watch_that_records,
    groups_that_are_not_closed,
    a_forked_child,
)

if __name__ == "__main__":
    started = []
    gc.freeze()  # what is loaded is not looked through at each end
    for state in STATES:
        for number in range(int(sys.argv[1])):
            pid = os.fork()
            if pid == 0:
                state(number)
                sys.exit(7)
            started.append((state.__name__, pid))
    ended = {}
    for name, pid in started:
        ended.setdefault(name, []).append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write(json.dumps(ended))
