"""The backend: the oldest torch, the fallback to public API, abort, and groups in a forked child."""

import asyncio
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.limits import AT_ONCE, LONG, until
from tests.sockets import descriptors
from torch.distributed import distributed_c10d as c10d

import rankmesh as rm
from rankmesh.backend import cut as cutting
from rankmesh.backend import public, releases
from rankmesh.backend.cut import SNDBUFFORCE, Drain, cut
from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.gloo import GlooDevices, put_gloo_under
from rankmesh.backend.members import MemberBackend
from rankmesh.backend.protocol import GroupRequest, Kind, NotJoined
from rankmesh.backend.public import PublicBackend
from rankmesh.backend.registries import registries
from rankmesh.errors import ConnectError
from rankmesh.rendezvous.waiting import submit

KINDS = [rm.GroupSpec("tp"), rm.GroupSpec("dp", lazy=True), rm.GroupSpec("ends", "tp-dp", pick=[0, 3])]
PLAN = rm.Plan(rm.Mesh(tp=2, dp=2, pp=1), [*KINDS, rm.GroupSpec("pp")])


OLD = "import torch; torch.__version__ = '2.7.1'"
WITHOUT = """
import sys, torch, torch.distributed as without
for name in [name for name in vars(without) if not name.startswith("__")]:
    delattr(without, name)
without.is_available = lambda: False
sys.modules["torch.distributed.distributed_c10d"] = sys.modules["torch._C._distributed_c10d"] = None
"""
BUILT_WITHOUT = (
    f"torch {torch.__version__} was built without torch.distributed, in which groups are made; "
    "pip install --force-reinstall torch, whose wheels have it"
)
IS_OLD = "torch 2.7.1 is installed, and rankmesh needs 2.8 or newer; pip install 'torch>=2.8'"
UNFIT = [(WITHOUT, BUILT_WITHOUT), pytest.param(OLD, IS_OLD, marks=pytest.mark.long)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("torch_is", "message"), UNFIT, ids=["without distributed", "old"])
@pytest.mark.parametrize("call", ["rankmesh.connect('dp=1')", "rankmesh.init()", "from rankmesh import sim"])
def test_an_unfit_torch_is_refused_before_anything_happens(call, torch_is, message):
    """Torch 2.7, and a torch without torch.distributed: one ConnectError, whatever is used first."""
    program = f"{torch_is}\nimport rankmesh\n{call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stderr.splitlines()[-1].endswith(f"ConnectError: {message}")
    assert done.stderr.count("ConnectError: torch") == 1


@pytest.mark.parametrize("version", ["2.8.0", "2.15.0+cu132", "3.0.0"])
def test_each_release_makes_groups_by_their_members(monkeypatch, version):
    """A known release does so without a warning, and a later one if its private pieces behave."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(releases, "_misbehaves", lambda: None)
    releases.missing.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world = DefaultGroup(0, 4, None, "gloo", timedelta(seconds=9), None)
        assert type(releases.backend_of(world)) is MemberBackend
    releases.missing.cache_clear()


@pytest.mark.parametrize("gone", ["_new_process_group_helper", "_get_split_source", "_world"])
def test_a_piece_that_is_missing_is_named(monkeypatch, gone):
    """The probe names what this torch lacks."""
    monkeypatch.delattr(dist.distributed_c10d, gone)
    releases.missing.cache_clear()
    assert gone in releases.missing()
    releases.missing.cache_clear()


def _unknown(me, broken):
    """A release that is not known: what its probe says, and what is registered after it."""
    torch.__version__ = "2.99.0"
    if broken:
        releases.single_rank_group = lambda **_: dist.group.WORLD
    before = registries()
    return [releases.missing(), registries() == before]


def test_a_release_that_is_not_known_is_tried(ranks):
    """2 ranks: a group is made, used and destroyed; where that goes wrong, the reason is said."""
    assert ranks(2, _unknown, False) == [[None, True]] * 2
    assert all("other members" in reason for reason, _ in ranks(2, _unknown, True))


def _public(me):
    """Connect, use and close a plan where torch lacks a private piece; how often the fallback is said."""
    releases.missing = lambda: "a piece is missing"
    before, sums = registries()["pg_map"], {}
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        for _ in range(2):
            with rm.connect(PLAN, timeout=20) as groups:
                for name, group in groups.items():
                    tensor = torch.tensor([float(me.rank)])
                    dist.all_reduce(tensor, group=group.pg)
                    sums[name] = tensor.item() == sum(group.ranks)
    result = [str(one.message) for one in output if "a piece is missing" in str(one.message)]
    return [sums, len(result), registries()["pg_map"] == before]


def test_a_torch_without_private_pieces_makes_the_same_groups(ranks):
    """4 ranks, kinds that are lazy, picked and of one rank: new_group makes them all, and rank 0 says so once."""
    found = ranks(4, _public)
    assert [result for _, result, _ in found] == [1, 0, 0, 0]
    for rank, (sums, _, back) in enumerate(found):
        assert sums == dict.fromkeys(["tp", "dp", *(["ends"] if rank in (0, 3) else []), "pp"], True)
        assert back


def _made_by(monkeypatch, groups, backend, local):
    """What the public fallback calls for one kind, in a world of 4 ranks that is bound to a device."""
    calls = []
    monkeypatch.setattr(public, "check_backend", lambda backend: None)
    for name in ("split_group", "new_group"):

        def made(ranks=None, *, by=name, sort_ranks=True, **given):
            return calls.append((by, ranks, given)) or by

        monkeypatch.setattr(dist, name, made)
    made_by = PublicBackend(DefaultGroup(0, 4, None, "nccl", timedelta(seconds=9), torch.device("cuda", 0)))
    kind = Kind("dp", groups, backend, timedelta(seconds=9), rm.Options())
    found = made_by.create(GroupRequest(kind, "dp/0/1", "dp@tp0", local, 0), 0.0)
    made_by.decline(kind)
    return found, [(by, given.get("split_ranks", ranks)) for by, ranks, given in calls]


@pytest.mark.parametrize(
    ("groups", "backend", "local", "by", "once"),
    [
        ([(0, 2), (1, 3)], "nccl", (0, 2), "split_group", [[[0, 2], [1, 3]]]),
        ([(2, 0), (1, 3)], "nccl", (2, 0), "new_group", [[2, 0], [1, 3]]),
        ([(0, 2), (1, 3)], "gloo", (0, 2), "new_group", [[0, 2], [1, 3]]),
    ],
    ids=["split", "in another order", "another backend"],
)
def test_groups_of_a_bound_world_by_public_torch(monkeypatch, groups, backend, local, by, once):
    """One split_group a kind, on members and others alike; new_group for each where a split would change them."""
    assert _made_by(monkeypatch, groups, backend, local) == (by, [(by, ranks) for ranks in once] * 2)


def _sorted_by_torch(me):
    """Connect sorted groups and then others, where new_group sorts the members; what is said, and what was made."""
    releases.missing, made = lambda: "a piece is missing", []
    dist.new_group = lambda ranks=None, **_: made.append(ranks)
    plan = rm.Plan(
        rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("back", "dp", pick=[1, 0])]
    )
    error = me.error(ConnectError, rm.connect, plan, timeout=20)
    return [error["group"], error["ranks"], error["message"].endswith("pip install 'torch>=2.13'"), made]


def test_an_order_that_torch_cannot_keep_is_an_error(ranks):
    """4 ranks, where new_group sorts the members: all refuse a group in another order before any group is made."""
    assert ranks(4, _sorted_by_torch) == [["back", [2, 0], True, []]] * 4


def _public_on_a_part(me):
    releases.missing = lambda: "a piece is missing"
    error = me.error(ConnectError, rm.connect, rm.Plan(rm.Mesh(tp=2, offset=me.rank // 2 * 2), [rm.GroupSpec("tp")]))
    return "or say Plan(..., world_size=4)" in error["message"]


def test_a_part_of_the_world_does_not_connect_alone_by_public_torch(ranks):
    """4 ranks, two meshes that leave each other out: refused with the fix, as new_group would mix them up."""
    assert ranks(4, _public_on_a_part) == [True] * 4


def _public_on_one(me):
    if me.rank == 1:
        releases.missing = lambda: "a piece is missing"
    return me.error(rm.AgreementError, rm.connect, PLAN, timeout=20)["fields"]


def test_ranks_that_create_groups_in_different_ways_are_an_error(ranks):
    """4 ranks, one of which lacks a private piece: all hear it before any group is made."""
    assert ranks(4, _public_on_one) == [["made"]] * 4


def _aborted(me):
    """A collective in which rank 3 is stopped: when the others return after the abort, and what they hear."""
    groups = rm.connect(rm.Plan(rm.Mesh(dp=4), [rm.GroupSpec("dp")]), timeout=LONG)
    local = groups["dp"].pg
    dist.all_reduce(torch.ones(1), group=local)
    me.store.set(f"process/{me.rank}", str(os.getpid()))
    me.meet("connected")
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    began, stopped = [], int(me.store.get("process/3"))

    def cut():
        until(lambda: Path(f"/proc/{stopped}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T")
        began.append(time.monotonic())
        groups.abort()

    threading.Thread(target=cut).start()
    try:
        dist.all_reduce(torch.ones(1), group=local)
    except RuntimeError as error:
        # The abort of a peer may be what ends it, before this rank's own.
        took, output = time.monotonic() - began[0] if began else 0.0, str(error)
    if me.store.add("returned", 1) == 3:  # only now the stopped rank goes on
        os.kill(stopped, signal.SIGCONT)
    groups.close()
    return took < AT_ONCE and bool(output)


def _aborted_midway(me, call):
    """Calls whose messages are under way when both members abort: how many took long to return after that."""
    slow = 0
    for number in range(8):
        groups = rm.connect(rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp")]), timeout=20)
        tensor, began = torch.ones(1 << 22), []
        dist.all_reduce(torch.ones(1), group=groups["dp"].pg)
        me.meet(f"connected {number}")

        def cut(groups=groups, began=began, after=0.002 * (number % 8)):
            time.sleep(after)
            began.append(time.monotonic())
            groups.abort()

        cutting = threading.Thread(target=cut)
        cutting.start()
        with suppress(RuntimeError):
            while not began or time.monotonic() < began[0] + 1:
                call(tensor, group=groups["dp"].pg)
        slow += time.monotonic() - began[0] > AT_ONCE / 2
        cutting.join()
        groups.close()
        me.meet(f"closed {number}")
    return slow


@pytest.mark.nightly
@pytest.mark.parametrize("call", [dist.all_reduce, partial(dist.broadcast, src=0)], ids=["all_reduce", "broadcast"])
def test_abort_ends_what_is_under_way(ranks, call):
    """2 gloo ranks that send 16 MiB when both abort: neither waits for gloo's timeout, sender or receiver.

    A machine with many more threads than processors may cut one of them in the middle of a message.
    """
    with socket.socket() as one:
        try:
            one.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, 1 << 20)
        except PermissionError:
            pytest.skip("a message that begins in the moment of the cut is let through where CAP_NET_ADMIN is")
    assert max(ranks(2, _aborted_midway, call)) <= 1


class _Stopped(dist.Store):
    """The store of a member that has published its address, and stops at its first read."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def set(self, key, value):
        self._store.set(key, value)

    def set_timeout(self, timeout):
        pass

    def wait(self, *_):
        threading.Event().wait()


def _join(rank, size, store, devices, *, timeout, within):
    part = dist.PrefixStore("group", store)
    how = {"ranks": range(size), "rank": rank, "name": "group", "lazy": False, "device_types": ["cpu"]}
    limits = {"timeout": timedelta(seconds=timeout), "within": timedelta(seconds=within)}
    put_gloo_under(dist.ProcessGroup(part, rank, size), devices, part, **how, **limits)


def test_a_member_that_stops_before_its_pairs_connect(capfd):
    """8 members, one of which only listens: those that wait for it to connect give up within the limit."""
    store, within = dist.HashStore(), 1.0

    def make(rank, base):
        started = time.monotonic()
        with suppress(NotJoined):
            _join(rank, 8, base, GlooDevices(), timeout=30, within=within)
        return time.monotonic() - started

    made = [submit(partial(make, rank, store if rank else _Stopped(store)), f"member-{rank}") for rank in range(8)]
    assert max(one.result(timeout=60) for one in made[1:]) < 4 * within  # gloo alone waits five times as long
    capfd.readouterr()  # gloo writes why


def test_a_cut_ends_the_wait_for_members_that_do_not_connect(capfd):
    """One of 2 members only listens: the other one is back at the cut, and says so, long before its limit."""
    limits = {"timeout": 10 * AT_ONCE, "within": 10 * AT_ONCE}

    def cut():
        store, devices = dist.HashStore(), GlooDevices()
        submit(partial(_join, 0, 2, _Stopped(store), GlooDevices(), **limits), "member-0")
        waiting = submit(partial(_join, 1, 2, store, devices, **limits), "member-1")
        store.wait(["group/gloo//0/1"], timedelta(seconds=60))  # gloo waits for the other one from here on, or connects
        devices.cut()
        waiting.result(timeout=AT_ONCE)

    def cut_until_one_waits():
        # Who connects is the one with the lower port, by chance: a member that did not wait tries again.
        for _ in range(50):
            cut()

    with pytest.raises(NotJoined, match="before it was aborted"):
        cut_until_one_waits()
    capfd.readouterr()


def _published(listening):
    """What gloo publishes of a device that listens there, as far as a cut reads it."""
    host, port = listening.getsockname()
    return b"..." + struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + b"..."


def test_a_cut_leaves_no_descriptor():
    """A device has a pipe and an epoll, which are not sockets: they are looked at, and nothing stays open."""
    devices, store, limit = GlooDevices(), dist.HashStore(), timedelta(seconds=5)
    how = {"ranks": [0], "rank": 0, "name": "group", "lazy": False, "device_types": ["cpu"]}
    put_gloo_under(pg := dist.ProcessGroup(store, 0, 1), devices, store, timeout=limit, within=limit, **how)
    before = sorted(descriptors())
    devices.cut()
    assert sorted(descriptors()) == before
    del pg


@pytest.fixture
def device():
    """What a gloo device has: a socket that listens, the epoll that polls it, and both ends of two connections."""
    listening, poll = socket.create_server(("127.0.0.1", 0)), select.epoll()
    pairs = [(socket.create_connection(listening.getsockname()), listening.accept()[0]) for _ in range(2)]
    for one in (listening, *(ours for ours, _ in pairs)):
        poll.register(one, select.EPOLLIN)
    yield listening, poll, pairs
    for one in (listening, poll, *(one for pair in pairs for one in pair)):
        one.close()


def test_a_cut_leaves_a_number_alone_that_is_anothers_by_now(device, monkeypatch):
    """Gloo closes a connection after the cut has listed it, and the next one of the process gets its number."""
    listening, _, ((ended, _), (closed, _)) = device
    another, other_end = socket.socketpair()
    drain, listed = Drain(), cutting._connections

    def listed_before(devices):
        found = listed(devices)
        os.dup2(another.fileno(), closed.fileno())
        return found

    monkeypatch.setattr(cutting, "_connections", listed_before)
    cut({_published(listening)}, drain)
    assert ended.recv(1) == b""
    with pytest.raises(BlockingIOError):
        another.recv(1, socket.MSG_DONTWAIT)
    drain.close()
    for one in (another, other_end):
        one.close()


def test_a_cut_knows_a_device_by_where_it_listens(device):
    """An address that gloo has not published, and one with another port: what is connected there stays."""
    _, _, ((ours, theirs), _) = device
    with socket.create_server(("127.0.0.1", 0)) as other:
        drain = Drain()
        for published in (set(), {_published(other)}):
            cut(published, drain)
            theirs.sendall(b"x")
            assert ours.recv(1) == b"x"
        drain.close()


class _Echo:
    """Others' servers in this process, each with a connection: asyncio's, and one on an epoll with an eventfd."""

    def __init__(self):
        self.loop, self.ready = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        assert self.ready.wait(20)
        self.by_asyncio = socket.create_connection(self.address, timeout=20)
        self.listening, self.poll, self.wake = socket.create_server(("127.0.0.1", 0)), select.epoll(), os.eventfd(0)
        self.ours = socket.create_connection(self.listening.getsockname(), timeout=20)
        self.theirs = self.listening.accept()[0]
        for one in (self.listening, self.theirs, self.ours, self.wake):
            self.poll.register(one, select.EPOLLIN)

    def _serve(self):
        async def echo(reader, writer):
            while received := await reader.read(1):
                writer.write(received)

        async def serve():
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            self.address = server.sockets[0].getsockname()
            self.ready.set()
            await server.serve_forever()

        self.loop.run_until_complete(serve())

    def answers(self):
        self.by_asyncio.sendall(b"a")
        self.theirs.sendall(b"b")
        return self.by_asyncio.recv(1) + self.ours.recv(1)


def _beside_others(me):
    """Abort beside connections of others that were opened before, while and after the group was made."""
    gloo_group, echoes = c10d.ProcessGroupGloo, [_Echo()]

    class Slow(gloo_group):
        def __init__(self, *given):
            echoes.append(_Echo())
            super().__init__(*given)
            echoes.append(_Echo())

    c10d.ProcessGroupGloo = Slow
    with rm.connect(rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp")]), timeout=20) as groups:
        loaded = iter(torch.utils.data.DataLoader(list(range(64)), num_workers=1, batch_size=1))
        next(loaded)
        dist.all_reduce(torch.ones(1), group=groups["dp"].pg)
        me.meet("used")
        groups.abort()
        error = me.error(RuntimeError, dist.all_reduce, torch.ones(1), group=groups["dp"].pg)
        me.meet("aborted")
        return error["seconds"] < 5, [echo.answers().decode() for echo in echoes], sum(1 for _ in loaded)


def test_an_abort_cuts_no_connection_of_others(ranks):
    """2 ranks with asyncio, an epoll with an eventfd, and a DataLoader: they go on, and gloo's calls end."""
    ended, echoed, loaded = ranks(2, _beside_others)[0]
    assert (ended, echoed, loaded) == (True, ["ab"] * 3, 63)


def test_a_group_may_go_right_after_a_cut(ranks):
    """6 gloo ranks: 20 groups are cut and destroyed at once; gloo ends a process that polls what it has closed."""
    assert ranks(6, _cut_and_gone, world=None) == [True] * 6


def _cut_and_gone(me):
    limit = timedelta(seconds=20)
    how = {"ranks": range(me.size), "rank": me.rank, "name": "group", "lazy": True, "device_types": ["cpu"]}
    for number in range(20):
        part = dist.PrefixStore(f"group {number}", me.store)
        pg, devices = dist.ProcessGroup(part, me.rank, me.size), GlooDevices()
        put_gloo_under(pg, devices, part, timeout=limit, within=limit, **how)
        pg.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        me.meet(f"group {number} is used")
        devices.cut()
        del pg
    return True


def test_abort_ends_what_is_blocked(ranks):
    """4 gloo ranks, one of them stopped: the three others leave their collective while it is stopped."""
    assert ranks(4, _aborted) == [True, True, True, None]


def _forked(me):
    """Children that close the groups, leave the block, try to abort, and end the world; then the parent uses it."""
    with rm.connect(rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp")]), timeout=20) as groups:
        groups["dp"].pg  # noqa: B018
        codes = []
        closing = (groups.close, rm.close_all, lambda: groups.__exit__(None, None, None))
        for way in (*closing, _refused(groups), dist.destroy_process_group):
            child = os.fork()
            if child == 0:
                way()
                os._exit(7 if groups.closed or way not in closing else 8)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        one = torch.ones(1)
        dist.all_reduce(one, group=groups["dp"].pg)
        dist.all_reduce(one)
    return [codes, one.item()]


def _refused(groups):
    def refused():
        with pytest.raises(ConnectError, match="was forked by process"):
            groups.abort()

    return refused


def test_a_forked_child_forgets_the_groups(ranks):
    """2 ranks: a child that closes them, in any way, ends at once, and the parent's groups go on working."""
    assert ranks(2, _forked) == [[[7] * 5, 4.0]] * 2
