"""Each format makes the plan that its recipe makes, and says which lines it read."""

from pathlib import Path

import pytest

from rankmesh import PlanError
from rankmesh.core import recipes
from rankmesh.readers import read_config, source

FILES = Path(__file__).with_name("files")

CASES = {
    "megatron.sh": (None, recipes.megatron(32, tp=4, pp=2, cp=1, ep=4, etp=1)),
    "megatron.yaml": (16, recipes.megatron(16, tp=2, pp=4, order="tp-cp-ep-pp-dp")),
    "nanotron.yaml": (None, recipes.nanotron(16, tp=2, pp=2, dp=4)),
    "torchtitan.toml": (16, recipes.torchtitan(16, dp_replicate=2, tp=2, pp=2, ep=4)),
    "deepspeed.json": (8, recipes.deepspeed(8, tp=2, hpz=4)),
    "accelerate.yaml": (None, recipes.accelerate(16, dp_replicate=2, dp_shard=2, tp=2, cp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_plan_of_its_recipe(name, tmp_path):
    """A file of each format is read as the recipe with its sizes, whatever its name; readings name their lines."""
    world_size, plan = CASES[name]
    text = (FILES / name).read_text()
    for other in ("config", "config.txt", "job.slurm.bak"):
        (tmp_path / other).write_text(text)
        assert source.read(str(tmp_path / other), world_size=world_size).plan == plan
    found = source.read(str(FILES / name), world_size=world_size)
    assert (found.kind, found.text, found.plan) == ("config", str(FILES / name), plan)
    assert found.config.format == name.partition(".")[0]
    assert source.read(found.config.spec).plan == plan
    assert found.config.readings
    for reading in found.config.readings:
        assert reading.key.rpartition(".")[2].split()[0] in text.splitlines()[reading.line - 1]


def test_a_config_has_a_spec():
    """Lists of sizes are joined as a SPEC has them; a layout that is no recipe has no SPEC."""
    sizes = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
    config = read_config(f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes}", "run.sh")
    assert config.spec == "megatron:world=8,cp=4,hierarchical_cp=2x2"
    assert source.read(config.spec).plan == config.plan
    assert read_config('pipe-parallel-size: 2\n"model-parallel-size": 2\n', "125M.yml", world_size=8).spec is None


@pytest.mark.parametrize("name", ["megatron.yaml", "torchtitan.toml", "deepspeed.json"])
def test_an_unknown_world_size_is_asked_for(name):
    """A file that does not say how many ranks there are needs --world-size."""
    with pytest.raises(PlanError, match=r"does not state the world size, .*give --world-size") as caught:
        source.read(str(FILES / name))
    assert caught.value.path == str(FILES / name)


@pytest.mark.parametrize("name", ["megatron.sh", "accelerate.yaml"])
def test_two_world_sizes_are_refused(name):
    """A world size that differs from the file's is refused with the line; the same one is welcome."""
    plan = CASES[name][1]
    assert source.read(str(FILES / name), world_size=plan.world_size).plan == plan
    with pytest.raises(PlanError, match="but the world size is 64; leave --world-size out") as caught:
        source.read(str(FILES / name), world_size=64)
    assert (caught.value.line, caught.value.received) in [(15, 32), (10, 16)]
    with pytest.raises(PlanError, match=r"line 5: parallelism.dp = 4"):
        source.read(str(FILES / "nanotron.yaml"), world_size=32)


TITAN = "[parallelism]\ntensor_parallel_degree = 2\n"
ACCELERATE = "distributed_type: {}\nnum_machines: 2\nnum_processes: 8\n"

SMALL = [
    ("[training]\ntensor_parallel_degree = 2\n[experimental]\ncontext_parallel_degree = 2\n", 8, "torchtitan",
     recipes.torchtitan(8, tp=2, cp=2)),
    ("parallelism.tensor_parallel_degree = 2\nparallelism.data_parallel_shard_degree = 4\n", None, "torchtitan",
     recipes.torchtitan(8, tp=2, dp_shard=4)),
    ('note = """\ntensor_parallel_degree = 4\n"""\n' + TITAN, 8, "torchtitan", recipes.torchtitan(8, tp=2)),
    ("parallelism: &p {dp: 2, tp: 2, pp: 1, context_parallel_size: 2}", None, "nanotron",
     recipes.nanotron(tp=2, dp=2, cp=2)),
    ("base: &base {dp: 8, tp: 2, pp: 1}\nparallelism:\n  <<: *base\n  dp: 2\n", None, "nanotron",
     recipes.nanotron(tp=2, dp=2)),
    ("tensor-model-parallel-size: 2\nworld_size: 8\n", None, "megatron", recipes.megatron(8, tp=2)),
    (("MODEL_ARGS:\n  --tensor-model-parallel-size: 2\n  --context-parallel-size: 4\n"
     "  --hierarchical-context-parallel-sizes: [2, 2]\n"), 16, "megatron", recipes.megatron(16, tp=2, cp=4,
     hierarchical_cp=(2, 2))),
    ('{"tensor_model_parallel_size": 2, "world_size": 8, "data_parallel_size": 4}', None, "megatron",
     recipes.megatron(8, tp=2)),
    ('{"train_batch_size": 8, "sequence_parallel_size": 4, "data_parallel_size": 2}', None, "deepspeed",
     recipes.deepspeed(8, sp=4)),
    ('{"zero_optimization": {"mics_shard_size": 4}, "tensor_parallel": {"autotp_size": 0}}', 8, "deepspeed",
     recipes.deepspeed(8, mics=4)),
    ('{"expert_parallel": {"enabled": true, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}}', 8,
     "deepspeed", recipes.deepspeed(8, tp=2, ep=2)),
    ('{"expert_parallel": {"enabled": false, "autoep_size": 2}}', 8, "deepspeed", recipes.deepspeed(8)),
    (ACCELERATE.format("MULTI_GPU"), None, "accelerate", recipes.accelerate(8, dp_replicate=8)),
    (ACCELERATE.format("FSDP"), None, "accelerate", recipes.accelerate(8)),
    (ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", None, "accelerate",
     recipes.accelerate(8, dp_replicate=2)),
    (ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}", None, "accelerate",
     recipes.accelerate(8, dp_replicate=8)),
    (ACCELERATE.format("MEGATRON_LM") + "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2}",
     None, "accelerate", recipes.megatron(8, tp=2, pp=2)),
    (ACCELERATE.format("DEEPSPEED") + "deepspeed_config: {zero_stage: 3}", None, "accelerate", recipes.deepspeed(8)),
    ("parallelism_config: {parallelism_config_tp_size: 4, parallelism_config_dp_replicate_size: 1}", None,
     "accelerate", recipes.accelerate(4, tp=4)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "world_size", "name", "plan"), SMALL)
def test_other_ways_to_say_it(text, world_size, name, plan):
    """Dotted keys, inline tables, merged maps, hyphens, older tables and every type of Accelerate are read."""
    config = read_config(text, "config", world_size=world_size)
    assert (config.format, config.plan) == (name, plan)


REFUSED = [
    ("{}", None, "this is not a training config"),
    ("general: {project: x}", None, "no key of a training config"),
    ("tensor_model_parallel_size: 2\nzero_optimization: {stage: 1}\n", 8, "keys of megatron and of deepspeed"),
    ("parallelism: {dp: 2, tp: 2, pp: 1, tensor_parallel_degree: 2}", None, "keys of nanotron and of torchtitan"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: 2\n  tpp: 2\n", None, r":5: parallelism.tpp = 2; .*did you mean"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: 2\n  zz: 2\n", None, r":5: .*the sizes that are read: tp, pp"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: 2\n  tp: 4\n", None, r":5: parallelism.tp = 4; line 4 says"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: two\n", None, r":4: parallelism.tp = two; .*whole number"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: 0\n", None, r":4: parallelism.tp = 0; .*at least 1"),
    ("parallelism:\n  dp: 2\n  pp: 1\n  tp: true\n", None, r":4: .*whole number"),
    (TITAN + "tensor_paralel_degree = 4\n", 8, r":3: .*did you mean 'tensor_parallel_degree'"),
    (TITAN + "mystery = 4\n", 8, r":3: .*the sizes that are read"),
    (TITAN + "data_parallel_shard_degree = -2\n", 8, r":3: .*at least 1"),
    (TITAN + "[fault_tolerance]\nenable = true\n", 8, r":4: fault_tolerance.enable = true; replica groups"),
    (TITAN, 9, r"does not divide it.*line 2: parallelism.tensor_parallel_degree = 2"),
    ("[parallelism]\ntensor_parallel_degree = 2\ntensor_parallel_degree = 4\n", 8, "this is not a training config"),
    ("tensor_model_paralel_size: 2\npipeline_model_parallel_size: 2\n", 8,
     r":1: .*did you mean 'tensor_model_parallel"),
    ("tensor_model_parallel_size: 2\nencoder_tensor_model_parallel_size: 2\n", 8, r":2: .*a second mesh"),
    ("tensor_model_parallel_size: ${oc.env:TP}\n", 8, r":1: .*the environment of the job gives it; .*--set TP=2"),
    ('{"train_batch_size": 8, "sequence_parallel_size": 4}', 8, "add data_parallel_size"),
    ('{"train_batch_size": 8,\n "autotuning": {"enabled": true, "mp_size": 2}}', 8, ":2: .*an axis of its own"),
    ('{"tensor_parallel": {"autotp_siz": 4}}', 8, "did you mean 'autotp_size'"),
    ('{\n"tensor_parallel": {\n"autotp_size": "auto"}}', 8, ":3: tensor_parallel.autotp_size = .*whole number"),
    ('{"train_batch_size": 8,\n "zero_optimization": {"mics_hierarchical_params_gather": true}}', 8,
     ":2: .*a node has"),
    (ACCELERATE.format("TPU"), None, ":1: .*no recipe has the layout of this type"),
    (ACCELERATE.format("FSDP") + "parallelism_config:\n  tp_size: 2\n", None,
     "did you mean 'parallelism_config_tp_size'"),
    (ACCELERATE.format("DEEPSPEED") + "deepspeed_config:\n  deepspeed_config_file: ds.json\n", None,
     "give its path"),
    (ACCELERATE.format("MULTI_GPU") + "megatron_lm_config:\n  megatron_lm_tp_degree: 2\n", None, ":5: .*without it"),
    (ACCELERATE.format("DEEPSPEED") + "parallelism_config: {parallelism_config_tp_size: 4}\n", None,
     "distributed_type DEEPSPEED lays its ranks out without it"),
    (ACCELERATE.format("FSDP") + "parallelism_config:\n  parallelism_config_tp_size: 2\n", None,
     "parallelism_config_dp_shard_size 4, which fits"),
    ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", None,
     ":3: .*add num_machines"),
    ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n", None, "add distributed_type"),
    (TITAN + f"{'x' * 5000} = 2\n", 8, r"^[^\n]{1,999}\Z"),  # a long key is shown by its first characters
    ("parallelism: " + "[" * 1200, None, "nested more than 64 deep"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "world_size", "message"), REFUSED)
def test_what_is_ambiguous_or_not_modelled_is_refused(text, world_size, message):
    """Typos, contradictions, wrong values, and layouts that no recipe has name the file, the line and a remedy."""
    with pytest.raises(PlanError, match=message) as caught:
        read_config(text, "run.cfg", world_size=world_size)
    assert str(caught.value).startswith("run.cfg")


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("a.toml", "TOML", "[parallelism\n"),
        ("a.yaml", "YAML", "a: [1\n"),
        ("a.yml", "YAML", "a: b: c\n"),
        ("a.json", "JSON", '{"train_batch_size": 8} // as DeepSpeed reads it\n'),
    ],
)
def test_a_broken_file_is_an_error_with_the_reason(name, kind, text, tmp_path):
    """A file whose name says what it is, and whose text is not, is refused with the parser's reason."""
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=f"is not valid {kind} .*; fix the file"):
        source.read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.sh", "a.json", "a.yaml", "a.txt"])
def test_an_empty_file(name, tmp_path):
    """It is called empty, whatever its name; a name with the ending of a config is a path."""
    with pytest.raises(PlanError, match="cannot be read" if name != "a.txt" else "unknown layout"):
        source.read(f"absent.{name[2:]}")
    (tmp_path / name).write_text("\n")
    with pytest.raises(PlanError, match="an empty file"):
        source.read(str(tmp_path / name))
