"""Rounds in any order of their operations: one outcome for all, in time, and nothing old in a retry."""

# ruff: noqa: S311 - chance keeps no secrets

import os
import random

import pytest
from tests.rendezvous.schedules import NEVER, Fault, Schedule, on_its_clock
from tests.rendezvous.transports import Died

from rankmesh.rendezvous import Outcome, Proposal, Round, WaitPolicy, lost
from rankmesh.rendezvous.gather import or_missing

THREE = range(3)
PATIENCE = 5.0
MOST = 12
RUNS = 2000 if os.environ.get("RANKMESH_TEST_SWEEP") else 200


def meet(channel, rank, data, seconds=PATIENCE):
    """One round of two steps: what this rank heard in each."""
    found = Round(channel, "meet", THREE, rank)
    every = or_missing(lambda arrivals: Outcome(value=arrivals.texts), seconds, "meet")
    received = [found.step("agree", Proposal("same", text=f"{data} {rank}"), every, WaitPolicy(seconds))]
    if received[0].agreed:
        received.append(found.step("make", Proposal(), every, WaitPolicy(seconds)))
    found.leave(received[-1])
    return received


def meet_until_agreed(channel, rank):
    """Rounds until one ends well: what this rank gave in each of them, and heard."""
    received = []
    while len(received) < MOST and not (received and received[-1][1][-1].agreed):
        data = f"attempt {len(received)} of"
        received.append((data, meet(channel, rank, data)))
    return received


def new():
    """What all hear in a round of which nobody is lost."""
    return [Outcome(value={str(rank): [f"new {rank}"] for rank in THREE}), Outcome(value={})]


def equal(received):
    """The outcomes of a step that each rank heard of it: one."""
    for step in range(2):
        given = {answer[step].text for answer in received if len(answer) > step}
        assert len(given) <= 1, received


@pytest.mark.parametrize("first", range(0, RUNS, 100))
def test_nobody_is_lost(first, monkeypatch):
    """100 orders of 3 participants: all agree, one key stays."""
    for seed in range(first, first + 100):
        schedule = Schedule(seed)
        on_its_clock(monkeypatch, schedule)
        for number in range(2):
            assert schedule.run(lambda rank, channel: meet(channel, rank, "new"), THREE) == [new()] * 3, seed
            assert schedule.left() == number + 1, seed
            assert schedule.clock == 0


@pytest.mark.parametrize("first", range(0, RUNS, 100))
def test_one_dies(first, monkeypatch):
    """100 orders in which one of 3 dies at a moment: the others hear one outcome in time, and a retry is clean."""
    for seed in range(first, first + 100):
        chance = random.Random(f"dies {seed}")
        fault = Fault(chance.randrange(3), chance.randrange(1, 30), chance.random() < 0.5)
        schedule = Schedule(seed, [fault])
        on_its_clock(monkeypatch, schedule)
        answers = schedule.run(lambda rank, channel: meet(channel, rank, "old"), THREE)
        received = [answer for answer in answers if not isinstance(answer, Died)]
        assert len(received) >= 2, (seed, answers)
        equal(received)
        for answer in received:
            assert answer[-1].agreed or answer[-1].missing == (fault.rank,), (seed, fault, answers)
        assert schedule.clock < 3 * PATIENCE, (seed, fault)
        schedule.faults = ()
        assert schedule.run(lambda rank, channel: meet(channel, rank, "new"), THREE) == [new()] * 3, (seed, fault)


@pytest.mark.parametrize("first", range(0, RUNS, 100))
def test_one_stands_still(first, monkeypatch):
    """100 orders in which one of 3 stands still, for less or more than the others wait, wakes up and goes on: all
    agree in the end, on what each of them gave in that round.
    """
    for seed in range(first, first + 100):
        chance = random.Random(f"still {seed}")
        fault = Fault(chance.randrange(3), chance.randrange(1, 30), seconds=chance.choice([1.0, 4.0, 6.0, 9.0, 30.0]))
        schedule = Schedule(seed, [fault])
        on_its_clock(monkeypatch, schedule)
        answers = schedule.run(lambda rank, channel: meet_until_agreed(channel, rank), THREE)
        assert not [answer for answer in answers if isinstance(answer, BaseException)], (seed, fault, answers)
        last = [answer[-1] for answer in answers]
        assert all(received[-1].agreed for _, received in last), (seed, fault, answers)
        assert {received[0].text for _, received in last} == {last[0][1][0].text}, (seed, fault, answers)
        for rank, (data, received) in enumerate(last):
            assert received[0].value[str(rank)] == [f"{data} {rank}"], (seed, fault, answers)


def propose(found, digest, data):
    """One step of which the coordinator names who differs, is missing, or is lost; what this rank heard."""

    def conclude(arrivals):
        if not arrivals.differ:
            return or_missing(lambda _: Outcome(value=arrivals.texts), PATIENCE, "meet")(arrivals)
        arrivals.probe()
        missing = arrivals.unresponsive(besides=arrivals.absent)
        documents = {digest: arrivals.document(digest) for digest in arrivals.proposals}
        return lost(missing, "had arrived") if missing else Outcome("different", value=documents)

    proposal = Proposal(digest, lambda: f'{{"is": "{digest}"}}', f"{data} {found.rank}")
    return found.step("agree", proposal, conclude, WaitPolicy(PATIENCE, if_odd=1.0))


@pytest.mark.parametrize("first", range(0, RUNS, 100))
def test_any_two_faults(first, monkeypatch):
    """100 orders of 2 to 5 participants of which two die or stand still, and one may differ: in each epoch all hear
    one outcome, in time, nobody is lost who did nothing wrong, and a retry of all is clean.
    """
    for seed in range(first, first + 100):
        chance = random.Random(f"any {seed}")
        ranks = range(chance.randrange(2, 6))
        faults = [
            Fault(
                chance.choice(ranks), chance.randrange(1, 40), chance.random() < 0.5, chance.choice([2, 6, 20, NEVER])
            )
            for _ in range(2)
        ]
        odd = chance.choice([None, *ranks])
        schedule = Schedule(seed, faults)
        on_its_clock(monkeypatch, schedule)
        received = {}

        def program(rank, channel, ranks=ranks, odd=odd, received=received):
            for _ in range(2):
                found = Round(channel, "meet", ranks, rank)
                outcome = propose(found, "b" if rank == odd else "a", "old")
                received.setdefault(found.epoch, {})[rank] = outcome
                found.leave(outcome)

        answers = schedule.run(program, ranks)
        what = (seed, ranks, odd, faults, received, answers)
        assert all(answer is None or isinstance(answer, Died) for answer in answers), what
        for outcomes in received.values():
            assert len({outcome.text for outcome in outcomes.values()}) == 1, what
        faulty = {fault.rank for fault in faults}
        for outcome in received.get(0, {}).values():
            assert {*outcome.missing} <= faulty, what
            assert not outcome.agreed or odd is None, what
        assert schedule.clock < 60 + 8 * PATIENCE, what
        schedule.faults = ()

        def again(rank, channel, ranks=ranks):
            outcome = Outcome("failed")
            for _ in range(3):  # a process that died may have begun to coordinate the next epoch
                if not outcome.agreed:
                    found = Round(channel, "meet", ranks, rank)
                    outcome = propose(found, "a", "new")
                    found.leave(outcome)
            return outcome

        for outcome in schedule.run(again, ranks):
            assert outcome.agreed, (what, outcome)
            # What a process said before it died is there too where nobody had concluded without it.
            assert {rank: output[-1] for rank, output in outcome.value.items()} == {
                str(rank): f"new {rank}" for rank in ranks
            }, (what, outcome)
        assert schedule.left(), what
