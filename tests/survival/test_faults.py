"""Faults at named points, drawn by a seed: no wrong number, no hang, no place lost without a fault, no other end."""

import random
from collections import Counter

import pytest
from tests.sockets import free_port
from tests.survival.faults import PLACES, SEEDS, points
from tests.survival.program import member, text_of

KINDS = ("SIGKILL", "SIGSTOP", "wake", "raise", "cut")
# Of a job whose faults leave too little: none of gloo's, of torch's or of Python's.
PROMISED = {"ConnectError", "LostState"}
# What a member whose own fault it was may end with beside that.
BESIDES = {"raise": {"ValueError"}, "cut": {"RuntimeError"}}


def drawn(seed):
    """A job and its faults: (size, layout, faults, how)."""
    pick = random.Random(seed)  # noqa: S311  - faults, no secrets
    size, tp = pick.choice([(4, 1), (4, 2), (5, 1), (5, 2), (6, 1), (6, 2)])
    spares = pick.choice([0, 1, 2])
    spares += (size - spares) % tp
    timeout = 3.0
    how = {
        "spares": spares,
        "timeout": timeout,
        "redundancy": pick.choice([0, 1]),
        "shrink": "dp" if spares == 0 or pick.random() < 0.4 else None,
        "columns": pick.choice([1, 1, 30_000]),
        "regroups": pick.random() < 0.15,
        "joins": "before" * (pick.random() < 0.2),
    }
    how["pause"] = 0.2 if how["joins"] else pick.choice([0.0, 0.05])
    faults = []
    for who in pick.sample(range(size), k=pick.choice([1, 2, 2, 3])):
        kind = pick.choices(KINDS, weights=[5, 2, 3, 1, 3])[0]
        if kind == "raise" or pick.random() < 0.25:
            fault = {"at": "step", "n": pick.randrange(8)}
        else:
            n = pick.choice([1, 1, 1, 2, 2, 3, 5, 8])
            fault = {"at": pick.choice(points()), "n": n, "latest": pick.randint(3, 7)}
        fault |= {"member": who, "how": kind, "error": f"a bug of member {who}", "after": pick.random() < 0.4}
        faults.append(fault | ({"again": round(pick.uniform(0.3, 2.5) * timeout, 2)} if kind == "wake" else {}))
    how["relayouts"] = [[pick.randint(1, 6), f"tp={3 - tp},dp=*"]] if pick.random() < 0.5 else []
    return size, f"tp={tp},dp=*", faults, how


def must_go_on(size, layout, had, how):
    """Whether what is left suffices, whatever became of the members that had a fault."""
    tp, ended = (
        1 if "tp=1" in layout and not how["relayouts"] else 2,
        sum(kind in ("SIGKILL", "raise") for kind in had.values()),
    )
    left, ranks = size - len(had), size - how["spares"]
    copies = min(ranks // tp - 1, 1) if how["redundancy"] else ranks // tp - 1
    several = sum(kind in ("wake", "cut") for kind in had.values()) > 1  # they may end one step twice
    return left >= (tp if how["shrink"] else ranks) and 2 * left > size - ended and len(had) <= copies and not several


@pytest.fixture
def outlived(outcomes, tmp_path, record_property):
    """Run a job with faults, and check how each member ended."""

    def run(size, layout, faults, how):
        arguments = (free_port(), str(tmp_path), faults, layout, dict(how))
        ended = outcomes(size + bool(how.get("joins")), member, *arguments, world=None, limit=100.0)
        came = tmp_path.glob("fault-*")
        had = {int(path.name.removeprefix("fault-")): path.read_text(encoding="utf-8") for path in came}
        for kind, number in Counter(had.values()).items():
            record_property(kind, number)
        why = f"{size} {layout} {how} {faults} {had}\n{text_of(ended)}"
        living = [one for one in ended if had.get(one.rank) not in ("SIGKILL", "SIGSTOP")]
        assert all(one.ok for one in living), why
        others = {one.rank: one.value for one in living if one.value is not None}
        assert all(max(one["left"]) <= 0 and not one["initialised"] for one in others.values()), why
        errors = {who: {*one["kinds"]} for who, one in others.items() if "error" in one}
        for who, error in errors.items():
            kinds = {kind for one, kind in had.items() if one == who or kind == "cut"}
            assert error & PROMISED.union(*(BESIDES.get(kind, set()) for kind in kinds)), why
        innocent = {who for who in others if who not in had and who < size}
        went_on = any(who not in errors for who in innocent)
        if went_on or must_go_on(size, layout, had, how):
            # A call that a cut connection fails is the fault of either end.
            assert len(innocent & errors.keys()) <= cuts(had), why
            record_property("lost to a cut", len(innocent & errors.keys()))
        results = [one["result"] for one in others.values() if one.get("result") is not None]
        assert len({*results}) == len(results), why
        assert not [one for one in results if isinstance(one, str)], why
        record_property("went on", int(went_on))

    return run


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_faults(outlived, seed):
    """4 to 6 members: 1 to 3 are killed, stopped for good or a while, raise, or lose a connection, at any point."""
    outlived(*drawn(seed))


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_a_wrong_number_and_faults(outlived, seed):
    """4 ranks and 2 spares, guarded: a number of one is wrong once, and 1 or 2 others have a fault as all go back."""
    pick = random.Random(seed)  # noqa: S311  - faults, no secrets
    tp = pick.choice([1, 2])
    first, *others = pick.sample(range(4), k=pick.choice([2, 2, 3]))
    faults = [{"member": first, "at": "step", "n": pick.randrange(8), "how": "flip"}]
    for who in others:
        at, n = (
            (pick.choice(ON_THE_WAY), pick.choice([1, 2, 3])) if pick.random() < 0.7 else ("step", pick.randrange(8))
        )
        how = pick.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
        faults.append({"member": who, "at": at, "n": n, "latest": 8, "how": how, "after": pick.random() < 0.5})
    how = {**PLAIN, "spares": 2, "guard": pick.choice([1, 2, 3]), "redundancy": pick.choice([0, 1])}
    how["relayouts"] = [[pick.randint(1, 6), f"tp={3 - tp},dp=*"]] if pick.random() < 0.3 else []
    outlived(6, f"tp={tp},dp=*", faults, how)


# What members do on the way back, and before it.
ON_THE_WAY = sorted(PLACES.keys() - {"gather", "client", "follow", "returned"})
PLAIN = {"timeout": 3.0, "redundancy": 0, "shrink": None, "relayouts": []}


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_who_serves_next_is_lost_before_the_others_have_connected(outlived, how):
    """Rank 0 is lost in the first step, and the member whose store is next as the others are to connect to it."""
    faults = [
        {"member": 0, "at": "step", "n": 0, "how": "raise"},
        {"member": 1, "at": "rankmesh.survival.driver:Driver.watch", "n": 2, "latest": 7, "how": how},
    ]
    outlived(6, "tp=1,dp=*", faults, {**PLAIN, "spares": 2})


def cuts(had):
    """How many connections were cut."""
    return sum(kind == "cut" for kind in had.values())


LOSSES = 6


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range((SEEDS + 2) // 3))
@pytest.mark.parametrize("beside", ["neighbours", "stranger"])
def test_losses_beside_others(outcomes, tmp_path, record_property, beside, seed):
    """2 ranks lose their member six times: other traffic of the processes goes on, and strangers change nothing."""
    pick = random.Random(seed)  # noqa: S311  - faults, no secrets
    faults = [
        {"member": who, "at": "step", "n": who + 1, "how": "SIGSTOP" if pick.random() < 0.15 else "SIGKILL"}
        for who in range(LOSSES)
    ]
    how = {"spares": LOSSES, "timeout": 4.0, "pause": 0.05, "beside": beside}
    size = 2 + LOSSES
    arguments = (free_port(), str(tmp_path), faults, "tp=1,dp=2", how)
    ended = outcomes(size + (beside == "stranger"), member, *arguments, world=None, limit=150.0)
    why = text_of(ended)
    left = [one.value for one in ended[LOSSES:size]]
    assert all(one.ok for one in ended[LOSSES:]), why
    assert [one["result"] for one in left] == [0, 1], why
    assert all(max(one["left"]) <= 0 for one in left), why
    if beside == "neighbours":
        assert not any(one["wrong"] for one in left), why
        found = {kind: sum(one["counts"][kind] for one in left) for kind in left[0]["counts"]}
    else:
        found = ended[-1].value
    assert min(found.values()) > 0, why
    for kind, number in {"losses": LOSSES, **found}.items():
        record_property(kind, number)
