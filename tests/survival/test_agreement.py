"""What members conclude from their reports, as laws: of any plan, any losses, and any way in which a network is cut."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.survival.test_members import jobs
from tests.sweeping import ALL

from rankmesh.errors import PlanError
from rankmesh.survival import agreement
from rankmesh.survival.agreement import CONDITIONS, Report, conclude, may_go_on
from rankmesh.survival.members import Members

EPOCH = 3
MANY = settings(max_examples=400 if ALL else 40)


@st.composite
def histories(draw):
    """The members of an epoch and, in some, of the one before it, of which a member was lost since."""
    members = draw(jobs())
    if draw(st.booleans()):
        return {EPOCH: members}
    try:
        following = members.without({draw(st.sampled_from(members.all))})
    except PlanError:
        return {EPOCH: members}
    return {EPOCH - 1: members, EPOCH: following}


@st.composite
def reports(draw, history, member):
    """What a member of the last epoch may say."""
    last = draw(st.integers(0, 3))
    steps = {}
    for epoch, members in history.items():
        if member in members.ranks and draw(st.booleans()):
            steps[epoch] = tuple(sorted({max(last - 1, 0), last}))
    torn = draw(st.sampled_from(["", "RuntimeError: closed"]))
    error = "" if torn else draw(st.sampled_from(["", "", "", "ValueError: a bug"]))
    return Report(
        done=not torn and not error and draw(st.integers(0, 9)) == 0,
        error=error,
        torn=torn,
        first=bool(torn) and draw(st.booleans()),
        steps=steps,
        commits=dict(enumerate(steps.get(EPOCH, ()), start=last)),
        committed=bool(steps),
        at=draw(st.integers(max(last - 1, 0), last)),
        evicted=draw(st.sampled_from([(), (), (), history[EPOCH].all[:1], history[EPOCH].all[-1:]])),
        unclear=draw(st.sampled_from(["", "", "", "crosswise: a ring"])),
    )


@st.composite
def endings(draw):
    """A history, the reports of those that arrive, and those of the others that are known to have ended."""
    history = draw(histories())
    away = draw(st.one_of(st.sets(st.sampled_from(history[EPOCH].all), max_size=most) for most in (0, 2, 30)))
    arrived = set(history[EPOCH].all) - away or {min(away)}
    given_ = {member: draw(reports(history, member)) for member in sorted(arrived)}
    absent = sorted(set(history[EPOCH].all) - arrived)
    ended = draw(st.sets(st.sampled_from(absent))) if absent else set()
    witness = draw(st.sampled_from(sorted(arrived)))
    return history, given_ | {witness: replace(given_[witness], ended=tuple(sorted(ended)))}, ended


def goes_on(outcome):
    """Whether the job has a next epoch."""
    return outcome.agreed and not outcome.value.get("over")


@st.composite
def partitions(draw):
    """Members on up to 4 hosts, whether each is dead, and the side that it is on: no side reaches another one."""
    size, spares = draw(st.integers(1, 7)), draw(st.integers(0, 2))
    hosts = {member: f"host {draw(st.integers(0, 3))}" for member in range(size)}
    members = Members.first("dp=*", world_size=size, spares=min(spares, size - 1), shrink="dp", hosts=hosts)
    side = {member: draw(st.sampled_from(["dead", "a", "b", "c"])) for member in members.all}
    return members, side


def _ended_of(members, side, here):
    """The dead, as members of one side report those of their own hosts, all or some of them."""
    dead = {member for member in members.all if side[member] == "dead"}
    return {one: tuple(sorted(d for d in dead if members.hosts[d] == members.hosts[one])) for one in here}


@MANY
@given(partitions(), st.data())
def test_no_split_brain(partition, data):
    """Whichever members die and cannot reach each other, and whatever refuses connections: at most one side goes on."""
    members, side = partition
    outcomes = []
    for which in "abc":
        if here := [member for member in members.all if side[member] == which]:
            ended = _ended_of(members, side, here)
            known = {one: tuple(d for d in ended[one] if data.draw(st.booleans())) for one in here}
            given_ = {
                one: replace(data.draw(reports({EPOCH: members}, one)), done=False, ended=known[one]) for one in here
            }
            gone = data.draw(st.sets(st.sampled_from(members.all)))
            outcomes.append(conclude({EPOCH: members}, EPOCH, given_, gone - set(here)))
    assert sum(map(goes_on, outcomes)) <= 1


@MANY
@given(partitions())
def test_deaths_alone_end_no_job_that_may_go_on(partition):
    """All that live reach each other: they go on unless hosts that died whole had half of the members that may live."""
    members, side = partition
    here = [member for member in members.all if side[member] != "dead"]
    assume(here)
    ended = _ended_of(members, side, here)
    outcome = conclude({EPOCH: members}, EPOCH, {one: Report(ended=ended[one]) for one in here})
    unseen = [one for one in members.all if members.hosts[one] not in {members.hosts[other] for other in here}]
    few = len(unseen) > len(here) or (len(unseen) == len(here) and min(unseen) < min(here))
    assert goes_on(outcome) == (not few), outcome
    if few:
        part = "fewer than half" if len(unseen) > len(here) else f"half, but not the one with member {min(unseen)}"
        assert outcome.reason == "missing"
        assert f"members that may live are here, {part}; the others may go on without them" in outcome.message
        assert "start spares on further hosts" in outcome.message


@pytest.mark.parametrize("size", [*range(1, 6), *([6, 7] if ALL else [])])
def test_one_side_at_most_of_every_partition(size):
    """Every way in which up to 7 members die or are cut into sides, with all that each side may know of the dead."""
    everyone = range(size)
    for side in product(range(4), repeat=size):  # 0 is dead
        dead = [member for member in everyone if side[member] == 0]
        on = 0
        for which in range(1, max(side) + 1):
            here = [member for member in everyone if side[member] == which]
            known = (subset for few in range(len(dead) + 1) for subset in combinations(dead, few))
            on += bool(here) and any(may_go_on(here, sorted(set(everyone).difference(ended))) for ended in known)
        assert on <= 1, side


class Hosts:
    """A job whose members die, stop, wake and are cut from each other, epoch by epoch; ``next`` has what follows each.

    Whoever stood still in an epoch reports no deaths in it, as ``Rounds`` has it.
    """

    def __init__(self, members):
        self.side = dict.fromkeys(members.hosts.values(), 0)
        self.history, self.next = {0: members}, {}
        self.epoch = dict.fromkeys(members.all, 0)  # of the members that live and have not left
        self.stopped, self.stood_still, self.dead = set(), set(), set()
        self.hosts = members.hosts

    def lose(self, member):
        """A process ends: it is killed, or has left the job."""
        self.epoch.pop(member, None)
        self.dead.add(member)

    def agree(self, side):
        """The members of one side that run hold a round of the oldest epoch that one of them is in."""
        here = [one for one in self.epoch if self.side[self.hosts[one]] == side and one not in self.stopped]
        if not here:
            return
        epoch = min(self.epoch[one] for one in here)
        arrived = [one for one in here if self.epoch[one] == epoch]
        if len(arrived) < len(here):  # the others reply that they are in a later one
            for one in arrived:
                self.lose(one)
            return
        reports = {one: Report(ended=self._ended(one, self.history[epoch])) for one in arrived}
        outcome = conclude({epoch: self.history[epoch]}, epoch, reports)
        if not goes_on(outcome):
            for one in arrived:
                self.lose(one)
        elif outcome.ranks:
            number = len(self.history)
            assert self.next.setdefault(epoch, number) == number, "two jobs"
            self.history[number] = self.history[epoch].following(outcome.value)
            self.epoch.update(dict.fromkeys(arrived, number))
            self.stood_still -= set(arrived)

    def _ended(self, one, members):
        seen = self.dead.intersection(members.all) if one not in self.stood_still else ()
        return tuple(sorted(other for other in seen if self.hosts[other] == self.hosts[one]))


@settings(max_examples=2000 if ALL else 100)
@given(st.data())
def test_every_epoch_is_followed_by_one(data):
    """Hosts are cut off and reached again, members die, stop and wake, in any order: never two jobs from one epoch."""
    size = data.draw(st.integers(2, 5))
    hosts = {member: f"host {data.draw(st.integers(0, 2))}" for member in range(size)}
    job = Hosts(Members.first("dp=*", world_size=size, shrink="dp", hosts=hosts))
    for _ in range(data.draw(st.integers(1, 4))):
        living = sorted(job.epoch)
        if not living:
            return
        some = st.sets(st.sampled_from(living))
        for one in data.draw(some):
            job.lose(one)
        stopped = data.draw(some)
        job.stood_still |= stopped
        job.stopped = stopped | (job.stopped if data.draw(st.booleans()) else set())
        job.side = {host: data.draw(st.integers(0, 1)) for host in sorted(job.side)}
        for side in (0, 1):
            job.agree(side)


def test_a_member_that_was_stopped_follows_nobody():
    """The others went on without it, and have ended since, as it sees: it may not start where it was stopped."""
    job = Hosts(Members.first("dp=*", world_size=3, shrink="dp", hosts=dict.fromkeys(range(3), "host")))
    job.stopped, job.stood_still = {2}, {2}
    job.agree(0)
    assert job.epoch == {0: 1, 1: 1, 2: 0}
    job.lose(0), job.lose(1), job.stopped.clear()
    job.agree(0)
    assert (job.epoch, job.next) == ({}, {0: 1})


def test_why_members_are_left_out():
    """Evidence where the member itself or another one on its host reports it; else a guess."""
    job = Members.first("dp=*", world_size=9, shrink="dp")
    given_ = {member: Report(ended=(6,) if member == 2 else ()) for member in range(6)}
    given_[1] = Report(error="ValueError: a bug")
    reasons = conclude({0: job}, 0, given_, (7,)).value["reasons"]
    assert reasons == {
        "1": "evidence: it raised ValueError: a bug",
        "6": "evidence: its process has ended, as member 2 on its host reports",
        "7": "guess: its host refuses connections, and no member there reports that it has ended",
        "8": "guess: it does not reply",
    }


def _who_stays(history, given_, outcome):
    """Members of the next epoch are those that arrived, unless they raised an error or were evicted."""
    following = {*outcome.value["ranks"], *outcome.value["spares"]}
    evicted = {member for report in given_.values() for member in report.evicted}
    assert {member for member, report in given_.items() if not report.error and not report.torn} - evicted <= following
    assert following <= {member for member, report in given_.items() if not report.error} - evicted
    assert following == set(history[EPOCH].all) - set(outcome.ranks)
    # An error that may follow from the loss of another member is excused where one is lost.
    if set(history[EPOCH].all) - given_.keys() or evicted or any(report.error for report in given_.values()):
        assert {member for member, report in given_.items() if report.torn} - evicted <= following


def _every_rank_has_a_member(history, given_, outcome):
    """The next plan has the size of its members at ranks, each of which arrived; nobody is there twice."""
    ranks, spares = outcome.value["ranks"], outcome.value["spares"]
    assert len(ranks) == history[EPOCH].following(outcome.value).plan.mesh.size
    assert len({*ranks, *spares}) == len(ranks) + len(spares)
    assert {*ranks, *spares} <= given_.keys()


def _the_step_is_everyones(history, given_, outcome):
    """Each survivor that had a rank in the epoch of the snapshots has them of the step: the last one, or an error's."""
    source, step = outcome.value["source"], outcome.value["step"]

    def common(epoch):
        had = [given_[member] for member in history[epoch].ranks if member in given_.keys() - set(outcome.ranks)]
        steps = [set(report.steps.get(epoch, ())) for report in had]
        return set.intersection(*steps) if steps else set()

    if source is None:
        assert not any(report.committed for report in given_.values())
        assert step == 0
        return
    left = [given_[member] for member in outcome.ranks if member in given_]
    at = [report.at for report in left if report.error or report.first]
    of_error = {one for one in common(source) if one <= min(at, default=one)}
    assert step == max(of_error or common(source))
    assert not any(common(epoch) for epoch in history if epoch > source)


@MANY
@given(endings())
def test_the_outcome_of_any_reports(ending):
    """Who stays, where, and at which step; or why the job ends."""
    history, given_, ended = ending
    outcome = conclude(history, EPOCH, given_)
    if not outcome.agreed:
        _why_a_job_ends(history, given_, ended, outcome)
    elif goes_on(outcome):
        _who_stays(history, given_, outcome)
        _every_rank_has_a_member(history, given_, outcome)
        _the_step_is_everyones(history, given_, outcome)


@MANY
@given(endings(), st.sets(st.integers(0, 30)))
def test_over_when_all_have_returned(ending, returned):
    """The job is over when every member of the plan has returned, and not before; a spare has nothing to return."""
    history, given_, _ = ending
    ranks = history[EPOCH].ranks
    given_ = {member: replace(report, done=member in returned) for member, report in given_.items()}
    outcome = conclude(history, EPOCH, given_)
    over = outcome.agreed and outcome.value.get("over", False)
    assert over == all(member in given_ and given_[member].done for member in ranks)
    known = {**given_, min(given_): replace(given_[min(given_)], over=True)}
    concluded = conclude(history, EPOCH, known)
    # A member that has not returned knows better than one that was told so.
    everyone = all(given_[member].done for member in ranks if member in given_)
    assert (concluded.agreed and concluded.value.get("over", False)) == everyone


@MANY
@given(st.data())
def test_two_epochs_in_a_row_make_progress(data):
    """After an epoch without a step or a change of the members the next one has either, or the job ends."""
    history = data.draw(histories())
    given_, again = (
        {member: replace(data.draw(reports(history, member)), error="", done=False) for member in history[EPOCH].all}
        for _ in range(2)
    )
    outcome = conclude(history, EPOCH, given_, ())
    again = {member: replace(report, steps=given_[member].steps, commits={}) for member, report in again.items()}
    if goes_on(outcome) and not _changes(outcome, history):
        following = conclude(history, EPOCH, again, (), outcome.value["raised"])
        assert not goes_on(following) or _changes(following, history)


def _changes(outcome, history):
    """Whether the members of the next epoch are others, or at other ranks."""
    members = history[EPOCH]
    return (outcome.value["ranks"], outcome.value["spares"]) != (members.ranks, members.spares)


@MANY
@given(endings(), st.randoms())
def test_the_order_of_arrival_changes_nothing(ending, random):
    """The same outcome, to the letter, from the same reports in any order, and as they come from the store."""
    history, given_, _ = ending
    shuffled = list(given_.items())
    random.shuffle(shuffled)
    received = {member: Report.read(report.text) for member, report in shuffled}
    assert received == given_
    outcome = conclude(history, EPOCH, given_)
    assert conclude(history, EPOCH, received).text == outcome.text


def _why_a_job_ends(history, given_, ended, outcome):
    """An outcome that is no agreement says in words why, and names the members that are lost."""
    assert outcome.message
    assert set(outcome.missing) == set(history[EPOCH].all) - given_.keys()
    if outcome.reason == "missing":
        assert 2 * len(given_) <= len(history[EPOCH].all) - len(ended)


JOB = Members.first("tp=2,dp=2", world_size=5, spares=1)


def _torn(*first, raised=None, unclear="", steps=(6, 7)):
    """What follows where a collective failed on all 4 ranks, which ``first`` noticed, and nobody is missing."""
    given_ = {
        member: Report(
            torn="RuntimeError: timed out" if first else "",
            first=member in first,
            steps={0: steps},
            at=7,
            committed=True,
            unclear=unclear,
        )
        for member in JOB.ranks
    } | {4: Report()}
    return conclude({0: JOB}, 0, given_, (), raised)


def test_who_began_alone_is_left_out():
    """4 ranks and a spare: a call failed, first on one rank: it may be that machine, and the spare takes over."""
    outcome = _torn(2)
    assert outcome.ranks == (2,)
    assert outcome.value["ranks"] == (0, 1, 4, 3)


@pytest.mark.parametrize(
    ("first", "unclear"), [((0, 1), ""), ((2,), "crosswise: ranks 0, 2 wait for each other"), ((), "stuck: rank 1")]
)
def test_nobody_is_left_out_for_what_several_began(first, unclear):
    """4 ranks and a spare: calls fail on several at once, or the watch names nobody: all do the step again, once."""
    outcome = _torn(*first, unclear=unclear)
    assert outcome.agreed
    assert outcome.ranks == ()
    assert (tuple(outcome.value["ranks"]), tuple(outcome.value["spares"]), outcome.value["step"]) == (
        (0, 1, 2, 3),
        (4,),
        7,
    )
    again = _torn(*first, raised=outcome.value["raised"], unclear=unclear)
    assert (again.reason, again.ranks, again.fields) == ("failed", first, ("error",))
    assert again.message == (
        f"step 7 failed again, and no rank is known to be at fault: {unclear or 'RuntimeError: timed out'}"
    )
    assert _torn(*first, raised=outcome.value["raised"], unclear=unclear, steps=(7, 8)).agreed


def test_nobody_is_left_out_for_a_rank_that_has_returned():
    """4 ranks and a spare: one returns early, and a call of another fails first; the error names who returned."""
    given_ = {
        member: Report(
            done=member == 1, torn="RuntimeError: timed out" * (member != 1), first=member == 2, committed=True
        )
        for member in JOB.ranks
    }
    given_ = {member: replace(report, steps={0: (6, 7)}) for member, report in given_.items()} | {4: Report()}
    outcome = conclude({0: JOB}, 0, given_, ())
    assert (outcome.agreed, outcome.ranks, outcome.value["step"]) == (True, (), 7)
    again = conclude({0: JOB}, 0, given_, (), outcome.value["raised"])
    assert (again.reason, again.ranks) == ("failed", (2,))
    assert again.message.endswith("at fault: RuntimeError: timed out; train() had returned on rank 1")


@pytest.mark.parametrize(("spares", "shrink"), [(0, None), (1, None), (1, "dp")])
def test_an_error_of_every_rank_is_the_end(spares, shrink):
    """Whoever has no error of its own, as a spare, reads why the job ends; more ranks would not help."""
    members = Members.first("tp=2,dp=2", world_size=4 + spares, spares=spares, shrink=shrink)
    errors = {rank: f"Diverged: norm differs, {rank % 2}" for rank in members.ranks}
    given_ = {member: Report(error=errors.get(member, ""), steps={0: (6, 7)}, committed=True) for member in members.all}
    outcome = conclude({0: members}, 0, given_, ())
    assert (outcome.reason, outcome.ranks) == ("failed", members.ranks)
    assert outcome.message == "every rank raised an error: Diverged: norm differs, 0; Diverged: norm differs, 1"


def test_errors_of_some_ranks_are_losses():
    """Three of four ranks raise an error, and one spare is left: more ranks would help."""
    given_ = {member: Report(error="ValueError: a bug" * (member in (0, 1, 2))) for member in JOB.all}
    outcome = conclude({0: JOB}, 0, given_, ())
    assert outcome.reason == "failed"
    assert outcome.message.startswith(
        "ranks 0, 1, 2 of the plan lost their members and no spare is left; start more ranks than the plan has, or "
        "name an axis that may lose replicas, such as shrink='dp'"
    )


@pytest.mark.parametrize(
    ("other", "agree"),
    [({4: 4, 5: 5}, True), ({5: 5, 6: 6}, True), ({7: 9}, True), ({}, True), ({5: 6}, False), ({7: 5}, False)],
)
def test_commits_are_of_the_same_steps(other, agree):
    """One rank has made commits 4 and 5, of steps 4 and 5: the others are behind it, or before it, or differ."""
    given_ = {member: Report(commits=other if member == 3 else {4: 4, 5: 5}) for member in JOB.all}
    outcome = conclude({0: JOB}, 0, given_, ())
    assert outcome.agreed == agree
    assert agree or "of rank 3 is of step" in outcome.message


def _all(**one):
    return dict.fromkeys(JOB.all, Report(**one))


SNAPSHOTS = {"steps": {0: (6, 7)}, "committed": True}
BUG = {2: Report(error="ValueError: a bug", at=7, **SNAPSHOTS)}
# Of each condition reports that it holds for, with what the round before gave; each case has what is after it, too.
CASES = {
    "_over": (_all(done=True), {}),
    "_too_few": ({0: Report(error="ValueError: a bug")}, {}),
    "_different_steps": (_all(**SNAPSHOTS) | BUG | {3: Report(commits={1: 5})} | {0: Report(commits={1: 6})}, {}),
    "_same_error": (_all(**SNAPSHOTS) | BUG, {"tp=0,dp=1": "ValueError: a bug"}),
    "_no_members": (_all(error="ValueError: a bug", committed=True), {}),
    "_nothing_to_restore": (_all(committed=True), {"": "step 0"}),
    "_no_progress": (_all(**SNAPSHOTS), {"": "step 7"}),
    "_goes_on": (_all(**SNAPSHOTS), {"": "step 6"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_condition_that_holds_decides(name, monkeypatch):
    """A case of each condition, in their order: no earlier one holds, and without it the outcome is another one."""
    assert [one.__name__ for one in CONDITIONS] == list(CASES)
    given_, raised = CASES[name]
    outcome = conclude({0: JOB}, 0, given_, (), raised)
    place = list(CASES).index(name)
    monkeypatch.setattr(agreement, "CONDITIONS", CONDITIONS[: place + 1])
    assert conclude({0: JOB}, 0, given_, (), raised) == outcome
    monkeypatch.setattr(agreement, "CONDITIONS", CONDITIONS[place + 1 :])
    assert name == "_goes_on" or conclude({0: JOB}, 0, given_, (), raised) != outcome
