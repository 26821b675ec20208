"""The formula runs in the page: it answers as Python does, for layouts and for mistakes."""

import json
import random

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.browser.conftest import PAGE

from rankmesh.cli.options import source_of
from rankmesh.core import presets
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.communicators import communicators
from rankmesh.core.difference import difference
from rankmesh.core.saved import contents
from rankmesh.errors import RankmeshError
from rankmesh.placement import crossings, widest
from rankmesh.readers.source import RECIPES, read, recipe_arguments
from rankmesh.testing.strategies import plans

LAYOUTS = 1000
# Devices a host: those that divide most layouts, and those that cut across.
WIDTHS = (2, 3, 4, 8)
SIZES = (1, 1, 2, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module")
def page(browser):
    """The page without a layout of its own."""
    page = browser.new_page()
    page.goto(PAGE.as_uri())
    yield page
    page.close()


def facts(plan, width):
    """All that the page says of a plan, in plain data."""
    mesh, use = plan.mesh, communicators(plan)
    cluster = Cluster.of_nodes(width, plan.world_size)
    views = (None, *mesh.views)
    ranks = sorted({mesh.offset, mesh.rank_range.stop - 1, mesh.offset + mesh.size // 2})
    return {
        "world": plan.world_size,
        "strides": {str(view): list(mesh.view(view).strides.items()) for view in views},
        "coordinates": [
            [list(mesh.coordinate(rank, view=view).items()) for view in (None, *mesh.views)] for rank in ranks
        ],
        "groups": {name: groups.tolist() for name, groups in plan.kinds.items()},
        "local": [
            [
                [local.name, str(local), local.rank, None if local.size == 1 else local.canonical]
                for local in plan.of(rank).values()
            ]
            for rank in ranks
        ],
        "sharing": [list(names) for names in plan.sharing],
        "use": {name: str(kind) for name, kind in use.kinds.items()},
        "communicators": [use.least, use.most, use.total],
        "crossings": {name: _crossings(groups, cluster) for name, groups in plan.kinds.items()},
    }


def _crossings(groups, cluster):
    found = crossings(groups, cluster)
    return [found.groups, found.crossing, found.nodes, found.hops, widest(groups, cluster).name]


# What `facts` is, said by the page.
FACTS = """(asked) => {
  const { read, Plan, Cluster, communicators, useText, crossings, RankmeshError } = rankmesh;
  const facts = (plan, width) => {
    const { mesh } = plan, use = communicators(plan), cluster = Cluster.ofNodes(width, plan.worldSize);
    const { offset, stop } = mesh.rankRange, views = [null, ...mesh.views.keys()];
    const ranks = [...new Set([offset, offset + Math.floor(mesh.size / 2), stop - 1])];
    const each = (make) => Object.fromEntries([...plan.kinds].map(([name, groups]) => [name, make(groups, name)]));
    return {
      world: plan.worldSize,
      strides: Object.fromEntries(views.map((view) => [view ?? "None", mesh.view(view).names.map((axis) =>
        [axis, mesh.view(view).strideOf(axis)])])),
      coordinates: ranks.map((rank) => views.map((view) => [...mesh.coordinate(rank, view)])),
      groups: each((groups) => {
        const array = [...groups.array()], { size } = groups, listed = [];
        for (let start = 0; start < array.length; start += size) listed.push(array.slice(start, start + size));
        for (const [number, ranks] of listed.entries())
          for (const rank of ranks)
            if (groups.indexOf(rank) !== number || ranks[groups.positionOf(rank)] !== rank ||
                groups.index()[rank - offset] !== number || String(groups.of(rank)) !== String(ranks))
              throw new Error(`rank ${rank} is not where it is listed`);
        return listed;
      }),
      local: ranks.map((rank) => plan.of(rank).map((it) => [it.name, it.label, it.rank, it.communicator])),
      sharing: plan.sharing,
      use: each((_, name) => useText(use.kinds.get(name))),
      communicators: [use.least, use.most, use.total],
      crossings: each((groups) => {
        const found = crossings(groups, cluster);
        const widest = found.reach.findLastIndex((count) => count);
        return [found.groups, found.crossing, found.nodes, found.hops, cluster.levels[widest]];
      }),
    };
  };
  return asked.map(([text, world, width]) => {
    try { return facts(typeof text === "string" ? read(text, world) : Plan.from(text), width); }
    catch (error) {
      if (!(error instanceof RankmeshError)) throw error;
      return { kind: error.kind, message: error.message };
    }
  });
}"""


def _answer(text, world, width):
    """What Python says of a SPEC: its facts, or its error."""
    try:
        return facts(source_of(text, world).plan, width)
    except RankmeshError as error:
        kind = "PlanError" if type(error).__name__ == "SizesError" else type(error).__name__
        return {"kind": kind, "message": str(error)}


def _agree(page, requested, answers):
    """Ask the page in parts, so that nothing grows too large for one message."""
    for start in range(0, len(requested), 50):
        part = slice(start, start + 50)
        output = page.evaluate(FACTS, requested[part])
        for question, theirs, ours in zip(requested[part], output, answers[part], strict=True):
            assert theirs == json.loads(json.dumps(ours)), question


def _axes(chance):
    """An axis string, often with a view of the same ranks, now and then with a ``*`` or a size that does not fit."""
    names = chance.sample(["tp", "cp", "dp", "pp", "ep", "dp_shard"], chance.randint(1, 5))
    sizes = [chance.choice(SIZES[:6]) for _ in names]
    text = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    if chance.random() < 0.6:
        pool = [size for size in sizes if size > 1] or [1]
        chance.shuffle(pool)
        others = chance.sample(["etp", "ep", "edp", "pp", "eep"], min(len(pool), 5))
        view = [f"{name}={size}" for name, size in zip(others, pool, strict=False)]
        if chance.random() < 0.2:
            view[-1] = view[-1].partition("=")[0] + "=*"
        text += "/expert:" + ",".join(view)
    return text


def _recipe(chance):
    """A recipe with some of its arguments, most of which fit."""
    name = chance.choice(sorted(RECIPES))
    message = []
    for argument in recipe_arguments(name):
        if argument == "world":
            if chance.random() < 0.8:
                message.append(f"world={chance.choice((8, 16, 24, 32, 48, 64))}")
        elif argument in ("hybrid_cp", "all_gather", "gloo"):
            message += [f"{argument}={chance.choice(('true', 'no', '1', 'maybe'))}"] if chance.random() < 0.2 else []
        elif argument == "order":
            order = "-".join(chance.sample(["tp", "cp", "ep", "dp", "pp"], chance.choice((5, 5, 5, 4))))
            message += [f"order={order}"] if chance.random() < 0.3 else []
        elif argument == "hierarchical_cp":
            message += [f"{argument}={chance.choice(('2x2', '2', '4', '2x1'))}"] if chance.random() < 0.1 else []
        elif argument == "pp_backend":
            message += [f"{argument}=gloo"] if chance.random() < 0.1 else []
        elif argument == "timeout":
            message += [f"{argument}={chance.choice(('60', '0.5', '-1', 'x'))}"] if chance.random() < 0.1 else []
        elif chance.random() < 0.45:
            message.append(f"{argument}={chance.choice(SIZES)}")
    return f"{name}:{','.join(message)}"


def test_a_thousand_random_layouts(page):
    """Strides, coordinates, groups, labels, communicators, crossings are Python's, or the error is, word for word."""
    chance = random.Random(15)  # noqa: S311  - layouts, not secrets
    texts = [_axes(chance) if number % 2 else _recipe(chance) for number in range(LAYOUTS)]
    requested = [[text, None, chance.choice(WIDTHS)] for text in texts]
    answers = [_answer(*question) for question in requested]
    right = [answer for answer in answers if "kind" not in answer]
    assert len(right) > LAYOUTS / 3
    assert sum("expert" in answer["strides"] or "decode" in answer["strides"] for answer in right) > LAYOUTS / 10
    _agree(page, requested, answers)


def test_saved_plans_with_maps_levels_and_picks(page):
    """Plans of every kind that a file may hold: offsets, rank maps, views, levels, picks, options."""
    found = []

    @seed(15)
    @settings(max_examples=200, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(plans(max_offset=5, shuffled=True))
    def collect(plan):
        found.append(plan)

    collect()
    _agree(page, [[contents(plan), None, 3] for plan in found], [facts(plan, 3) for plan in found])


def test_every_preset(page):
    """A preset is the layout that Python makes of it."""
    names = [name for name in presets.PRESETS if read(name).plan.world_size <= 1024]
    _agree(page, [[name, None, 8] for name in names], [facts(read(name).plan, 8) for name in names])
    assert page.evaluate("Object.keys(rankmesh.PRESETS)") == list(presets.PRESETS)


MISTAKES = [
    "", "tp", "tp=", "tp=2,tp=4", "tp=0", "tp=-1", "tp=x", "t p=2", "offset=2", "tp=2,dp=*", "tp=*,dp=*", "view=3",
    "tp=2,dp=2/ep=4", "tp=2,dp=2/expert:ep=3", "tp=2,pp=2/expert:pp=4", "tp=2/a:x=2/a:y=2", "tp=4/offset:x=4",
    "megatron:", "megatron:wrld=8", "megatron:world=8,tp=3", "megatron:world=8,world_size=8", "megatorn:world=8",
    "llama3-405", "megatron:world=8,order=tp-xp", "megatron:world=8,cp=2,order=tp-dp-pp", "megatron:world=8,tp=two",
    "megatron:world=8,order=tp-tp-dp-pp", "megatron:world=64,tp=2,pp=2,ep=4,order=tp-pp-ep-dp", "three_d:tp=2",
    "megatron:world=16,optimizer_instances=3", "torchtitan:world=8,tp=2,etp=4", "accelerate:world=8,cp=2,sp=2",
    "vllm:tp=4,pcp=2,dcp=3", "sglang:world=16,tp=4", "dp=4194305", "tp=2.0", "tp='2'", 'tp="2\'', "é=2", "tp=2,,dp=2",
    "tp = 2 , dp = 1_0", "nanotron:tp=2,local_world_size=3", "deepspeed:world=8,tp=2,sp=2", "deepspeed:dp=8,ep=3",
    "pp=2,dp=4/expert:pp=4,edp=2", "dp=2,pp=2,cp=2/e:cp=8",
]  # fmt: skip


def test_mistakes_have_the_same_words(page):
    """What cannot be is told as Python tells it, but for paths, which a page does not open."""
    requested = [[text, world, 4] for text in MISTAKES for world in (None, 8)]
    answers = [_answer(*question) for question in requested]
    assert sum("kind" in answer for answer in answers) > len(MISTAKES)
    _agree(page, requested, answers)


def test_differences(page):
    """Which ranks see another group, in each kind that two layouts have."""
    chance, pairs = random.Random(16), []  # noqa: S311  - as above
    while len(pairs) < 60:
        texts = [_recipe(chance) if chance.random() < 0.5 else _axes(chance) for _ in range(2)]
        if all("kind" not in _answer(text, None, 8) for text in texts):
            pairs.append(texts)
    output = page.evaluate(
        "pairs => pairs.map(([one, two]) => { const { groups, onlyLeft, onlyRight, equal } ="
        " rankmesh.difference(rankmesh.read(one), rankmesh.read(two)); return [groups.map((kind) =>"
        " [kind.name, kind.ranks, kind.leftSize, kind.rightSize]), onlyLeft, onlyRight, equal]; })",
        pairs,
    )
    for (one, two), theirs in zip(pairs, output, strict=True):
        ours = difference(read(one).plan, read(two).plan)
        groups = [[kind.name, kind.ranks, kind.left_size, kind.right_size] for kind in ours.groups]
        only = [[kind.name for kind in side] for side in (ours.only_left, ours.only_right)]
        unequal = {kind.name for kind in ours.groups}
        equal = [name for name in read(one).plan.kinds if name in read(two).plan.kinds and name not in unequal]
        assert theirs == [groups, *only, equal], (one, two)
