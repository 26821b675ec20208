"""The watch, live: who speaks when, through what, how often, and what is left of it.

What the verdicts say is tested by tests/hangs; ``make test-hangs`` runs all of this, ``make test`` a part.
"""

import atexit
import faulthandler
import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.sockets import descriptors
from tests.torch_lacks import listed_keys

import rankmesh as rm
from rankmesh.backend.default import default_group
from rankmesh.debug import watch
from rankmesh.debug.doctor import doctor
from rankmesh.debug.watch import host as on_host
from rankmesh.debug.watch.recorder import together
from rankmesh.errors import AgreementError, ConnectError

pytestmark = pytest.mark.long  # watches wait for calls that are late

# Not in CI: they wait for a rank that stays stopped until all is over.
ALL = pytest.mark.skipif(os.environ.get("HANGS") != "all", reason="make test-hangs runs it: it takes longest")
LONG = pytest.mark.skipif("HANGS" not in os.environ, reason="make test-hangs runs it: it takes long")


class _Messages(logging.Handler):
    """What a rank logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("rankmesh.watch").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def _steps(count=3):
    for _ in range(count):
        dist.all_reduce(torch.ones(4))


def _loop(seconds):
    """An endless loop of Python, as far as the others can tell."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _hang(me, folder, how, limit=None):
    """Some steps, then one in which the victim is stopped or loops; what this rank said, heard, and when."""
    output = _Messages()
    here = watch.start(folder, timeout=limit, slow=0)
    _steps()
    victim, act = how
    began = time.time()
    if me.rank == victim and act == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if me.rank == victim and act == "loops":
        _loop(me.timeout + 2)
    else:
        with suppress(RuntimeError):
            _steps(1)
    ended = time.time()
    here.close()
    return {"verdict": here.verdict, "lines": output.lines, "began": began, "ended": ended, "folder": str(here.folder)}


def _recording(folder, rank):
    return json.loads(gzip.decompress((Path(folder) / f"rank{rank}.json.gz").read_bytes()))


def test_half_of_the_timeout(ranks, tmp_path):
    """4 ranks, one in a loop of Python: at half of the timeout all write calls and stacks; rank 0 tells, once."""
    result = ranks(4, _hang, str(tmp_path), (3, "loops"), timeout=10)
    assert {one["verdict"].split(":")[0] for one in result} == {"late"}
    assert "rank 3 behind by 1 call of world" in result[0]["verdict"]
    assert f"{__file__.rpartition('/')[2]}" in result[0]["verdict"]
    assert [len(one["lines"]) for one in result] == [1, 0, 0, 0]
    assert result[0]["verdict"] in result[0]["lines"][0]
    waited = (tmp_path / "verdict.json").stat().st_mtime - min(one["began"] for one in result)
    assert 5 <= waited < min(one["ended"] for one in result[:3]) - result[0]["began"]
    for rank in range(4):
        about = _recording(tmp_path, rank)["rankmesh"]
        assert about["rank"] == rank
        where = "_loop" if rank == 3 else "_steps"
        assert any(where in line for stack in about["threads"].values() for line in stack)
    assert "_steps" in result[0]["lines"][0]


_READS_LINES = """
import sys, torch, torch.distributed as dist
from rankmesh.backend import recorder
from rankmesh.debug.doctor.reader import parsed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def step(): dist.all_reduce(torch.ones(1))
step()
before = parsed(recorder.recorded()[0])["entries"][-1]["frames"]
print([frame["name"] for frame in before][-2:], "torch._inductor" in sys.modules, "_inductor" in vars(torch))
config = recorder._Compiler("torch._inductor").config
print(before == parsed(recorder.recorded()[0])["entries"][-1]["frames"], config is torch._inductor.config)
"""


def test_lines_cost_no_compiler():
    """1 rank: calls have their lines before torch has loaded its compiler, which takes seconds, and after."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    command = [sys.executable, "-c", _READS_LINES]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=limits.LONG)
    assert printed.stdout.splitlines() == ["['step', '<module>'] False False", "True True"]


def _differs(me, folder, what):
    """Some steps, then one in which rank 1 has another tensor than the others; what those that live are told."""
    output = _Messages()
    here = watch.start(folder, timeout=60)
    _steps()
    odd = {"size": torch.ones(4096), "dtype": torch.ones(64, dtype=torch.float64)}[what]
    try:
        dist.all_reduce(odd if me.rank == 1 else torch.ones(16 if what == "size" else 64))
    except RuntimeError:
        here.close()  # as at the end of a program that such an error ends
    return {"verdict": here.verdict, "lines": output.lines}


@pytest.mark.parametrize(("what", "message"), [("size", "sizes differ"), ("dtype", "dtypes differ")])
def test_a_job_that_gloo_aborts_ends_with_a_diagnosis(outcomes, tmp_path, what, message):
    """4 ranks, one with another size or dtype: gloo ends some, rank 0 and its store maybe; the doctor says why."""
    ended = outcomes(4, _differs, str(tmp_path), what, timeout=20, limit=60)
    result = [one.value for one in ended if one.value is not None]
    assert result
    verdict = doctor(tmp_path).verdict
    assert verdict.startswith(f"different: {message}")
    assert {one["verdict"] for one in result} <= {None, verdict}


def _works(me, folder):
    """Steps in which all wait for rank 3, in the same lines each time: by a collective, its work, and a receive."""
    with watch.start(folder, timeout=6) as here:
        gradient = torch.ones(4)
        for way in (
            lambda: dist.all_reduce(gradient),
            lambda: dist.all_reduce(gradient, async_op=True).wait(),
            lambda: [dist.send(gradient, rank) for rank in range(3)] if me.rank == 3 else dist.recv(gradient, 3),
        ):
            for _ in range(10):
                if me.rank == 3:
                    time.sleep(0.8)
                way()
    return here.verdict


@LONG
def test_ranks_that_mostly_wait_do_not_hang(ranks, tmp_path):
    """4 ranks, a slow one and three that stand in the same call whenever they are looked at: nothing is told."""
    assert ranks(4, _works, str(tmp_path)) == [None] * 4


def _is_asked_at_work(me, folder):
    """Steps in which all wait for rank 3 for a moment, while a thread of rank 2 asks three times what hangs."""

    def query():
        for _ in range(3):
            time.sleep(1.5)
            here.ask("a test")
            received.append(here.verdict)

    received = []
    with watch.start(folder, timeout=60) as here:
        requesting = threading.Thread(target=query)
        if me.rank == 2:
            requesting.start()
        going = torch.ones(1)
        while going.item():
            if me.rank == 3:
                time.sleep(0.05)
            dist.all_reduce(going)
            going.fill_(len(received) < 3)
            dist.broadcast(going, 2)
        dist.barrier()
    return received


@LONG
def test_ranks_that_work_are_not_accused(ranks, tmp_path):
    """4 ranks, each looked at in another moment: a call that one has not come to yet, and another has, is no hang."""
    received = ranks(4, _is_asked_at_work, str(tmp_path), timeout=30)[2]
    assert any(verdict.startswith("no rank waits") for verdict in received), received


def _is_slow_then_stops(me, folder):
    """Rank 3 is late once, for longer than the limit; later it loops. What was told of each."""
    with watch.start(folder, timeout=3) as here:
        _steps()
        if me.rank == 3:
            time.sleep(8)
        _steps(40)
        slow, here.verdict = here.verdict, None
        dist.barrier()
        if me.rank == 3:
            _loop(13)
        _steps(1)
    return slow, here.verdict


@LONG
def test_a_hang_after_a_slow_call_is_reported(ranks, tmp_path):
    """4 ranks: a call that was slow and came through is told, and does not keep a later hang from being told."""
    for slow, hang in ranks(4, _is_slow_then_stops, str(tmp_path), timeout=30):
        assert slow.startswith("late: rank 3 behind by 1 call of world")
        assert "_is_slow_then_stops" in slow
        assert hang.startswith("late: rank 3 behind by 1 call of world")
        assert "_loop" in hang


def _does_not_wait(me, folder):
    """A call that rank 3 does not make, and that the others have under way while they work on something else."""
    with watch.start(folder, timeout=2.0) as here:
        _steps()
        work = None if me.rank == 3 else dist.all_reduce(torch.ones(4), async_op=True)
        _loop(10)
        if me.rank == 3:
            work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
    return here.verdict


@LONG
def test_a_call_that_no_thread_waits_for(ranks, tmp_path):
    """4 ranks, three of which have a call under way and go on: the recorder has it, where no stack does."""
    for verdict in ranks(4, _does_not_wait, str(tmp_path), timeout=30):
        assert verdict.startswith("late: rank 3 behind by 1 call of world")
        assert "_loop" in verdict


@ALL
def test_a_store_that_is_lost(outcomes, tmp_path):
    """4 ranks, the first of which serves the store and is stopped: each leaves a recording, which the doctor reads."""
    ended = outcomes(4, _hang, str(tmp_path), (0, "stops"), 1.0, timeout=28, limit=40)
    assert [one.hung for one in ended] == [True, False, False, False]
    assert all("reaches no other rank" in one.value["lines"][0] for one in ended[1:])
    assert doctor(tmp_path).verdict.startswith("dead: rank 0 left no recording")


def _queries(me, folder):
    """Steps in which two ranks get SIGUSR1, one after the other; then a step that hangs."""
    output = _Messages()
    here = watch.start(folder, timeout=2.0, slow=0)  # which has lines of its own
    received = []
    for turn, rank in ((1, 2), (2, 1)):
        if me.rank == rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        while len(received) < turn:
            _steps(1)
            time.sleep(0.05)
            news = torch.tensor(float(here.verdict is not None))
            dist.all_reduce(news)
            if news == dist.get_world_size():
                received.append(here.verdict)
                dist.barrier()
                here.verdict = None
    if me.rank == 3:
        _loop(12)
    else:
        with suppress(RuntimeError):
            _steps(1)
    here.close()
    return {"heard": received, "verdict": here.verdict, "lines": len(output.lines)}


@LONG
def test_sigusr1(ranks, tmp_path):
    """4 ranks that work: SIGUSR1 to any asks all, again and again, and does not keep a later hang from being told."""
    result = ranks(4, _queries, str(tmp_path), timeout=10)
    assert all("late: rank 3" in one["verdict"] for one in result)
    assert all(len(one["heard"]) == 2 for one in result)
    assert [one["lines"] for one in result] == [3, 0, 0, 0]


def _comes_late(me, folder, what):
    """Rank 3 does not come to connect, or to warm_up; what the others are told."""
    with watch.start(folder, timeout=60):
        if what == "connect":
            if me.rank == 3:
                time.sleep(12)
                return None
            return me.error(AgreementError, rm.connect, "tp=2,dp=2", timeout=2.0)
        with rm.connect("tp=2,dp=2") as groups:
            if me.rank == 3:
                time.sleep(12)
                return None
            return me.error(ConnectError, groups.warm_up, timeout=2.0)


@LONG
def test_connect_ends_with_a_diagnosis(ranks, tmp_path):
    """4 ranks, one of which does not come to connect: the errors of the others end with where it is."""
    errors = ranks(4, _comes_late, str(tmp_path), "connect")[:3]
    for error in errors:
        assert error["missing"] == [3]
        assert "by the recordings: " in error["message"]
        verdict = error["message"].rpartition("by the recordings: ")[2]
        assert verdict.startswith("late: rank 3 behind by 1 call of world")
        assert "_comes_late and has made none; " in verdict
        assert "ranks 0, 1, 2 wait in connect" in verdict


@LONG
def test_warm_up_ends_with_a_diagnosis(ranks, tmp_path):
    """4 ranks, one of which does not warm its groups up: the errors of those that wait end with where it is."""
    for error, group in zip(ranks(4, _comes_late, str(tmp_path), "warm_up")[1:3], ("dp@tp1", "tp@dp1"), strict=True):
        assert f"group {group} was not warm" in error["message"]
        assert error["message"].rpartition("by the recordings: ")[2].startswith("late: rank 3 behind by 1 call of")


SAME = ("keys", "places", "threads", "handler")


def _handles():
    """What this process has open, without the numbers of sockets."""
    return sorted(re.sub(r"\d+", "", name) for name in descriptors())


def _leaves_nothing(me, folder, host):
    """Keys, threads, descriptors and files before a watch and after it; ``host`` takes the files of this host."""
    tempfile.tempdir = host

    def state():
        me.meet(f"state {len(states)}")
        # A server closes its end of a connection, and a thread what it had, a moment after the other one.
        end = time.monotonic() + (10 if states else 0.2)
        while time.monotonic() < end and (not states or Counter(_handles()) - Counter(states[0]["handles"])):
            time.sleep(0.05)
        keys = sorted(key for key in me.store.list_keys() if not key.startswith(("meet/", "met/")))
        me.meet(f"counted {len(states)}")
        places = sorted(path.name for path in Path(host).iterdir())
        threads = sorted(thread.name for thread in threading.enumerate())
        handler = str(signal.getsignal(signal.SIGUSR1))
        return {"keys": keys, "places": places, "threads": threads, "handles": _handles(), "handler": handler}

    states = []
    with watch.start(folder, timeout=60) as here:
        _steps()
        here.ask("a test")
    for queries in (False, True, False):
        states.append(state())
        with watch.start(folder, timeout=60) as here:
            _steps()
            if queries:
                here.ask("a test")
            dist.barrier()
    states.append(state())
    return states


@listed_keys
@LONG
def test_nothing_is_left(ranks, tmp_path, tmp_path_factory):
    """2 ranks: after a watch, asked or not, no key, thread, descriptor or file is left but the recordings."""
    host = tmp_path_factory.mktemp("host")
    for before, *others in ranks(2, _leaves_nothing, str(tmp_path), str(host)):
        for number, after in enumerate(others, 1):
            assert Counter(after["handles"]) - Counter(before["handles"]) == Counter(), number
            assert [after[name] for name in SAME] == [before[name] for name in SAME], number
    left = ["rank0.json.gz", "rank1.json.gz", "rankmesh.prom", "verdict.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def _keeps_its_signal(me, folder):
    """A program that takes SIGUSR1 after its watch began, and gets one from another rank's look and after the watch."""
    arrived = []
    with watch.start(folder, timeout=1.5):
        signal.signal(signal.SIGUSR1, lambda *_: arrived.append("during"))
        time.sleep(1)
        if me.rank == 1:
            _loop(8)
        _steps(1)
    during = list(arrived)
    os.kill(os.getpid(), signal.SIGUSR1)
    return during, len(arrived)


@LONG
def test_a_program_keeps_its_own_signal(ranks, tmp_path):
    """2 ranks with a handler of SIGUSR1 that is theirs: nobody sends them one, and it is there after the watch."""
    assert ranks(2, _keeps_its_signal, str(tmp_path), timeout=30) == [[[], 1]] * 2


def test_a_signal_that_c_handles_is_left_alone(tmp_path, monkeypatch):
    """A program that has its stacks written at SIGUSR1 by itself: a watch does not take that, nor give it back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (tmp_path / "own").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            here = on_host.HostRanks("mine", 0)
            here.close()
            os.kill(os.getpid(), signal.SIGUSR1)
            file.seek(0)
            assert "test_a_signal_that_c_handles" in file.read()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert not here.by_signal
    again = on_host.HostRanks("mine", 0)
    again.close()
    assert again.by_signal


def _forks(me, folder):
    """A process that is forked off and ends as programs do."""
    with watch.start(folder, timeout=60):
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        return (Path(folder) / f"rank{me.rank}.json.gz").exists()


def test_a_fork_is_no_rank(ranks, tmp_path):
    """2 ranks: the end of a process that one of them forks off is not the end of its program."""
    assert ranks(2, _forks, str(tmp_path)) == [False, False]


def _is_terminated(me, folder):
    """Rank 0 gets SIGTERM inside a call that rank 1 never makes; that waits for the recording."""
    with watch.start(folder, timeout=60):
        _steps()
        if me.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            _steps(1)
        while not (Path(folder) / "rank0.json.gz").exists():
            time.sleep(0.05)


def test_a_rank_that_gets_sigterm_leaves_its_recording(outcomes, tmp_path):
    """2 ranks: as a launcher ends the others when one has died, a rank records the call that it is in, and ends."""
    ended = outcomes(2, _is_terminated, str(tmp_path), timeout=30)
    assert ended[0].code == -signal.SIGTERM
    about = _recording(tmp_path, 0)["rankmesh"]
    assert (about["reason"], about["ended"], about["in_call"]["operation"]) == ("SIGTERM", False, "all_reduce")


def _is_asked_often(me, folder):
    """Threads that run Python, begin and end, while SIGUSR1 comes 500 times, as others of the host send it."""
    ended = threading.Event()

    def calls(depth=50):
        return depth and calls(depth - 1)

    def busy():
        while not ended.is_set():
            thread = threading.Thread(target=calls)
            thread.start()
            thread.join()

    with watch.start(folder, timeout=60):
        threads = [threading.Thread(target=busy) for _ in range(3)]
        for thread in threads:
            thread.start()
        child = os.fork()
        if child == 0:  # others send it: where a process sends it to itself, its other threads wait
            for _ in range(500):
                os.kill(os.getppid(), signal.SIGUSR1)
                time.sleep(0.002)
            os._exit(0)
        os.waitpid(child, 0)
        ended.set()
        for thread in threads:
            thread.join()
    return "goes on"


def test_signals_end_no_rank_whose_threads_are_busy(ranks, tmp_path):
    """Stacks are written inside of the signal handler, while other threads of Python run: that is no end of a rank."""
    assert ranks(1, _is_asked_often, str(tmp_path)) == ["goes on"]


def _ends_a_worker(me, folder):
    """A process that is forked off gets SIGTERM, as workers of a data loader do."""
    with watch.start(folder, timeout=60) as here:
        ready, started = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(started, b"x")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        here.ask("a test")
    return os.WTERMSIG(status)


def test_a_worker_is_ended_by_sigterm_and_its_rank_is_not(ranks, tmp_path):
    """2 ranks: a process that each has forked off ends at once, and the ranks go on."""
    assert ranks(2, _ends_a_worker, str(tmp_path)) == [signal.SIGTERM] * 2


class _CutOff(dist.TCPStore):
    """A store to which no further connection comes about, and none is refused."""

    def clone(self):
        threading.Event().wait()


def _store_is_cut_off(me, folder):
    """A watch whose store cannot be reached: the rank goes on."""
    world = replace(default_group(), store=_CutOff("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with patch("rankmesh.debug.watch.watch.default_group", lambda: world), watch.start(folder, timeout=60) as here:
        _steps()
    return here.verdict


def test_a_watch_waits_for_no_store(ranks, tmp_path):
    """2 ranks: where the store takes no more connections, the watch gives up, and the program does not wait."""
    assert ranks(2, _store_is_cut_off, str(tmp_path)) == [None, None]


def test_what_killed_ranks_left(tmp_path, monkeypatch):
    """The first rank of a session takes away what ranks left that are gone, and nothing else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"rankmesh-{os.geteuid()}"
    place.mkdir(mode=0o700)

    def left(name, age=100, **about):
        folder = place / f"watch-{name}"
        folder.mkdir(mode=0o700, parents=True)
        here = {"pid": os.getpid(), "began": on_host._began(os.getpid()), "space": on_host._space()}
        for rank in (0, 1):
            (folder / f"{rank}.stacks").touch()
        (folder / "0.json").write_text(json.dumps({**here, **about}), encoding="utf-8")
        os.utime(folder, (time.time() - age,) * 2)

    left("gone", began="1")
    left("runs")
    left("elsewhere", began="1", space="pid:[1]")
    left("starts", age=0, began="1")
    (place / "watch-empty").mkdir(mode=0o700)
    on_host.HostRanks("mine", 0).close()
    found = sorted(folder.name.rpartition("-")[2] for folder in place.iterdir())
    assert found == ["elsewhere", "empty", "runs", "starts"]


# -- two recorders -----------------------------------------------------------------------------------------------------


def _kept(name, first, times, group="tp"):
    entries = [
        {"record_id": first + place, "process_group": (group, "tp@dp0"), "profiling_name": f"{name}:x"}
        | {"collective_seq_id": place + 1, "time_created_ns": time}
        for place, time in enumerate(times)
    ]
    return {"version": "2.10", "pg_config": {group: {"ranks": "[0, 1]"}}, "entries": entries}


def test_what_gloo_and_nccl_have_kept_is_one_recording():
    """In the order of time; calls of one group are told apart, as each recorder counts them by itself."""
    one = together([_kept("gloo", 0, [1, 4]), _kept("nccl", 5, [2, 3])])
    assert [entry["profiling_name"] for entry in one["entries"]] == ["gloo:x", "nccl:x", "nccl:x", "gloo:x"]
    assert [entry["process_group"][0] for entry in one["entries"]] == ["tp on the CPU", "tp", "tp", "tp on the CPU"]
    assert one["entries"][0]["record_id"] == 5  # calls were dropped
    apart = together([_kept("gloo", 0, [1]), _kept("nccl", 0, [2], group="dp")])
    assert [entry["process_group"][0] for entry in apart["entries"]] == ["tp", "dp"]
    assert together([_kept("gloo", 0, []), _kept("nccl", 2, [2])]) == _kept("nccl", 2, [2])
