"""The example loses ranks at any moment, and goes on: the losses and norms are those of a run without loss."""

import random
from contextlib import suppress
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path

import pytest
from tests.examples import training
from tests.examples.training import SURVIVES, survives
from tests.sockets import free_port
from tests.survival.faults import SEEDS, moment, moments
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh.core.source import read_plan

LAYOUT = "tp=2,pp=2"
SEQUENCES = 100 if ALL else 1


@pytest.fixture
def trained(outcomes, tmp_path):
    """Train on ``size`` members of which some die; what each of the others reported, None of those that died."""

    def run(size, deaths, spares=0, *, shrink=False, layout=LAYOUT, changes=(), redundancy=1, limit=150.0):
        shared = set(Path("/dev/shm").iterdir())  # noqa: S108
        given = free_port(), str(tmp_path), deaths, layout, spares, shrink, changes, redundancy
        ended = outcomes(size, survives, *given, world=None, limit=limit)
        dead = {int(path.name.removeprefix("dead-")) for path in tmp_path.glob("dead-*")}
        report = [f"{one.rank}: {one.value or one.error or one.code}" for one in ended]
        for one in ended:
            assert one.rank in dead or one.ok, (deaths, report)
            assert one.rank in dead or max(one.value["left"]) <= 0, (deaths, report)
            oldest = {} if one.rank in dead else one.value["oldest"]
            assert all(int(epoch) - first <= 2 for epoch, first in oldest.items()), (deaths, report)
        new = [path.name for path in set(Path("/dev/shm").iterdir()) - shared]  # noqa: S108
        assert not [name for name in new if "torch" in name or "gloo" in name or "rankmesh" in name], new
        return [None if one.rank in dead else one.value for one in ended]

    return run


@pytest.fixture(scope="module")
def restarted(_server):
    """Losses and norms of runs that each start from the state of the one before in another layout."""
    known = {}

    def run(parts):
        size = max(read_plan(f"megatron:{layout}").mesh.size for _, layout in parts)
        request = {"size": size, "module": training.__name__, "function": "restarted", "args": (parts,)}
        if parts not in known:
            ended = _server.run({**request, "world": "gloo", "limit": 100.0, "timeout": 60.0})
            assert ended[0].ok, ended[0]
            known[parts] = [tuple(step) for step in ended[0].value]
        return known[parts]

    return run


AXES = ("tp", "cp", "ep", "dp", "pp")
# The sizes of at most 8 ranks that the model fits.
SIZES = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in product((1, 2), (1, 2, 4, 8), (1, 2, 4), (1, 2, 3, 4, 6), (1, 2, 4))
    if sizes[0] * sizes[1] * sizes[3] * sizes[4] <= 8 and sizes[1] * sizes[3] % sizes[2] == 0
]


def _layout(pick, least):
    """Return a layout of ``least`` ranks or more, in any order in which experts have the others' tp and pp groups."""
    sizes = pick.choice([sizes for sizes in SIZES if least <= prod(sizes.values()) // sizes["ep"]])
    while True:
        order = "-".join(pick.sample(AXES, len(AXES)))
        layout = ",".join(f"{name}={size}" for name, size in sizes.items()) + f",order={order}"
        with suppress(rm.PlanError, rm.LayoutError):
            mesh = read_plan(f"megatron:{layout}").mesh
            if mesh.groups("tp").tolist() == mesh.groups("etp", view="expert").tolist():
                return layout


def _drawn(seed):
    """Four layouts with the steps under each, and in every third sequence who dies when."""
    pick = random.Random(seed)  # noqa: S311  - no secrets
    starts = [0, *sorted(pick.sample(range(1, SURVIVES.steps), 3)), SURVIVES.steps]
    deaths = [] if seed % 3 else [moment(pick, pick.randrange(9), SURVIVES.steps)]
    parts = tuple((end - start, _layout(pick, least=1 + len(deaths))) for start, end in pairwise(starts))
    return parts, deaths


def _steps(ended):
    """The steps, by the member that was the first rank at the end; None where it died with them."""
    found = [one["outcome"][1] for one in ended if one is not None and one["outcome"] is not None]
    assert len(found) <= 1
    return [tuple(step) for step in found[0]] if found else None


def _sizes(ended):
    """The data-parallel size of each stretch of steps that counts: a later epoch does some steps again."""
    epochs = {int(epoch): began for one in ended if one is not None for epoch, began in one["sizes"].items()}
    found = []
    for _, (step, size) in sorted(epochs.items()):
        found = [*(earlier for earlier in found if earlier[0] < step), (step, size)]
    return found


def _parts(sizes):
    """The steps and the layout of each stretch."""
    ends = [*(start for start, _ in sizes[1:]), SURVIVES.steps]
    return tuple((end - start, f"{LAYOUT},dp={size}") for (start, size), end in zip(sizes, ends, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "death",
    [
        {"member": 0, "at": "step", "n": 2},
        {"member": 5, "at": "step", "n": 1},  # of the last stage's first replica: its table comes from the first stage
    ],
    ids=["rank 0", "tied weights"],
)
def test_a_training_survives(trained, restarted, death):
    """8 ranks and a spare, float64: a rank is killed in a step, and the losses and norms are bit-equal."""
    assert _steps(trained(9, [death], spares=1)) == restarted(_parts([(0, 2)]))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_any_sequence_of_layouts(trained, restarted, seed):
    """8 ranks, float64, four layouts drawn from all that fit: bit-equal; in every third one of 9 members dies."""
    parts, deaths = _drawn(seed)
    size, first = 8 + bool(deaths), read_plan(f"megatron:{parts[0][1]}").mesh.size
    starts = list(accumulate(steps for steps, _ in parts))
    changes = [[start, layout] for start, (_, layout) in zip(starts, parts[1:], strict=False)]
    ended = trained(size, deaths, spares=size - first, layout=parts[0][1], changes=changes, redundancy=len(deaths))
    steps = _steps(ended)
    if steps is None:  # whoever dies after the last rank has returned takes its result along
        assert None in ended, (parts, deaths)
        return
    expected = restarted(parts)
    assert steps == expected, (parts, deaths)
    whole = restarted(((SURVIVES.steps, "tp=1,dp=1"),))
    assert steps == [pytest.approx(step, rel=1e-9) for step in whole]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_moment(trained, restarted, seed):
    """16 ranks and 4 spares: one or two members, or four of a host, die or stop at any moment: bit-equal steps.

    Who dies after the last rank has returned takes its result along.
    """
    deaths = moments(seed, SURVIVES.steps)
    ended = trained(20, deaths, spares=4, redundancy=len(deaths))
    steps = _steps(ended)
    assert steps == restarted(_parts([(0, 4)])) or (steps is None and None in ended), deaths


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_moment_without_spares(trained, restarted, seed):
    """16 ranks that shrink: as runs of the sizes that it had, each started from the state of the one before.

    Not in the last bit: the first stage and the last each update their copy of the table, sums of gradients are in
    another order there, and a run starts from one copy.
    """
    deaths = moments(seed, SURVIVES.steps, members=16)
    ended = trained(16, deaths, shrink=True, redundancy=len(deaths))
    steps = _steps(ended)
    if steps is None:
        assert None in ended, deaths
        return
    assert steps == [pytest.approx(step, rel=1e-12) for step in restarted(_parts(_sizes(ended)))], deaths
