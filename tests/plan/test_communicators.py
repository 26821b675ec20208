import pytest

from rankmesh.core import GroupSpec, Mesh, Plan, ends, first
from rankmesh.core.communicators import communicators, unshared
from rankmesh.readers.source import read

PARTLY = Plan(
    Mesh(tp=2, pp=4),
    [
        GroupSpec("tp"),
        GroupSpec("half", "pp", levels=(2, 2), level=0),
        GroupSpec("low", "pp", pick=(0, 1)),
        GroupSpec("reversed", "pp", pick=(1, 0)),
        GroupSpec("embd", "pp", pick=ends),
        GroupSpec("pos", "pp", pick=first),
        GroupSpec("own", "tp", share=False),
        GroupSpec("gather", "tp", overlap="gather"),
        GroupSpec("gather_too", "tp", overlap="gather"),
    ],
)

PLANS = {
    "partly": PARTLY,
    "mapped": Plan(
        Mesh(rank_map=(2, 0, 3, 1, 6, 4, 7, 5), tp=2, pp=4), [GroupSpec("low", "pp", pick=(0, 1)), GroupSpec("pp")]
    ),
    "offset": Plan(Mesh(tp=2, dp=2, offset=3), [GroupSpec("tp"), GroupSpec("dp")]),
    **{
        spec: read(spec).plan
        for spec in (
            "tp=2,cp=2,dp=2,pp=2",
            "megatron:world=64,tp=2,cp=2,pp=2,ep=4,etp=1",
            "megatron:world=64,tp=2,cp=4,pp=4,ep=2,hierarchical_cp=2x2,all_gather=true,gloo=true",
            "megatron:world=64,tp=2,pp=2,ep=2,optimizer_instances=2,hybrid_cp=true",
            "torchtitan:world=16,tp=2,cp=2,pp=2,ep=4",
            "nanotron:world=16,tp=2,pp=2,local_world_size=4",
        )
    },
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_counts_equal_those_of_every_rank(plan: Plan) -> None:
    """Least, most, total, and for each kind its own and shared groups, are what plan.of(rank) says rank by rank."""
    covered = plan.mesh.rank_range
    counts = [len(plan.of(rank).communicators) for rank in range(covered.offset, covered.stop)]
    distinct = {
        (local.name, local.ranks)
        for rank in range(covered.offset, covered.stop)
        for local in plan.of(rank).communicators
    }
    use = communicators(plan)
    assert (use.least, use.most, use.total) == (min(counts), max(counts), len(distinct))
    for name, kind_use in use.kinds.items():
        groups = plan.groups(name)
        canonical = [plan.of(group[0])[name].canonical for group in groups]
        if groups.size == 1:
            assert (kind_use.created, kind_use.single_rank, kind_use.shares) == (0, len(groups), ())
        else:
            assert kind_use.created == canonical.count(name)
            assert dict(kind_use.shares) == {kind: canonical.count(kind) for kind in canonical if kind != name}


def test_words_for_what_a_kind_uses() -> None:
    """Own, shared and none needed are told apart; a kind of which only some groups are another's shares none."""
    message = {name: str(use) for name, use in communicators(PARTLY).kinds.items()}
    assert message["half"] == "own"
    assert message["low"] == "own"
    assert message["reversed"] == "own"
    assert message["pos"] == "none needed"
    assert (message["own"], message["gather"], message["gather_too"]) == ("own", "own", "shares gather")


def test_the_reason_for_not_sharing() -> None:
    """Kinds with equal members and options that keep them apart are named with the option."""
    assert [(pair.kind, pair.other, pair.why) for pair in unshared(PARTLY)] == [
        ("own", "tp", "share=False"),
        ("gather", "tp", "overlap 'gather', not None"),
    ]
