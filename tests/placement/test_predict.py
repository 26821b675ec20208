"""Seconds by part beside counts by hand, a schedule run event by event, and published runs."""

import json
from dataclasses import replace

import pytest
from tests.placement.schedules import makespan

from bench.published import FIGURES, ROWS, free_of, published_seconds, row_of
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES
from rankmesh.core.model import Sizes
from rankmesh.core.source import read_plan
from rankmesh.placement import Message, Training, Transformer
from rankmesh.placement.compute import flops, stage_work
from rankmesh.placement.memory import memory, stage_memory
from rankmesh.placement.predict import Links, bubble, predict, search_plan
from rankmesh.placement.search import candidates, evaluate, search, settled

GPT = Transformer(layers=8, hidden=1024, heads=16, ffn_hidden_size=4096, vocabulary=51200)
MIXED = Transformer(layers=6, hidden=256, heads=8, kv_heads=4, ffn_hidden_size=512, vocabulary=1000, gated=True,
                    tied=False, experts=16, top_k=2, moe_ffn_hidden_size=128, shared_ffn_hidden_size=64,
                    dense_layers=1)  # fmt: skip
H100 = DEVICES["h100"]


@pytest.mark.parametrize(
    ("sequence", "window", "windowed"), [(7, 0, 4), (16, 4, 4), (16, 4, 2), (16, 4, None), (8, 8, 4), (9, 20, 2)]
)
def test_attention_meets_the_keys_that_the_mask_leaves(sequence, window, windowed):
    """Pairs of queries and keys, counted one by one over the causal mask and the window of some blocks."""
    model = Transformer(layers=4, hidden=8, heads=1, ffn_hidden_size=8, vocabulary=8, window=window, windowed=windowed)
    met = 0
    for layer in range(4):
        seen = window if window and (windowed is None or layer < windowed) else sequence
        met += sum(1 for query in range(sequence) for key in range(query + 1) if query - key < seen)
    assert model.pairs(sequence) == pytest.approx(met / 4 / sequence)


@pytest.mark.parametrize("model", [GPT, MIXED], ids=["dense", "experts"])
def test_flops_are_counted_product_by_product(model):
    """Six for each weight that a token uses and each pair of its attention, product by product, as loops count them."""
    training = Training(batch=2, sequence=8)
    per_token = 0
    for layer in range(model.layers):
        mixed = model.experts > 0 and layer >= model.dense_layers
        products = [(model.hidden, model.queries), (model.hidden, model.keys), (model.hidden, model.values),
                    (model.attended, model.hidden)]  # fmt: skip
        if mixed:
            products += [(model.hidden, model.experts)]
            products += model.top_k * model.matrices * [(model.hidden, model.moe_ffn_hidden_size)]
            products += model.matrices * [(model.hidden, model.shared_ffn_hidden_size)]
        else:
            products += model.matrices * [(model.hidden, model.ffn_hidden_size)]
        per_token += sum(6 * inner * columns for inner, columns in products)
    per_token += 6 * model.hidden * model.vocabulary
    pairs = sum(query + 1 for query in range(8))
    attention = model.layers * 6 * pairs * (model.queries + model.attended)
    assert flops(model, training) == 16 * per_token + 2 * attention


@pytest.mark.parametrize(("tp", "cp", "pp"), [(1, 1, 1), (2, 2, 2), (4, 1, 3)])
def test_work_at_a_given_speed_is_all_flops(tp, cp, pp):
    """At 1 FLOP/s, all ranks together take as many seconds as the step has FLOPs, but for flash's second scores."""
    training, sizes = Training(batch=1, sequence=64), Sizes(tp=tp, cp=cp, pp=pp)
    for model in (GPT, MIXED):
        works = [stage_work(model, training, sizes, stage, replace(H100, speed=1.0)) for stage in range(pp)]
        attention = sum(work.forward["attention"] for work in works)
        seconds = tp * cp * (sum(work.seconds for work in works) - 0.5 * attention)
        assert seconds == pytest.approx(flops(model, training))


def test_recomputation_adds_what_it_does_again():
    """Nothing, then norms or scores, half of the products, and all of the forward pass of the blocks."""
    sizes, added = Sizes(), []
    for recompute in ("none", "selective", "operators", "full"):
        work = stage_work(GPT, Training(batch=1, sequence=2048, recompute=recompute), sizes, 0, H100)
        added.append(work.backward["recomputation"])
    ends = stage_work(Transformer(layers=1, hidden=1024, heads=16, ffn_hidden_size=4096, vocabulary=51200),
                      Training(batch=1, sequence=2048), sizes, 0, H100)  # fmt: skip
    eight = stage_work(GPT, Training(batch=1, sequence=2048), sizes, 0, H100)
    block = (sum(eight.forward.values()) - sum(ends.forward.values())) / 7
    assert added[0] == 0 < added[1] < added[2] < added[3] == pytest.approx(8 * block)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("pp", "rounds"), [(1, 2), (2, 3), (4, 2), (4, 5)])
def test_the_bubble_of_equal_stages_is_the_schedules(pp, rounds, v):
    """m · t and the bubble are the seconds of 1F1B and interleaved 1F1B, run event by event."""
    microbatches = pp * rounds
    ran = makespan([2.0] * pp, microbatches, v)
    assert 2.0 * microbatches + bubble([(2.0, pp)], v) == pytest.approx(ran)


@pytest.mark.parametrize("stages", [(3.0, 2.0, 2.0, 2.0), (2.0, 2.0, 2.0, 3.5), (2.0, 3.0, 2.0, 2.5)])
def test_the_bubble_of_uneven_stages_is_near(stages):
    """A slow stage is never idle while the pipeline fills, so the bubble is overstated: by 6 % of a step here."""
    predicted = 16 * max(stages) + bubble([(each, 1) for each in stages])
    assert makespan(list(stages), 16, 1) == pytest.approx(predicted, rel=0.06)


def test_dualpipe_joins_the_ends():
    """A device computes the mean of its two stages, holds both, and waits (p / 2 - 1)(F + B / 2)."""
    sizes = Sizes(pp=4)
    links = Links(search_plan(sizes, Training(batch=8, sequence=512)), Cluster.parse("host=8"))
    one, two = (Training(batch=8, sequence=512, schedule=name, overlap=("pp",)) for name in ("1f1b", "dualpipe"))
    works = [stage_work(GPT, two, sizes, stage, H100) for stage in range(4)]
    means = [(works[stage].seconds + works[3 - stage].seconds) / 2 for stage in range(2)]
    step = predict(GPT, two, H100, links)
    assert sum(step.parts[name] for name in ("matrices", "attention", "kernels")) == pytest.approx(8 * max(means))
    ends = [sum(getattr(works[stage], side).values()) for side in ("forward", "backward") for stage in (0, 3)]
    assert step.parts["bubble"] == pytest.approx(sum(ends[:2]) / 2 + sum(ends[2:]) / 4)
    assert step.seconds < predict(GPT, one, H100, links).seconds
    kept = [stage_memory(GPT, two, sizes, stage) for stage in (0, 3)]
    assert memory(GPT, two, sizes) == pytest.approx({name: kept[0][name] + kept[1][name] for name in kept[0]})


def test_a_uniform_cluster_costs_what_the_collectives_do():
    """dp and tp of a small layout: how often, of which bytes, over which links; what hides and what does not."""
    cluster, sizes = Cluster.parse("host=8:450GB,leaf=2:50GB"), Sizes(tp=8, dp=2)
    training = Training(batch=8, sequence=2048, overlap=())
    model = Transformer(layers=4, hidden=4096, heads=32, ffn_hidden_size=16384, vocabulary=32000, tied=False)
    links = Links(search_plan(sizes, training), cluster)
    step = predict(model, training, H100, links)
    whole = 2048 * 4096 * 2
    one = [links.seconds("tp", [Message(*each)]) for each in (("all-gather", whole / 8), ("reduce-scatter", whole))]
    loss = links.seconds("tp", [Message("all-reduce", 2048 * 4)])
    assert step.parts["tp"] == pytest.approx(4 * ((3 * 8 + 3) * one[0] + (2 * 8 + 2) * one[1] + 3 * loss))
    weights = sum((4 * (4 * 4096**2 + 2 * 4096 * 16384) / 8, 2 * 32000 * 4096 / 8, 9 * 4096))
    # Each group has one rank on a host: one port; and the square root of a pipeline's chunks beside the bytes.
    moved = [weights / 2 * size / 50e9 for size in (4, 2)]
    took = [8.4e-6 + 14e-6 + each + 2 * (14e-6 * each) ** 0.5 for each in moved]
    norm = 6.6e-6 + 2 * 5e-6  # an all-reduce of one number: a ring of two, protocol LL
    assert step.parts["dp"] == pytest.approx(sum(took) + norm, rel=1e-4)
    hidden = predict(model, Training(batch=8, sequence=2048), H100, Links(search_plan(sizes, training), cluster))
    assert hidden.parts["dp"] + hidden.hidden["dp"] == pytest.approx(step.parts["dp"])
    assert hidden.parts["dp"] < step.parts["dp"]


def test_a_step_depends_on_the_order_of_the_ranks():
    """tp inside hosts, and across them by a rank map: links are those of the devices that the ranks stand on."""
    cluster, sizes = Cluster.parse("host=4,leaf=2"), Sizes(tp=2, dp=4)
    training = Training(batch=8, sequence=2048, overlap=())
    plan = search_plan(sizes, training)
    apart = plan.replace(rank_map=(0, 4, 1, 5, 2, 6, 3, 7))
    there, here = (predict(GPT, training, H100, Links(each, cluster)).parts for each in (apart, plan))
    assert there["tp"] > 3 * here["tp"]
    assert there["dp"] < here["dp"]


def test_parts_make_the_step():
    """Seconds by part add up; computation, bubble and communication are all of them."""
    training = Training(batch=64, sequence=2048, virtual_stages=2, zero=2, replicate=2, overlap=("dp", "ep", "tp"))
    found = evaluate(Sizes(tp=2, pp=2, dp=4, ep=4), Cluster.parse("host=8,leaf=2"), MIXED, training)
    row = found.to_dict()
    assert sum(row["seconds_by_part"].values()) == pytest.approx(row["seconds"]) == pytest.approx(
        sum(row["parts"].values()))  # fmt: skip
    assert sum(row["memory_by_part"].values()) == row["memory"]
    assert min(row["seconds_by_part"].values()) >= 0 <= min(row["hidden"].values())


def test_every_size_that_cuts_is_tried():
    """Stages that do not divide, ep beyond dp, etp of one and of tp, shards of which there are copies."""
    found = set(candidates(64, 8, MIXED, Training(batch=64, sequence=8192)))
    assert Sizes(tp=4, pp=4, dp=4, ep=16, etp=1) in found  # six layers on four stages; ep over tp and dp
    assert Sizes(tp=4, pp=4, dp=4, ep=4, etp=4) in found
    assert all(each.world == 64 and each.expert_replicas >= 1 for each in found)
    copies = candidates(64, 8, MIXED, Training(batch=64, sequence=8192, replicate=16))
    assert {each.dp * each.cp % 16 for each in copies} == {0}


def test_search_is_the_best_of_all_it_tries():
    """No layout that fits is predicted to take less than the first; rows are in order; the memory is kept."""
    cluster, training = Cluster.parse("host=4,leaf=2"), Training(batch=16, sequence=2048)
    rows = search(8, cluster, GPT, training, top=5, free=())
    every = [evaluate(sizes, cluster, GPT, training) for sizes in candidates(8, 4, GPT, training)]
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert rows[0].seconds == pytest.approx(min(each.seconds for each in every))
    least = min(sum(memory(GPT, training, each.sizes).values()) for each in every) + 2e9
    assert all(read_plan(each.spec).world_size == 8 for each in rows)
    few = search(8, cluster, GPT, training, free=(), device=replace(H100, memory=1.2 * least))
    assert 1 <= len(few) < len(every)
    assert all(row.memory + 2e9 <= 1.2 * least for row in few)


def test_what_is_recomputed_is_as_little_as_fits():
    """Where a layout fits as it is, nothing is computed again; where it does not, whole blocks are."""
    cluster = Cluster.parse("host=8")
    model = Transformer(layers=32, hidden=4096, heads=32, ffn_hidden_size=16384, vocabulary=32000)
    found = {}
    for sequence in (1024, 32768):
        training = Training(batch=16, sequence=sequence, zero=3)
        rows = search(8, cluster, model, training, top=50, free=("recompute",))
        found[sequence] = next(row.training.recompute for row in rows if row.sizes == Sizes(dp=8))
    assert found == {1024: "none", 32768: "full"}


def test_published_steps_are_as_near_as_recorded():
    """Each published run is predicted as bench/published.json has it, with what a search chooses for its sizes."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    recorded = json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in data["rows"]] == [row["name"] for row in recorded]
    for row, known in zip(data["rows"], recorded, strict=True):
        sizes, cluster, model, training, device = row_of(row)
        plan, free = search_plan(sizes, training), free_of(row)
        fit = known["rank"] > 0
        how = (
            settled(plan, cluster, model, training, device=device, free=free)
            if fit
            else replace(training, **known["chosen"])
        )
        assert {name: getattr(how, name) for name in free} == known["chosen"], row["name"]
        found = evaluate(sizes, cluster, model, how, device)
        assert found.seconds == pytest.approx(known["predicted"], rel=1e-3), row["name"]
        assert published_seconds(row, model, training, sizes.world) == pytest.approx(known["published"]), row["name"]
    main, fsdp = ([row for row in recorded if row["table"] == name] for name in ("main", "fsdp"))
    assert len(main) == 24
    assert sum(abs(row["ratio"] - 1) <= 0.15 for row in main) >= 20
    assert sum(1 <= row["rank"] <= 5 for row in main) >= 15
    assert sum(abs(row["ratio"] - 1) <= 0.2 for row in fsdp) >= 15
