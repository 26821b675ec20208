"""Who stands at which rank after losses: laws, and answers that are worked out one rank at a time."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rankmesh import Mesh, PlanError
from rankmesh.survival.epoch import Contact, Newcomers
from rankmesh.survival.members import Members


@st.composite
def jobs(draw, shrink=None):
    """The members of a job that begins, on hosts by chance."""
    tp, pp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    spares = draw(st.integers(0, 4))
    size = tp * pp * dp + spares
    hosts = {member: f"host {draw(st.integers(0, 2))}" for member in range(size)}
    shrink = draw(st.sampled_from([None, "dp"])) if shrink is None else shrink
    layout = draw(st.permutations([f"tp={tp}", f"pp={pp}", "dp=*"]))
    return Members.first(",".join(layout), world_size=size, spares=spares, shrink=shrink, hosts=hosts)


@st.composite
def losses(draw, shrink=None):
    """The members of a job, and some that are lost."""
    members = draw(jobs(shrink))
    return members, draw(st.sets(st.sampled_from(members.all)))


def replica(members, rank):
    """The coordinate along the axis that may shrink."""
    return members.plan.mesh.coordinate(rank)[members.sizes.shrink] if members.sizes.shrink else 0


def replaced(members, lost):
    """Who stands where if the spares suffice, one lost rank after the other; None where they do not."""
    spares, ranks = [spare for spare in members.spares if spare not in lost], list(members.ranks)
    free = [rank for rank, member in enumerate(ranks) if member in lost]
    if len(free) > len(spares):
        return None
    many = [replica(members, rank) for rank in free]
    for rank in sorted(free, key=lambda rank: (many.count(replica(members, rank)), replica(members, rank), rank)):
        here = [spare for spare in sorted(spares) if members.hosts[spare] == members.hosts[ranks[rank]]]
        ranks[rank] = (here or sorted(spares))[0]
        spares.remove(ranks[rank])
    return tuple(ranks), tuple(spares)


def replicas_kept(members, lost):
    """How many replicas there are after losses: as many as before, or as the living suffice for."""
    now = members.sizes.replicas(members.plan)
    return min(now, (len(members.all) - len(lost)) // (members.plan.mesh.size // now))


@given(losses())
def test_spares_replace_who_is_lost(job):
    """Where they suffice: each lost rank has a spare, one of the same host first, and nobody else moves."""
    members, lost = job
    expected = replaced(members, lost)
    assume(expected is not None)
    following = members.without(lost)
    assert following.plan == members.plan
    assert (following.ranks, following.spares) == expected


@given(losses())
def test_nobody_healthy_is_dropped(job):
    """All that are left are members once, as many at ranks as the plan has; else there is no plan for them."""
    members, lost = job
    kept = replicas_kept(members, lost)
    if members.sizes.shrink is None and replaced(members, lost) is None:
        kept = 0
    if not kept:
        with pytest.raises(PlanError):
            members.without(lost)
        return
    following = members.without(lost)
    assert len(set(following.all)) == len(following.all)
    assert set(following.all) == set(members.all) - lost
    assert len(following.ranks) == following.plan.mesh.size
    if members.sizes.shrink is not None:
        assert following.plan.mesh.axes == {**members.plan.mesh.axes, "dp": kept}


def coordinates(members):
    """The coordinates of each member, but for the axis that may shrink."""
    where = {member: members.plan.mesh.coordinate(rank) for rank, member in enumerate(members.ranks)}
    return {member: {axis: at for axis, at in of.items() if axis != "dp"} for member, of in where.items()}


@given(losses("dp"))
def test_a_member_keeps_its_part_of_the_model(job):
    """Whoever has a rank still keeps its coordinates along all other axes, but for those that fill a lost one."""
    members, lost = job
    try:
        following = members.without(lost)
    except PlanError:
        return
    before, after = coordinates(members), coordinates(following)
    moved = [member for member in before.keys() & after.keys() if before[member] != after[member]]
    spares = set(members.spares) - lost
    assert len(moved) <= max(0, len(lost.intersection(members.ranks)) - len(spares))


@given(losses("dp"), st.integers(0, 12))
def test_growing_back(job, further):
    """With further members the plan has as many replicas as all suffice for, at most those of the start."""
    members, lost = job
    try:
        shrunk = members.without(lost)
    except PlanError:
        return
    first = len(members.all)
    grown = shrunk.joined(dict.fromkeys(range(first, first + further), "")).grown()
    each = members.plan.mesh.size // members.plan.mesh.axes["dp"]
    most = min(members.plan.mesh.axes["dp"], len(grown.all) // each)
    assert grown.plan.mesh.axes == {**members.plan.mesh.axes, "dp": most}
    assert len(grown.ranks) == grown.plan.mesh.size
    assert len(set(grown.all)) == len(grown.all)
    assert set(grown.all) == {*shrunk.all, *range(first, first + further)}
    assert grown.plan == (shrunk.larger(further) or shrunk.plan)
    before, after = coordinates(shrunk), coordinates(grown)
    assert before.items() <= after.items() or all(before[member] == after[member] for member in before)


def test_both_replicas_lose_a_member():
    """tp=2,dp=2: one tp rank of each replica is lost, and the other two are a replica, with its state."""
    members = Members.first("tp=2,dp=2", world_size=4, shrink="dp")
    following = members.without({0, 3})
    assert (following.ranks, following.spares) == ((2, 1), ())


def test_experts_that_need_several_replicas():
    """ep=4 within dp=8: a lost replica takes three healthy ones along, since ep takes them by fours."""
    members = Members.first("tp=1,dp=*/expert:ep=4,edp=*", world_size=8, shrink="dp")
    following = members.without({2})
    assert (following.ranks, following.spares) == ((0, 1, 3, 4), (5, 6, 7))
    assert following.plan.mesh.views["expert"].axes == {"ep": 4, "edp": 1}


def test_views_of_a_fixed_size():
    """A plan whose views cannot follow loses no replica in silence: the error says how to write the layout."""
    members = Members.first("tp=1,dp=8/expert:ep=4,edp=2", world_size=8, shrink="dp")
    with pytest.raises(PlanError, match="the layout fits no smaller size of dp"):
        members.without({2})


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            {"layout": Mesh(tp=2, dp=4), "spares": 1},
            "8 ranks and 1 spares were asked for, but 8 ranks were started; start 9",
        ),
        ({"layout": "tp=2,dp=*", "shrink": "cp"}, "shrink='cp' is not an axis of"),
        ({"layout": 7}, "7 is not a plan, a mesh or a SPEC"),
    ],
)
def test_what_is_refused(how, match):
    """More spares than there are ranks, an axis that is not there, something that is no plan."""
    with pytest.raises(PlanError, match=match):
        Members.first(how.pop("layout"), world_size=8, **how)


def test_whether_a_plan_may_grow_places_nobody(monkeypatch):
    """The thread that replies to heartbeats asks it, of any number of members: it only counts them."""
    members = Members.first("tp=2,dp=*", world_size=8, shrink="dp").without({3})
    newcomers = Newcomers()
    monkeypatch.setattr(Members, "_placed", None)
    monkeypatch.setattr(Members, "joined", None)
    for port in (1, 2):
        grows = newcomers.let_grow(members)
        newcomers.ask(Contact("a", "10.0.0.1", heartbeat=port, store=3, liveness=4))
        assert (grows, newcomers.let_grow(members)) == (port == 2, True)
