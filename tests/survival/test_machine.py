"""The state machine of a member: laws of any order of events, tried with machines alone."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sweeping import ALL

from rankmesh.errors import ConnectError
from rankmesh.rendezvous import Outcome
from rankmesh.survival.agreement import Report, conclude
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.machine import Abort, Announce, Enter, Left, Machine, Stop
from rankmesh.survival.members import Members

LAYOUT = "tp=1,dp=*"


class Network:
    """Members whose messages arrive in any order, twice, or never; the round is one call, whoever takes part."""

    def __init__(self, size, spares, data):
        self.data, self.under_way, self.lost, self.ended = data, [], set(), {}
        first = Members.first(LAYOUT, world_size=size, spares=spares, shrink="dp")
        self.machines = {member: Machine() for member in range(size)}
        self.aborts = {member: [] for member in range(size)}
        for member, machine in self.machines.items():
            machine.begin(member, first)

    def living(self):
        """The members that are neither lost nor have left the job."""
        return [member for member in self.machines if member not in self.lost and member not in self.ended]

    def carry_out(self, member, actions):
        """What the driver does: messages are under way from now on."""
        for action in actions:
            if isinstance(action, Abort):
                assert action.epoch == self.machines[member].epoch
                self.aborts[member].append(action.epoch)
            else:
                assert member not in action.members
                self.under_way += [(other, json.dumps(action.message)) for other in action.members]

    def deliver(self, at, *, again=False):
        """One message arrives."""
        member, text = self.under_way[at] if again else self.under_way.pop(at)
        if member in self.living():
            reply, actions = self.machines[member].received(json.loads(text), None)
            assert reply == {"epoch": str(self.machines[member].epoch)}
            self.carry_out(member, actions)

    def round(self, error):
        """All that live have ended the epoch, and agree; some of them left it with an ``error``."""
        machines = [self.machines[member] for member in self.living()]
        (epoch,) = {machine.epoch for machine in machines}
        lefts = {machine.member: error.get(machine.member, Left()) for machine in machines}
        snapshots = dict.fromkeys(machines[0].history, (1, 2))
        reports = {
            machine.member: machine.report(lefts[machine.member], snapshots, {}, 2, loads=False) for machine in machines
        }
        history = machines[0].history
        ended = tuple(sorted(self.lost & {*history[epoch.number].all}))
        reports = {member: replace(report, ended=ended) for member, report in reports.items()}
        outcome = conclude(history, epoch.number, reports, (), machines[0].raised)
        for machine in machines:
            action = machine.concluded(outcome, lefts[machine.member], took_part=True)
            if isinstance(action, Stop):
                self.ended[machine.member] = action
        return outcome


@settings(max_examples=400 if ALL else 60)
@given(st.data())
def test_any_order_of_events(data):
    """Losses, errors, evictions and messages that are late, repeated or lost: an epoch is aborted once."""
    size, spares = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 2))
    network = Network(size, min(spares, size - 1), data)
    for _ in range(data.draw(st.integers(1, 4))):
        living = network.living()
        if not living:
            break
        errors = {}
        for _ in range(data.draw(st.integers(1, 6))):
            what = data.draw(st.sampled_from(["loss", "error", "evict", "deliver", "again"]))
            member = data.draw(st.sampled_from(network.living()))
            machine = network.machines[member]
            if what == "loss" and len(network.living()) > 1:
                network.lost.add(member)
            elif what == "error":
                network.carry_out(member, machine.end())
                errors[member] = Left(error=ValueError("a bug"))
            elif what == "evict":
                other = data.draw(st.sampled_from(machine.members.ranks))
                network.carry_out(member, machine.diagnosed(machine.epoch, "late", (other,), unlimited=False))
            elif network.under_way:
                at = data.draw(st.integers(0, len(network.under_way) - 1))
                network.deliver(at, again=what == "again")
        epochs = {network.machines[member].epoch for member in network.living()}
        for member in network.living():  # whoever has not received the message notices the loss itself
            network.carry_out(member, network.machines[member].end())
            assert network.machines[member].has_ended
        outcome = network.round(errors)
        assert len(epochs) == 1
        survivors = [network.machines[member] for member in network.living()]
        assert all(machine.epoch == epochs.copy().pop().after(outcome.text) for machine in survivors)
        assert len({str(machine.members) for machine in survivors}) <= 1
        assert all(machine.member in machine.members.all for machine in survivors)
    for member, aborted in network.aborts.items():
        assert len(set(aborted)) == len(aborted), member
        assert [epoch.number for epoch in aborted] == sorted(epoch.number for epoch in aborted)


def begun(member=0):
    """A member of a job that has begun."""
    machine = Machine()
    machine.begin(member, JOB)
    return machine


def end(epoch, **how):
    """The message that an epoch has ended."""
    return {"what": "end", "epoch": str(epoch), "over": False, "suspects": [], "evicted": {}, **how}


JOB = Members.first(LAYOUT, world_size=3, spares=1)
GOES_ON = conclude({0: JOB}, 0, {0: Report(steps={0: (6, 7)}, committed=True), 2: Report()})  # without member 1


def test_the_end_of_an_epoch_that_this_member_is_not_in_yet():
    """The others have agreed, and lost one more: it is noted, and counts once this member has the outcome."""
    machine = begun()
    following = Epoch().after(GOES_ON.text)
    assert machine.received(end(following, suspects=[2]), None)[1] == []
    assert not machine.has_ended
    machine.end()
    assert isinstance(machine.concluded(GOES_ON, Left(), took_part=True), Enter)
    assert (machine.epoch, machine.step, machine.source) == (following, 7, 0)
    assert machine.has_ended
    assert machine.epoch_end.suspects == {2}


def test_a_message_before_the_members_are_known():
    """A member that introduces itself late: the epoch has ended when it begins, and it replies at once."""
    machine = Machine()
    assert machine.received(end(Epoch()), None) == ({"epoch": "0"}, [])
    assert machine.received({"what": "join", "contact": {}}, None) == ({"epoch": "0"}, [])
    machine.begin(0, Members.first(LAYOUT, world_size=2))
    assert machine.has_ended


def test_an_outcome_is_of_one_epoch_alone():
    """Two epochs of one number follow different agreements: each has an outcome of its own."""
    machine = begun()
    machine.end()
    machine.concluded(GOES_ON, Left(), took_part=True)
    asked = {"what": "outcome", "epoch": "0"}
    assert machine.received(asked, 2)[0] == {"epoch": str(machine.epoch), "outcome": GOES_ON.text, "server": 2}
    assert machine.received({**asked, "epoch": "0-other"}, None)[0]["outcome"] is None
    assert machine.received(end("0-other"), None)[1] == []


def test_a_late_message_ends_no_later_epoch():
    """What was sent about an epoch arrives in the next one."""
    machine = begun()
    machine.end()
    machine.concluded(GOES_ON, Left(), took_part=True)
    assert machine.received(end(Epoch(), evicted={"0": "late"}), None)[1] == []
    assert machine.end(epoch=Epoch(), suspects=[2]) == []
    assert not machine.has_ended


@pytest.mark.parametrize("message", [{}, {"what": "end"}, {**end("0"), "epoch": "x"}, {**end("0"), "suspects": 3}])
def test_messages_that_say_nothing(message):
    """The reply is where this member is, and nothing ends."""
    machine = begun()
    assert machine.received(message, None) == ({"epoch": "0"}, [])
    assert not machine.has_ended


BUG, CUT = ValueError("a bug"), RuntimeError("cut")


@pytest.mark.parametrize(
    ("left", "outcome", "raised"),
    [
        (Left(error=BUG), Outcome(ranks=(0,), value={}), BUG),
        (Left(error=CUT), Outcome(ranks=(0,), value={}), CUT),
        (Left(error=CUT), Outcome(ranks=(0,), missing=(0,), value={}), "left out of the job, since it did not respond"),
        (Left(), Outcome(ranks=(0,), value={}), "left out of the job, since it did not respond"),
        (Left(error=BUG), Outcome("failed", message="too few"), BUG),
        (Left(error=CUT), Outcome("failed", message="too few"), "the job ends, since too few"),
        (Left(error=CUT), Outcome("failed", (0,), fields=("error",), message="again"), CUT),
        (Left(error=CUT), Outcome(value={"over": True}), None),
    ],
)
def test_how_a_member_stops(left, outcome, raised):
    """With its own error, with a promised one whose cause its own is, or well."""
    machine = begun()
    machine.end()
    stop = machine.concluded(outcome, left, took_part=True)
    assert isinstance(stop, Stop)
    if isinstance(raised, str):
        assert isinstance(stop.error, ConnectError)
        assert raised in str(stop.error)
        assert stop.error.__cause__ is left.error
    else:
        assert stop.error is raised


def test_why_a_member_is_evicted():
    """The reason that the others gave, also where the job ends."""
    for outcome in (Outcome(ranks=(0,), value={}), Outcome("failed", message="too few")):
        machine = begun()
        machine.received(end(Epoch(), evicted={"0": "the others waited for it"}), None)
        stop = machine.concluded(outcome, Left(), took_part=False)
        assert "member 0 was left out of the job, since the others waited for it" in str(stop.error)


def test_announcements_name_the_others_once():
    """The first end is sent to all others; later ones only with what the others may not know."""
    machine = begun(member=1)
    first = machine.end()
    assert [type(action) for action in first] == [Abort, Announce]
    assert first[1].members == (0, 2)
    assert machine.end() == []
    assert [type(action) for action in machine.end(suspects=[2])] == [Announce]
