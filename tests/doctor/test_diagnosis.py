"""The diagnosis by recordings made by hand: each cause, what is allowed for, and causes before consequences."""

import re

import pytest
from tests.counting import calls
from tests.doctor.making import WORLD, call, document, recordings

import rankmesh as rm
from rankmesh.debug.doctor import diagnose
from rankmesh.debug.doctor.diagnosis import report
from rankmesh.debug.doctor.history import history_of
from rankmesh.debug.doctor.order import divergences
from rankmesh.debug.doctor.parting import departure

TP, DP = {}, {}
PLAN = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])
for _rank in range(4):
    for _known, _local in ((TP, PLAN.of(_rank)["tp"]), (DP, PLAN.of(_rank)["dp"])):
        _known[_rank] = ((f"{_local.name}/0/{_local.ranks[0]}", str(_local)), _local.ranks)


NOTATION = re.compile(r"(tp|dp|w)(\d+)(?::(\w+))?(?:/(\d[\dx]*))?(?:/([A-Z]\w+))?(\*?)")


def groups_of(rank):
    """What a rank's recording says of its groups."""
    return {TP[rank][0]: TP[rank][1], DP[rank][0]: DP[rank][1], WORLD: (0, 1, 2, 3)}


def job(calls, about=None):
    """The recordings of four ranks: ``calls`` gives the entries of each, or None; ``about`` what some say besides."""
    made, about = {rank: calls(rank) for rank in range(4)}, about or {}
    return recordings(
        {
            rank: document(entries, groups_of(rank), **about.get(rank, {}))
            for rank, entries in made.items()
            if entries is not None
        }
    )


def written(*texts, about=None, backend="nccl"):
    """The recordings of ranks whose calls are such as ``tp1 dp1:barrier w2/2x4* w3/Double``; a star: not over."""

    def calls(rank):
        groups = {"tp": TP[rank][0], "dp": DP[rank][0], "w": WORLD}
        for word in texts[rank].split():
            kind, number, operation, sizes, dtype, open_ = NOTATION.fullmatch(word).groups()
            sizes, name = map(int, (sizes or "4").split("x")), operation or "all_reduce"
            yield call(groups[kind], int(number), name, sizes, dtype or "Float", done=not open_, backend=backend)

    return job(lambda rank: None if texts[rank] is None else list(calls(rank)), about)


def found(recorded, plan=None):
    """Each cause in short."""
    return [(cause.cause, cause.ranks, cause.group.label, cause.call) for cause in diagnose(recorded, plan).causes]


def test_no_recording_is_no_all_clear():
    """Without a recording nothing is known, which is not the same as that nothing hangs."""
    assert diagnose({}).verdict == "no rank left a recording: the cause is not known"


def creating(names, *, operation="new_group", earlier=None):
    """Two ranks that know their pair under these names, by rank; each is in a call of it."""
    return recordings(
        {
            rank: document(
                [],
                {WORLD: (0, 1)} if operation == "new_group" else {WORLD: (0, 1), (name, "undefined"): (0, 1)},
                world_size=2,
                in_call={"operation": operation, "group": name, "site": f"train.py:{rank} in step"}
                | ({"members": [0, 1], "earlier": earlier[rank]} if operation == "new_group" else {}),
            )
            for rank, name in enumerate(names)
        }
    )


@pytest.mark.parametrize("operation", ["new_group", "all_reduce"])
def test_a_group_with_different_names_on_its_ranks(operation):
    """2 ranks wait for each other: in the creation of their group, or on NCCL in its first call."""
    result = diagnose(creating(["a", "b"], operation=operation, earlier=[2, 1]))
    (cause,) = result.causes
    assert (cause.cause, cause.ranks, cause.operation) == ("order", (0, 1), operation)
    assert cause.sites == {0: "train.py:0 in step", 1: "train.py:1 in step"}
    assert ("2 on rank 0, 1 on rank 1" in cause.evidence) is (operation == "new_group")
    assert (result.waiting, result.at_fault) == ((0, 1), ())


def test_a_group_that_a_rank_does_not_create():
    """2 ranks: one waits in new_group for the other, which is behind."""
    one, other = creating(["a", "a"], earlier=[1, 1]).values()
    other.in_call, other.groups = None, other.groups[:1]
    assert found({0: one, 1: other}) == [("late", (1,), "group of [0, 1]", 1)]


def test_groups_that_are_not_used_are_not_at_fault():
    """2 ranks have a group under different names that neither is in, and one is late elsewhere."""
    unused = {0: ("a", "undefined"), 1: ("b", "undefined")}
    documents = {
        rank: document([call(WORLD, 1, done=False)] * (rank == 0), {WORLD: (0, 1), unused[rank]: (0, 1)})
        for rank in range(2)
    }
    assert found(recordings(documents)) == [("late", (1,), "world", 1)]


# The calls of each rank, causes, and what the verdict says; of gloo, for which a failed call is over, and of NCCL.
FIVE = "dp1 dp2 dp3 dp4 dp5"
ON_NCCL = [
    # Finished calls alone are no hang.
    (["tp1 dp1"] * 4, [], "nothing"),
    # A rank that is in no call is late, by so many calls of its group.
    ([FIVE, f"{FIVE}*", FIVE, "dp1 dp2 dp3 dp4"], [("late", (3,), "dp@tp1", 5)], "behind by 1 call"),
    ([FIVE, "dp1 dp2 dp3* dp4* dp5*", FIVE, "dp1 dp2"], [("late", (3,), "dp@tp1", 3)], "behind by 3 calls"),
    # A rank waits at the next call, to which others came by way of the call that it left out.
    (["dp1 w1:barrier*", "dp1*", "dp1 w1:barrier*", "w1:barrier*"], [("absent", (3,), "dp@tp1", 1)], ""),
    # Another operation, size or dtype at the same call of one group.
    (["w1 w2*", "w1 w2*", "w1 w2:broadcast*", "w1 w2*"], [("different", (2,), "world", 2)], "operations differ"),
    (["w1 w2*", "w1 w2*", "w1 w2/8*", "w1 w2*"], [("different", (2,), "world", 2)], "sizes differ"),
    (["w1*", "w1*", "w1/Double*", "w1*"], [("different", (2,), "world", 1)], "dtypes differ"),
    # A network knows no shapes: as many elements are the same call.
    (["w1/8", "w1/2x4", "w1/2x4", "w1/2x4"], [], ""),
    # In a group of two nobody is the usual one: the other groups of the kind decide.
    (["dp1", "dp1*", "dp1", "dp1/8*"], [("different", (3,), "dp@tp1", 1)], ""),
    # A rank makes now what the others make next, and the other way round.
    (["w1* w2/8*", "w1* w2/8*", "w1/8* w2*", "w1* w2/8*"], [("order", (2,), "world", 1)], ""),
    # Four ranks wait for each other in a ring of groups: the cycle is spelled out.
    (
        ["dp1*", "tp1*", "tp1*", "dp1*"],
        [("crosswise", (0, 1, 2, 3), "dp@tp0", 1)],
        "4 ranks wait in a cycle. rank 0 waits for 2 in all_reduce, call 1 of dp@tp0; rank 2 waits",
    ),
    # The barrier that rank 1 handed over explains nothing: it is in the reduction that rank 3 left out.
    (
        ["dp1 dp2 w1:all_reduce_barrier*", "dp1 dp2* w1:all_reduce_barrier*", "dp1 dp2 w1:all_reduce_barrier*",
         "dp1 w1:all_reduce_barrier*"],
        [("absent", (3,), "dp@tp1", 2)],
        "it is in barrier, call 1 of world",
    ),
    # All entered it and nobody came out: the network, a device, or a root that no recording keeps.
    (["w1:broadcast* w2*"] * 4, [("stuck", (0, 1, 2, 3), "world", 1)], "or another root on some of them"),
]  # fmt: skip
# Of a broadcast, whose root need not wait, only a rank's last call counts.
ON_GLOO = [(["w1:broadcast tp1", "w1:broadcast tp1", "tp1", "w1:broadcast tp1"], [], "")]


@pytest.mark.parametrize(
    ("backend", "made", "expected", "words"),
    [(backend, *each) for backend, cases in (("nccl", ON_NCCL), ("gloo", ON_GLOO)) for each in cases],
)
def test_what_calls_show(backend, made, expected, words):
    """Each cause, by the calls that four ranks have recorded."""
    result = diagnose(written(*made, backend=backend))
    assert [(cause.cause, cause.ranks, cause.group.label, cause.call) for cause in result.causes] == expected
    assert words in result.verdict


def test_dead():
    """A rank without a recording that others wait for is dead; those behind it are consequences."""
    result = diagnose(written("tp1 dp1 tp2*", "tp1 dp1*", "tp1 dp1 tp2*", None))
    (cause,) = result.causes
    assert (cause.cause, cause.ranks, cause.group.label, cause.call) == ("dead", (3,), "dp@tp1", 1)
    assert (result.waiting, cause.explains) == ((0, 1, 2), 3)
    assert result.verdict.startswith("dead: rank 3 left no recording")


def test_absent_has_ended():
    """A rank whose program has ended is absent, not late."""
    about = {rank: {"rank": rank, "ended": rank == 3} for rank in range(4)}
    recorded = written("dp1 dp2 dp3", "dp1 dp2 dp3*", "dp1 dp2 dp3", "dp1 dp2", about=about)
    assert found(recorded) == [("absent", (3,), "dp@tp1", 3)]


def test_stuck():
    """A call that all entered and nobody left: the hosts between its members are named."""
    result = diagnose(
        written(*["w1*"] * 4, about={rank: {"rank": rank, "host": f"node{rank // 2}"} for rank in range(4)})
    )
    assert [(cause.cause, cause.ranks) for cause in result.causes] == [("stuck", (0, 1, 2, 3))]
    assert "node0, node1" in result.verdict


def test_the_ring_buffer_is_allowed_for():
    """A rank whose oldest calls are gone, with none of a group left, is not taken for one that never came."""

    def entries(rank):
        tail = [call(TP[rank][0], n) for n in range(90, 100)]
        return tail if rank == 3 else [*tail, call(DP[rank][0], 7, done=False)]

    documents = {rank: document(entries(rank), groups_of(rank), first=500 if rank == 3 else 0) for rank in (1, 3)}
    assert all(cause.cause != "late" or 3 not in cause.ranks for cause in diagnose(recordings(documents)).causes)
    whole = {rank: document(entries(rank), groups_of(rank)) for rank in (1, 3)}
    assert ("late", (3,)) in {(cause.cause, cause.ranks) for cause in diagnose(recordings(whole)).causes}


def test_a_plan_names_the_groups_of_others():
    """Groups that say nothing of themselves are named by their members."""
    name, members = ("17", "undefined"), (1, 3)
    documents = {1: document([call(name, 1, done=False)], {name: members}), 3: document([], {name: members})}
    recorded = recordings(documents)
    assert diagnose(recorded).causes[0].group.label == "group of [1, 3]"
    cause = diagnose(recorded, PLAN).causes[0]
    assert (cause.group.kind, cause.group.label) == ("dp", "dp@tp1")


def test_point_to_point():
    """A receive waits for its sender; two that both receive wait crosswise."""
    pair = ("pp", "pp@dp0")

    def one(me, peer, what):
        arrow = "->" if what == "send" else "<-"
        return call(pair, 0, f"{what} {me}{arrow}{peer}", done=False, is_p2p=True)

    waits = {0: document([one(0, 1, "recv")], {pair: (4, 5)}), 1: document([], {pair: (4, 5)})}
    recorded = recordings({4: waits[0], 5: waits[1]})
    assert found(recorded) == [("late", (5,), "pp@dp0", 1), *found(recorded)[1:]]
    both = recordings({4: waits[0], 5: document([one(1, 0, "recv")], {pair: (4, 5)})})
    assert ("crosswise", (4, 5)) in {(cause, ranks) for cause, ranks, *_ in found(both)}
    matched = recordings({4: waits[0], 5: document([one(1, 0, "send")], {pair: (4, 5)})})
    assert {cause for cause, *_ in found(matched)} == {"stuck"}


def test_keys_of_the_data():
    """The data has the keys that programs read."""
    recorded = job(lambda rank: None if rank == 3 else [call(DP[rank][0], 1, done=False)])
    data = diagnose(recorded).to_dict()
    assert {"verdict", "causes", "waiting"} <= set(data)
    assert {"cause", "ranks", "kind", "group", "call", "operation"} <= set(data["causes"][0])
    assert data["causes"][0]["kind"] == "dp"
    assert data["causes"][0]["group"] == "dp@tp1"


def test_lines_are_compared_where_both_have_them():
    """A rank that has no lines yet left the order at its second call, not at its first."""
    frames = [{"filename": "/home/me/train.py", "line": 7, "name": "step"}]
    with_lines = [call(WORLD, 1, frames=frames), call(WORLD, 2, frames=frames)]
    without = [call(WORLD, 1), call(WORLD, 2, "broadcast"), call(WORLD, 3)]
    documents = {0: document(with_lines, {WORLD: (0, 1)}), 1: document(without, {WORLD: (0, 1)})}
    history = history_of(recordings(documents))
    (group,) = history.tracks
    group, number, _ = departure(history, 1, group)
    assert (group.label, number) == ("world", 2)


# -- ranks that wait for each other: who has left the order -----------------------------------------------------------


def test_another_group_shows_who_left_the_order():
    """Rank 1 leaves out the second call of tp and waits in a send: ranks 2 and 3, and not its peer, show the order."""
    about = {rank: {"rank": rank} for rank in range(4)}
    about[1]["in_call"] = {"operation": "send", "group": TP[1][0][0], "peer": 0}
    made = ("tp1 dp1 tp2*", "tp1 dp1 dp2", "tp1 dp1 tp2 dp2*", "tp1 dp1 tp2 dp2")
    assert found(written(*made, about=about, backend="gloo"))[0] == ("absent", (1,), "tp@dp0", 2)


@pytest.mark.parametrize("failure", ["", "RuntimeError: Connection closed by peer"])
def test_whose_call_failed_is_no_suspect(failure):
    """Rank 1 has ended a call short: rank 0, whose call failed by that, is on its way out, and rank 2 waits for it."""
    about = {rank: {"rank": rank} for rank in range(4)}
    about[0] |= {"failure": failure, "in_call": {"running": not failure, "site": "train.py:9 in main"}}
    about[1]["ended"] = True
    made = ("tp1 dp1 tp2", "tp1 dp1", "tp1 dp1 tp2 dp2*", "tp1 dp1 tp2 dp2")
    result = diagnose(written(*made, about=about, backend="gloo"))
    assert (result.causes[0].cause, result.at_fault, result.causes[0].group.label) == ("absent", (1,), "tp@dp0")
    assert 0 in result.waiting


def test_calls_after_a_timeout_are_no_part_of_the_order():
    """Rank 1 makes dp before tp, and all catch the error after 5 s: by then each has entered every call."""
    seconds = {0: [0, 1, 2, 7.1], 1: [0, 1, 2, 7.1], 2: [0, 1, 2, 2.1], 3: [0, 1, 2, 2.1]}
    world = {rank: [(TP[rank][0], 1), (WORLD, 1), (TP[rank][0], 2), (WORLD, 2)] for rank in range(4)}
    world[1][2:] = reversed(world[1][2:])
    recorded = job(
        lambda rank: [
            call(group, number, backend="gloo", timeout_ms=5000, time_created_ns=10**18 + int(second * 10**9))
            for (group, number), second in zip(world[rank], seconds[rank], strict=True)
        ]
    )
    assert found(recorded) == [("absent", (1,), "tp@dp0", 2)]
    assert diagnose(recorded).waiting == (0, 1, 2, 3)


# -- calls that a device has not come to ------------------------------------------------------------------------------


def test_calls_of_a_cpu_run_side_by_side():
    """What gloo has under way was entered, all of it: nobody is missing at the barrier, rank 3 at the reduction."""
    made = ("dp1 dp2 w1:barrier*", "dp1 dp2* w1:barrier*", "dp1 dp2 w1:barrier*", "dp1 w1:barrier*")
    waits = diagnose(written(*made, backend="gloo")).waits
    assert sorted(waits.of_rank) == [0, 1, 2, 3]
    assert {call.missing for call in waits.calls if call.group.label == "world"} == {()}


def test_calls_that_were_made_as_one_are_entered_as_one():
    """A send and a receive of one batch are both there; of two calls, one after the other, only the first is."""

    def calls(rank, batches):
        peer = 1 - rank
        names = [f"send {rank}->{peer}", f"recv {rank}<-{peer}"]
        return [
            call(TP[rank][0], 0, name, done=False, is_p2p=True, p2p_seq_id=batch)
            for name, batch in zip(names, batches, strict=True)
        ]

    def made(batches):
        return recordings({rank: document(calls(rank, batches), groups_of(rank)) for rank in (0, 1)})

    assert {cause for cause, *_ in found(made((1, 1)))} == {"stuck"}
    assert found(made((1, 2)))[0][:2] == ("crosswise", (0, 1))


def test_the_first_call_of_a_group_waits_for_its_communicator():
    """Nothing is recorded of it: the stacks tell who is in it, and who is not."""

    def about(rank, group):
        return {"in_call": {"operation": "all_reduce", "group": group[rank][0][0], "site": "a.py:1 in f"}}

    def made(groups):
        return recordings({rank: document([], groups_of(rank), **about(rank, group)) for rank, group in groups.items()})

    assert [cause[:2] for cause in found(made({0: TP, 1: DP, 2: DP, 3: TP}))] == [("crosswise", (0, 1, 2, 3))]
    assert found(made({0: TP, 1: TP}))[0] == ("stuck", (0, 1), "tp@dp0", 1)


# -- calls that are over -----------------------------------------------------------------------------------------------


def _late(seconds, pause):
    """Four ranks in a last reduction of 5 s; rank 3 comes so much later than the others, after such a pause."""

    def entries(rank):
        late = int(rank == 3)
        return [
            call(WORLD, number, backend="gloo", timeout_ms=limit, time_created_ns=10**18 + at * 10**9)
            for number, limit, at in ((1, 600_000, late * (seconds - pause)), (2, 5000, 1 + late * seconds))
        ]

    return found(job(entries))


def test_a_rank_that_came_when_the_others_had_given_up_is_late():
    """By its own pause and by all clocks; neither alone is enough, and within the limit nothing hangs."""
    assert _late(9, 9) == [("late", (3,), "world", 2)]
    assert _late(9, 1) == []  # its clock runs ahead by 8 s
    assert _late(3, 3) == []


def test_ranks_whose_call_failed_wait():
    """Gloo marks it as over: ranks 0, 1 and 3 waited for rank 2 all the same."""
    recorded = written("w1 w2 w3", "w1 w2 w3", "w1 w2", "w1 w2 w3", backend="gloo")
    assert found(recorded) == [("late", (2,), "world", 3)]
    assert diagnose(recorded).waiting == (0, 1, 3)
    assert "ranks 0, 1, 3 made all_reduce, call 3 of world, which failed" in diagnose(recorded).verdict


def test_groups_with_one_label_are_distinguished():
    """Two groups of the same ranks, made by torch: the sentence has torch's names of both."""
    one, other = ("7", "undefined"), ("9", "undefined")
    groups = {one: (0, 1), other: (0, 1)}
    recorded = recordings(
        {0: document([call(one, 1, done=False)], groups), 1: document([call(other, 1, done=False)], groups)}
    )
    verdict = diagnose(recorded).verdict
    assert "group of [0, 1] (7)" in verdict
    assert "group of [0, 1] (9)" in verdict


@pytest.mark.parametrize("knows", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_a_name_that_some_ranks_know(knows):
    """3 ranks call on a group made without a description: the recordings of some have a name of it, which all get."""
    group = ("7", "undefined")
    documents = {
        rank: document([call(group, 1), *[call(group, 2, done=False)] * (rank < 2)], {group: (0, 1, 2)})
        for rank in range(3)
    }
    for rank in knows:
        documents[rank]["pg_config"]["7"]["desc"] = f"EXPERTS[{rank}]"
    assert found(recordings(documents)) == [("late", (2,), f"EXPERTS[{knows[0]}] [0, 1, 2]", 2)]


def test_whose_process_runs_is_unresponsive_not_dead():
    """What others saw of a rank decides the word; the cause stays what programs read."""
    for alive, token in ((True, "unresponsive: rank 3 did not respond"), (False, "dead: rank 3 left no recording")):
        recorded = job(lambda rank: [call(WORLD, 1, done=False)] if rank < 3 else None)
        seen = {"state": "its process runs, at train.py:7 in save", "alive": alive}
        recorded |= recordings({3: document([], {}, rank=3, **seen)})
        result = diagnose(recorded)
        assert result.verdict.startswith(f"{token} (its process runs, at train.py:7 in save)")
        assert result.causes[0].cause == "dead"


def test_a_rank_without_a_recording_is_listed():
    """Also where nobody waits for it."""
    recorded = job(lambda rank: [call(TP[rank][0], 1, done=False)] if rank != 3 else None)
    lines = report(diagnose({rank: one for rank, one in recorded.items() if rank < 2}, PLAN)).splitlines()
    assert "unknown    ranks 2, 3 left no recording" in lines


def _halved(pairs):
    """Groups of two, the second member of each without a recording."""
    groups = [((f"pair{low}", f"dp@tp{low}"), (low, low + 1)) for low in range(0, 2 * pairs, 2)]
    return recordings(
        {
            members[0]: document([call(name, number, done=number < 3) for number in (1, 2, 3)], {name: members})
            for name, members in groups
        }
    )


@pytest.mark.long
def test_missing_recordings_cost_as_much_in_each_group():
    """128 and 512 groups, half of whose members left no recording: four times the work, not sixteen times."""
    small, large = _halved(128), _halved(512)
    assert calls(lambda: list(divergences(history_of(large)))) < 5 * calls(lambda: list(divergences(history_of(small))))


def test_a_failed_call_is_no_all_clear():
    """Where no rank waits and one failed, the verdict has its error and says that the cause is not known."""
    done = [call(WORLD, 1), call(WORLD, 2)]
    error = "RuntimeError: Connection closed by peer"
    found = diagnose(
        recordings({rank: document(done, {WORLD: range(2)}, rank=rank, failure=error * rank) for rank in range(2)})
    )
    assert found.verdict == f"no rank waits, but rank 1 failed ({error}); the cause is not known"
    assert (found.causes, found.at_fault) == ((), ())
