"""``rankmesh ask``: what a running job states, and what it refuses; without its key nobody is heard."""

import json

import pytest

from rankmesh.launch.job_key import JobKey
from rankmesh.survival.heartbeat import Heartbeat
from rankmesh.survival.machine import Machine
from rankmesh.survival.members import Members

KEY = JobKey("the key of the job of these tests")


@pytest.fixture
def job(monkeypatch):
    """The address of a rank of a job of 4 ranks and a spare, by its state machine alone."""
    machine = Machine()
    machine.begin(1, Members.first("dp=4", world_size=5, spares=1))
    machine.reasons = {"3": "guess: it does not reply"}

    def reply(message):
        found, _ = machine.received(message, None)
        if "last_change" in found:
            found["last_change"]["seconds"] = {"connect": 0.25}
        return found

    heartbeat = Heartbeat("127.0.0.1", reply)
    heartbeat.start(KEY.of_use("heartbeat"))
    monkeypatch.setenv("RANKMESH_JOB_KEY", KEY.text)
    yield f"127.0.0.1:{heartbeat.port}"
    heartbeat.close()


def test_status(rankmesh, job):
    """Epoch, plan, step, members and the last change, for people and as JSON."""
    shown = rankmesh("ask", job, "status")
    assert (shown.code, "dp=4" in shown.out, "start: connect 0.25 s" in shown.out) == (0, True, True)
    assert "guess: it does not reply" in next(line for line in shown.out.splitlines() if "member 3" in line)
    assert json.loads(rankmesh("ask", job, "status", "--json").out) == {
        "epoch": 0, "plan": "dp=4", "step": 0, "members": [0, 1, 2, 3, 4], "spares": [4],
        "last_change": {"what": "start", "why": {"3": "guess: it does not reply"}, "seconds": {"connect": 0.25}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        (["relayout", "tp=2,dp=*"], 0, "accepted: the job changes to tp=2,dp=2 after its next commit"),
        (["relayout", "dp=4"], 0, "the job has dp=4 already"),
        (["relayout", "tp=6"], 3, "the job refuses 'tp=6': the plan tp=6 has 6 ranks, and the job has 5 members"),
        (["relayout", "tp="], 3, "tp"),
        (["relayout"], 3, "relayout needs a layout"),
        (["status", "tp=4"], 3, "status takes no layout"),
        (["stop"], 2, "stop"),
    ],
)
def test_requests(rankmesh, job, given, code, text):
    """A layout that fits is accepted; the reason of a refusal is one line."""
    ran = rankmesh("ask", job, *given)
    assert (ran.code, text in ran.err) == (code, True), ran.err


@pytest.mark.parametrize("key", ["", "the key of another job, as long as this"])
def test_who_has_no_key_learns_nothing(rankmesh, job, monkeypatch, key):
    """Neither without a key nor with that of another job."""
    monkeypatch.setenv("RANKMESH_JOB_KEY", key)
    ran = rankmesh("ask", job, "status")
    assert (ran.code, ran.out, "RANKMESH_JOB_KEY" in ran.err) == (5, "", True)


@pytest.mark.parametrize("address", ["no.such.host.invalid:40123", "[::1:40123", "127.0.0.1:99999", "a..b:1", "host"])
def test_what_is_not_an_address(rankmesh, monkeypatch, address):
    """A name that does not resolve, a port that is too large, and a host alone."""
    monkeypatch.setenv("RANKMESH_JOB_KEY", KEY.text)
    ran = rankmesh("ask", address, "status")
    assert (ran.code, "is not an address of a member" in ran.err) == (5, True), ran.err
