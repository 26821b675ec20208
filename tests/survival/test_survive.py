"""rm.survive on real processes that are killed, stopped, or fail: the results are those of a run without loss."""

import socket

import pytest
from tests.survival.program import member, text_of

STEPS = 8


def _port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def job(outcomes, tmp_path):
    """Run a job of ``size`` members of which some die; how each of the others ended."""

    def run(size, deaths, layout="tp=2,pp=2,dp=*", limit=40.0, **how):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        ended = outcomes(size, member, _port(), str(folder), deaths, STEPS, layout, how, world=None, limit=limit)
        dead = {death["member"] for death in deaths if death.get("how") != "raise"}
        for outcome in ended:
            if outcome.rank in dead:
                assert outcome.value is None, text_of(ended)
                continue
            assert outcome.ok, text_of(ended)
            assert outcome.value["left"] == [0, 0], text_of(ended)
            assert outcome.value["initialised"] is False
        return [None if outcome.rank in dead else outcome.value for outcome in ended]

    return run


def _results(ended):
    """The results and the losses by rank of the plan, of those that had a rank at the end."""
    found = {}
    for value in ended:
        if value is not None and value.get("result") is not None:
            epoch, rank, *_ = value["history"][-1]
            found[rank] = (epoch, value["result"], value["losses"])
    return found


def _same(ended, reference):
    """The results are those of the run without loss, bit by bit; so are the losses that a member has seen."""
    found, expected = _results(ended), _results(reference)
    assert found.keys() == expected.keys()
    for rank, (_, result, losses) in found.items():
        assert result == expected[rank][1], rank
        assert losses.items() <= expected[rank][2].items(), rank


def test_without_loss(job):
    """8 ranks and a spare: train's results, None for the spare; no socket, thread or group is left."""
    ended = job(9, [], spares=1)
    assert sorted(_results(ended)) == list(range(8))
    assert ended[8]["result"] is None
    assert ended[8]["history"] == []


DEATHS = {
    "in a step": [{"member": 3, "at": "step", "n": 4}],
    "rank 0": [{"member": 0, "at": "step", "n": 4}],
    "in commit": [{"member": 5, "at": "take", "n": 4}],
    "after the last step": [{"member": 2, "at": "returned", "n": 1}],
    "two at once": [{"member": 3, "at": "step", "n": 4}, {"member": 6, "at": "step", "n": 4}],
    "a second one in the regroup": [{"member": 3, "at": "step", "n": 4}, {"member": 0, "at": "agree", "n": 1}],
    "a second one in the transfer": [{"member": 3, "at": "step", "n": 4}, {"member": 1, "at": "restore", "n": 1}],
    "a spare": [{"member": 8, "at": "enter", "n": 1, "after": True}, {"member": 3, "at": "step", "n": 4}],
    "a spare that takes over": [{"member": 3, "at": "step", "n": 4}, {"member": 8, "at": "enter", "n": 2}],
}


@pytest.mark.parametrize("what", DEATHS)
def test_spares_take_over(job, what):
    """8 ranks and 2 spares: the results are bit-equal to those of a run without loss."""
    _same(job(10, DEATHS[what], spares=2, timeout=3), job(8, []))
