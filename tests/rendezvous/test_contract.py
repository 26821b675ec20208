"""The contract of a round, over every transport: who arrives, who dies, what is left, what a retry sees."""

import threading
import time

import pytest
from tests import limits
from tests.counting import Counting
from tests.rendezvous.transports import TRANSPORTS, Died, Place, mortal
from tests.sweeping import ALL
from torch.distributed import TCPStore

from rankmesh.errors import AgreementError
from rankmesh.rendezvous import (
    BoundedChannel,
    ChannelLost,
    Outcome,
    Proposal,
    Round,
    StoreChannel,
    WaitPolicy,
    lost,
    stores,
)
from rankmesh.rendezvous import round as rounds
from rankmesh.rendezvous.gather import gather, or_missing
from rankmesh.rendezvous.stores import _BLOCK

THREE = range(3)


@pytest.fixture(params=TRANSPORTS)
def place(request, tmp_path):
    """Where participants meet, by each transport."""
    return Place(request.param, tmp_path)


@pytest.fixture(params=[name for name in TRANSPORTS if name != "simulated"])
def real(request, tmp_path):
    """The transports whose participants run side by side in real time."""
    return Place(request.param, tmp_path)


def equal(arrivals):
    """Agreed where all propose the same, else who differs or is missing; the coordinator's rank is the value."""
    if arrivals.differ:
        arrivals.probe()
        missing = arrivals.unresponsive(besides=arrivals.absent)
        first, *others = sorted(arrivals.proposals.items(), key=lambda item: -len(item[1]))
        odd = tuple(rank for _, ranks in others for rank in ranks)
        documents = [arrivals.document(digest) for digest, _ in (first, *others)]
        return lost(missing, "had arrived") if missing else Outcome("different", odd, value=documents)
    return or_missing(lambda _: Outcome(value="all the same"), 1, "meet")(arrivals)


def attempt(channel, rank, data, *, name="meet", seconds=1.0, participants=THREE, digest="same", **more):
    """One round of two steps and its end: what this rank heard at the step that ended it."""
    found = Round(channel, name, participants, rank, **more)
    proposal = Proposal(digest, lambda: f'{{"plan": "{digest}"}}', data)
    outcome = found.step("agree", proposal, equal, WaitPolicy(seconds))
    if outcome.agreed:
        texts = or_missing(lambda arrivals: Outcome(value=arrivals.texts), seconds, "meet")
        outcome = found.step("make", Proposal(text=data), texts, WaitPolicy(seconds))
    found.leave(outcome)
    return found.epoch, outcome


def retry(channel, rank, name="meet"):
    """A round after one that went wrong: it must give the texts of these attempts, and no others."""
    return attempt(channel, rank, f"new {rank}", name=name, seconds=20)[1]


def after(channel, ranks, participants=THREE):
    """Wait until these ranks have arrived at the first step of a first epoch."""
    limits.until(lambda: set(ranks).isdisjoint(channel.absent("meet/0/agree/arrived", participants)))


def texts(data, ranks=THREE):
    """What the second step concludes when all of these ranks gave this."""
    return {str(rank): [f"{data} {rank}"] for rank in ranks}


# -- all arrive --------------------------------------------------------------------------------------------------


def test_all_get_one_outcome_and_nothing_is_left(place):
    """3 participants, two rounds of one name: the same outcome on all, of this round's texts; one key stays.

    In the second they are in another order, as on a permuted mesh.
    """

    def program(rank, channel):
        orders = {"first": THREE, "second": (2, 0, 1)}
        return [attempt(channel, rank, f"{data} {rank}", seconds=60, participants=orders[data]) for data in orders]

    for first, second in place.run(program, THREE):
        assert first == (0, Outcome(value=texts("first")))
        assert second == (1, Outcome(value=texts("second")))
    assert place.left() in (1, None), "the number of the next epoch"


@pytest.mark.parametrize("size", [1, 2, 5, _BLOCK, 2 * _BLOCK + 1, 6 * _BLOCK])
def test_any_number_of_participants(tmp_path, size):
    """1 to 186 participants, from rank 7 on: exactly one completes each set, and all texts are there."""
    place = Place("hash", tmp_path)
    ranks = range(7, 7 + size)
    answers = place.run(
        lambda rank, channel: attempt(channel, rank, f"x {rank}", seconds=30, participants=ranks), ranks
    )
    assert answers == [(0, Outcome(value=texts("x", ranks)))] * size


@pytest.mark.parametrize("size", [8, 31])
def test_store_operations_are_flat(tmp_path, size):
    """Two steps on a TCPStore: nine operations a participant; at most 40 for who coordinates or leaves last."""

    def program(rank, channel):
        store = Counting(channel._store)
        attempt(StoreChannel(store), rank, "", seconds=limits.LONG, participants=range(size))
        return store.calls.total()

    counted = sorted(Place("tcp", tmp_path).run(program, range(size)))
    assert counted[: size - 3] == [9] * (size - 3)
    assert counted[-1] <= 40


def test_an_outcome_is_received_at_once_by_those_that_wait_long(real):
    """3 participants with a minute of patience and more, one of which arrives later: none waits for its end."""

    def program(rank, channel):
        if rank == 1:
            after(channel, (0, 2))
        started = time.monotonic()
        return attempt(channel, rank, f"x {rank}", seconds=90)[1], time.monotonic() - started

    for outcome, seconds in real.run(program, THREE):
        assert outcome == Outcome(value=texts("x"))
        assert seconds < limits.AT_ONCE


# -- some do not -------------------------------------------------------------------------------------------------


def test_one_is_absent(place):
    """3 participants, one never comes: the others say so when their patience ends; a retry has another epoch."""

    def program(rank, channel):
        first = attempt(channel, rank, f"old {rank}", seconds=0.3) if rank != 1 else None
        if rank != 1:
            channel.write(f"gave up/{rank}", "yes")
        else:
            assert all(channel.wait(f"gave up/{other}", limits.LONG) for other in (0, 2))
        return first, attempt(channel, rank, f"new {rank}", seconds=60)

    answers = place.run(program, THREE)
    for rank in (0, 2):
        epoch, outcome = answers[rank][0]
        assert (epoch, outcome.reason, outcome.ranks, outcome.missing) == (0, "missing", (1,), (1,))
    assert [answer[1] for answer in answers] == [(1, Outcome(value=texts("new")))] * 3
    assert place.left() in (3, None), "the number of the next epoch, and what this test wrote"


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("victim", ["first", "last"])
def test_one_dies_at_each_operation(real, victim, monkeypatch):
    """3 participants, one dies at each of its operations: the others name it and nobody else, and a retry is clean."""
    if real.transport not in ("tcp", "file") and not ALL:
        pytest.skip("two transports; RANKMESH_TEST_SWEEP=all (make test-sweeps SWEEP=all) takes all of them")
    monkeypatch.setattr(rounds, "_MOMENT", 1.5)
    size, at = 3, 0
    while True:
        at += 1
        name = f"meet {at}"
        done = []

        def program(rank, channel, at=at, name=name, done=done):
            if rank == 1:
                channel, counted = mortal(channel, at)
            time.sleep(0.05 * ((rank == 1) == (victim == "last")))
            started = time.monotonic()
            _, outcome = attempt(channel, rank, f"old {rank}", name=name)
            if rank == 1:
                done.append(counted.calls)
            return outcome, time.monotonic() - started

        answers = real.run(program, THREE)
        others = [answers[rank] for rank in range(size) if rank != 1]
        for outcome, seconds in others:
            assert outcome.agreed or outcome.missing == (1,), (at, answers)
            assert seconds < limits.AT_ONCE
        again = real.run(lambda rank, channel, name=name: retry(channel, rank, name), THREE)
        assert again == [Outcome(value=texts("new"))] * 3, (at, again)
        if done:
            break
        assert isinstance(answers[1], Died), answers
    assert at > 6, "so many operations has a participant at least"


def test_one_withdraws(real):
    """3 participants, the conclusion of the last fails: the others hear at once who stopped, and a retry is clean."""

    def broken(_):
        raise KeyboardInterrupt("by the user")

    def program(rank, channel):
        found = Round(channel, "meet", THREE, rank)
        if rank == 2:
            after(channel, (0, 1))
        started = time.monotonic()
        conclude = broken if rank == 2 else equal
        try:
            outcome = found.step("agree", Proposal("same"), conclude, WaitPolicy(30))
            found.leave(outcome)
        except KeyboardInterrupt:
            outcome = None
        return outcome, time.monotonic() - started, retry(channel, rank)

    answers = real.run(program, THREE)
    for outcome, seconds, again in (answers[0], answers[1]):
        assert (outcome.reason, outcome.ranks) == ("withdrawn", (2,))
        assert "by the user" in outcome.message
        assert seconds < limits.AT_ONCE
        assert again == answers[2][2] == Outcome(value=texts("new"))


def test_the_first_announcement_counts(place):
    """A coordinator that was slow receives what another has announced meanwhile, and so do all who read it."""

    def program(_, channel):
        return [channel.announce("outcome", text) for text in ("first", "second")], channel.read("outcome")

    assert place.run(program, [0]) == [(["first", "first"], "first")]


# -- some differ -------------------------------------------------------------------------------------------------


def test_proposals_that_differ(place):
    """3 participants, one of which proposes something else: all hear which, and both documents; a retry is clean."""

    def program(rank, channel):
        first = attempt(channel, rank, f"old {rank}", seconds=60, digest="b" if rank == 1 else "a")
        return first[1], attempt(channel, rank, f"new {rank}", seconds=60)

    different = Outcome("different", (1,), value=[{"plan": "a"}, {"plan": "b"}])
    assert place.run(program, THREE) == [(different, (1, Outcome(value=texts("new"))))] * 3
    assert place.left() in (1, None)


def test_two_with_one_rank(real):
    """Ranks 0, 1, 2 of 4 wait when a second process of rank 1 comes: all hear at once which two; a retry is clean."""
    names = iter(["process 7", "process 8"])

    def program(rank, channel):
        identity = next(names) if rank == 1 else f"process {rank}"
        if identity == "process 8":
            after(channel, THREE, range(4))
        found = Round(channel, "meet", range(4), rank, identity=identity)
        outcome = found.step("agree", Proposal("same"), equal, WaitPolicy(20))
        found.leave(outcome)
        return outcome

    answers = real.run(program, [0, 1, 1, 2])
    for outcome in answers:
        assert (outcome.reason, outcome.ranks) == ("twice", (1,)), answers
        assert "process 7" in outcome.message
        assert "process 8" in outcome.message
    assert real.run(lambda rank, channel: retry(channel, rank), THREE) == [Outcome(value=texts("new"))] * 3


@pytest.mark.few(6)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_another_size(real, order):
    """Two that expect three participants and one that expects four: nobody agrees, nobody waits past the limit."""

    def program(rank, channel):
        time.sleep(0.1 * order.index(rank))
        size = 4 if rank == 2 else 3
        found = Round(channel, "meet", range(size), rank)

        def conclude(arrivals):
            return Outcome("different" if arrivals.differ else "missing", value=sorted(arrivals.texts))

        proposal = Proposal(f"{size} ranks", text="here")
        outcome = found.step("agree", proposal, conclude, WaitPolicy(20, if_odd=0.5))
        found.leave(outcome)
        return outcome

    assert {answer.reason for answer in real.run(program, THREE)} == {"different"}


# -- what others write -------------------------------------------------------------------------------------------

GARBAGE = {
    "pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x05exit 1\x85R.".decode("latin1"),
    "text": "hello",
    "a number": "7",
    "a list": "[1, 2]",
    "an object without a reason": "{}",
    "a reason of no round": '{"reason": "yes"}',
    "ranks that are no list": '{"reason": "missing", "ranks": 3}',
    "deep nesting": "[" * 100_000,
    "a probe by nobody": '{"probe": "x", "seconds": 1}',
    "too large": '{"reason": "agreed", "message": "' + "a" * 300_000 + '"}',
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_no_rank_writes_is_refused(place, what, monkeypatch):
    """One participant of two, whose outcome another program has written: an error that says whose keys they are."""
    monkeypatch.setattr(stores, "LARGEST", 2**18)

    def program(rank, channel):
        channel.write("meet/0/agree/outcome", GARBAGE[what])
        return attempt(channel, rank, "x", seconds=60, participants=range(2))

    (error,) = place.run(program, [0])
    assert isinstance(error, AgreementError), error
    assert "another program writes under rankmesh's keys" in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize("number", [-1, 16, 99])
def test_a_number_that_is_no_set_is_refused(tmp_path, number):
    """A counter that no set of two participants adds up to is not read as one."""
    store = Place("hash", tmp_path)._store()
    store.add("rankmesh/job/set/0", number)
    with pytest.raises(AgreementError, match="which is not a set of ranks"):
        StoreChannel(store).absent("set", range(2))


@pytest.mark.parametrize("size", [2, _BLOCK, _BLOCK + 9])
def test_who_arrives_again_changes_nothing(place, size):
    """2 to 40 participants, one arrives four times, as in retries: the set has each once."""

    def program(_, channel):
        for rank in (0, 1, 0, 0, 0):
            channel.arrive("set", range(size), rank)
        absent = channel.absent("set", range(size))
        completing = [rank for rank in range(2, size) if channel.arrive("set", range(size), rank)]
        return absent, completing, channel.arrive("set", range(size), 1), channel.absent("set", range(size))

    assert place.run(program, [0]) == [(list(range(2, size)), [size - 1] if size > 2 else [], True, [])]


@pytest.mark.few(3)
def test_a_retry_in_the_same_epoch(real):
    """3 participants, one of which has arrived in a call that it gave up, and tries again: all agree."""

    def program(rank, channel):
        if rank == 1:
            assert not Round(channel, "meet", THREE, rank).arrive("agree", Proposal("same", text="x 1"))
            channel.write("given up", "yes")
        assert channel.wait("given up", limits.LONG)
        # Rank 1 has arrived in it: the others may conclude before it asks which epoch it is.
        return attempt(channel, rank, f"x {rank}", seconds=60, epoch=0)

    assert {outcome.reason for _, outcome in real.run(program, THREE)} == {"agreed"}


def test_the_texts_of_a_large_world_are_read():
    """16,384 participants of a TCPStore, each with a text of 1.7 kB: more than the store takes at once."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = StoreChannel(server)
    text = "x" * 1700
    for rank in range(16_384):
        channel.post("texts", rank, text)
    assert channel.posted("texts") == {rank: [text] for rank in range(16_384)}


def test_gather_gives_all_of_it_to_all(place):
    """3 participants: what one concludes from the data of all is what each of them gets, twice."""

    def program(rank, channel):
        return [gather(Round(channel, "say", THREE, rank), [rank, what], sorted, 20, "say") for what in "ab"]

    assert place.run(program, THREE) == [[[[0, "a"], [1, "a"], [2, "a"]], [[0, "b"], [1, "b"], [2, "b"]]]] * 3


# -- without arriving --------------------------------------------------------------------------------------------


@pytest.mark.few(3)
def test_one_works_on_while_it_answers_a_probe(real):
    """3 participants, one of which works on while a probe comes: it is answered, and its text counts."""

    def who_responds(arrivals):
        arrivals.probe(1.0)
        absent = arrivals.still_absent(1.0)
        return Outcome(value=[absent, arrivals.unresponsive(), arrivals.texts])

    def program(rank, channel):
        found = Round(channel, "meet", THREE, rank, identity=f"process {rank}")
        found.introduce()
        channel.write(f"worked/{rank}", "yes")
        assert all(channel.wait(f"worked/{other}", limits.LONG) for other in THREE)
        assert all(found.seen(other) for other in THREE)
        if rank == 1:
            found.arrive("work", Proposal(text="ended 1"))
        received = found.conclude("work", who_responds) if rank == 1 else None
        while not any(step.prober == 1 for step in found.steps) and rank != 1:
            assert found.listen("work", 0.01) is None
        if rank == 0:
            assert not found.arrive("work", Proposal(text="ended 0"))
            received = found.conclude("work", who_responds)  # as one that has failed meanwhile
        end = time.monotonic() + limits.LONG
        while received is None and time.monotonic() < end:
            received = found.listen("work", 0.01)
        found.leave(received)
        return received

    texts = {str(rank): [f"ended {rank}"] for rank in (0, 1)}
    assert real.run(program, THREE) == [Outcome(value=[[2], [], texts])] * 3
    assert real.left() in (4, None), "the number of the next epoch, and what this test wrote"


@pytest.mark.few(3)
def test_one_that_listens_learns_that_the_prober_is_lost(real, monkeypatch):
    """A participant that answers a probe of another one, which then dies: it is named when its time is over."""
    monkeypatch.setattr(rounds, "_MOMENT", 0.3)

    def die(arrivals):
        arrivals.probe(0.1)
        raise Died

    def program(rank, channel):
        found = Round(channel, "meet", range(2), rank)
        if rank == 1:
            return found.conclude("work", die)
        began, received = time.monotonic(), None
        while received is None and time.monotonic() < began + limits.LONG:
            received = found.listen("work", 0.01)
        return received

    survivor, died = real.run(program, range(2))
    assert isinstance(died, Died)
    assert (survivor.reason, survivor.missing) == ("lost", (1,))


def test_a_second_process_is_refused_when_it_introduces_itself(real):
    """Two processes of rank 1: the second is refused before it arrives, and deletes nothing of the first one's."""

    def program(rank, channel):
        found = Round(channel, "meet", range(2), 1, identity=f"process {rank}")
        limits.until(lambda: rank == 0 or found.seen(1))
        found.introduce()
        return found

    first, second = real.run(program, range(2))
    assert isinstance(second, AgreementError)
    assert "two processes claim rank 1: process 0 and process 1" in str(second)
    assert first.seen(1)


@pytest.mark.long
@pytest.mark.parametrize("comes", [True, False])
def test_one_reports_and_another_in_its_place(real, comes):
    """3 participants, rank 1 is to conclude: it does without waiting; where it is away, one of the others does."""

    def program(rank, channel):
        found = Round(channel, "meet", THREE, rank, epoch=0)
        if rank == 1 and not comes:
            return None
        return found.reported("result", 1, lambda _: Outcome(value=rank), limits.LONG if comes else 0.2)

    answers = [answer.value for answer in real.run(program, THREE) if answer is not None]
    assert answers in ([[1] * 3] if comes else [[0] * 2, [2] * 2])


def test_forget_leaves_nothing(place):
    """2 of 3 participants, a third never leaves: one forgets the round, and not even its number is left."""

    def program(rank, channel):
        found = Round(channel, "meet", THREE, rank, epoch=0)
        outcome = found.step("agree", Proposal("same"), equal, WaitPolicy(0.2))
        last = found.leave(outcome)
        channel.write(f"left/{rank}", "yes")
        assert channel.wait(f"left/{2 - rank}", limits.LONG)
        channel.delete([f"left/{2 - rank}"])
        if rank == 0:
            Round(channel, "meet", THREE, rank, epoch=0).forget(["agree"])
        return last

    assert place.run(lambda rank, channel: program(rank, channel) if rank != 1 else False, THREE) == [False] * 3
    assert place.left() in (0, None)


# -- a store that stands still ------------------------------------------------------------------------------------


class _Still:
    """A remote channel that stands still until it is let go."""

    remote = True

    def __init__(self):
        self.goes_on, self.calls = threading.Event(), 0

    def read(self, key):
        self.calls += 1
        self.goes_on.wait()
        return "the store's"


def test_a_channel_that_stands_still_is_asked_again_later(monkeypatch):
    """While it owes an answer nobody waits for it; after that it counts as before."""
    monkeypatch.setattr(stores, "PATIENCE", 0.1)
    store = _Still()
    bounded = BoundedChannel(store)
    for why in ("no answer within", "still under way"):
        with pytest.raises(ChannelLost, match=why):
            bounded.ask(lambda channel: channel.read("word"))
    assert store.calls == 1
    store.goes_on.set()
    while not bounded._is_answered():
        time.sleep(0.001)
    assert bounded.ask(lambda channel: channel.read("word")) == "the store's"
