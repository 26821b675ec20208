"""Schemas accept what rankmesh writes and what the pages show; what a schema refuses, the reader refuses."""

import copy
import json
import re
from functools import cache
from typing import get_args

import jsonschema
import pytest
import yaml
from tests.docs.pages import ROOT

from rankmesh import Mesh, Plan, RankmeshError, ends
from rankmesh.cli.look.schema import Document, schema
from rankmesh.core import GroupSpec, presets
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.placement import Traffic
from rankmesh.placement.traffic import COLLECTIVES
from rankmesh.readers.source import read
from rankmesh.transfer.planning.tensors_file import read_tensors

RECIPES = [
    "tp=2,cp=2,dp=4,pp=2", "tp=2,dp=4/expert:ep=8", "megatron:world=64,tp=2,pp=2,ep=4", "nanotron:tp=2,dp=2,pp=2",
    "megatron:world=64,tp=2,cp=2,pp=2", "ezpz:world=8,tp=2", "three_d:world=8,tp=2,pp=2", "vllm:tp=2", "sglang:tp=4",
    "torchtitan:world=16,tp=2,ep=2", "accelerate:tp=2,dp_shard=2", "deepspeed:world=8,tp=2",
]  # fmt: skip
FULL_PLAN = Plan(
    Mesh(tp=2, pp=4, rank_map=(0, 2, 1, 3, 4, 5, 6, 7)).with_view("expert", ep=2, pp=4).split("tp", a=1, b=2),
    [
        GroupSpec("embd", "pp", pick=ends, timeout=5, nccl={"max_ctas": 4}, backend="gloo", lazy=True),
        GroupSpec("ep", view="expert", pipeline=True, overlap="gather", share=False),
        GroupSpec("hcp", "pp", levels=(2, 2), level=1, high_priority=True, sharp=True),
    ],
    world_size=9,
    name="llm",
)
APART = Plan(Mesh(tp=2, dp=2).slice("dp", of=1), [GroupSpec("dp")])
CLUSTER = {
    "schema": 1,
    "levels": [
        {"name": "pix", "latency": 3e-6, "bandwidth": 64e9},
        {"name": "host", "latency": None, "default": True},
        {"name": "leaf", "uplink": 1e11},
    ],
    "hosts": [
        {"name": "node[1-2]", "devices": 2, "pix": [0, 1], "leaf": "a"},
        {"name": "node3", "devices": 2, "pix": [0, 0], "leaf": 7},
    ],
    "rank_map": [1, 0, 2, 3, 4, 5],
}
TRAFFIC = {"tp": [{"collective": "all_reduce", "bytes": 1024, "times": 4}], "pp": [{"collective": "ring", "bytes": 8}]}
TENSORS = {
    "qkv": {
        "shape": [96, 4],
        "dtype": "bfloat16",
        "source": {"cut": ["tp", None], "at": {"pp": [0, -1]}, "parts": [64, 32], "padded": {"1": 8}, "view": None},
        "target": {"cut": [["dp", "tp"], None], "parts": {"0": [96]}},
    },
    "norm": {"shape": [4], "source": {"at": {"pp": 1}}, "target": None},
}
MESHES = Mesh(tp=2, pp=2), Mesh(dp=2, tp=2)
EXAMPLES = {
    "plan": [json.loads(FULL_PLAN.to_json()), json.loads(APART.to_json())],
    "cluster": [CLUSTER],
    "traffic": [TRAFFIC],
    "tensors": [TENSORS],
}
REPLACEMENTS = [None, True, False, 0, 1, -1, 2.5, "", "x", "tp", [], [1], [True], ["x"], [None], {}, {"x": 1}]


@cache
def checker(name):
    """What checks documents of one kind."""
    return jsonschema.Draft202012Validator(schema(name))


def problems(name, document):
    """The first problem that the schema finds in a document, None for a valid one."""
    return next(checker(name).iter_errors(document), None)


@pytest.fixture
def reads(tmp_path):
    """Whether the reader of a kind of file takes a document."""
    readers = {
        "plan": lambda path: Plan.from_json(path.read_text()),
        "cluster": Cluster.read,
        "traffic": Traffic.read,
        "tensors": lambda path: read_tensors(path, *MESHES),
    }

    def taken(name, document):
        path = tmp_path / "document.json"
        path.write_text(json.dumps(document))
        try:
            readers[name](path)
        except RankmeshError:
            return False
        return True

    return taken


def places(value, path=()):
    """The path of each value inside a document, the document first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(document, path, change):
    """A copy of a document; ``change`` is called with the container and key of a place."""
    holder = {"root": copy.deepcopy(document)}
    container, key = holder, "root"
    for step in path:
        container, key = container[key], step
    change(container, key)
    return holder.get("root")


def mutations(document):
    """Documents that differ in one place: another value, a missing key or item, a key more."""
    for path in places(document):
        for value in REPLACEMENTS:
            yield changed(document, path, lambda container, key, value=value: container.__setitem__(key, value))
        if path:
            yield changed(document, path, lambda container, key: container.pop(key))
        for value in ("x", 1):
            yield changed(document, path, lambda container, key, value=value: _add(container[key], value))


def _add(value, unknown):
    if isinstance(value, dict):
        value["unknown"] = unknown


@pytest.mark.parametrize("name", get_args(Document))
def test_a_schema_is_valid(name, rankmesh):
    """The command prints the file as it is, which is a schema of 2020-12."""
    printed = json.loads(rankmesh("schema", name).out)
    assert printed == schema(name)
    assert printed["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(printed)


def test_the_list(rankmesh):
    """Without a name, the schemas are listed with one line each."""
    listed = json.loads(rankmesh("schema", "--json").out)
    assert tuple(listed) == get_args(Document)
    for name, title in listed.items():
        assert re.search(rf"^{name} +{re.escape(title)}$", rankmesh("schema").out, re.MULTILINE)


@pytest.mark.parametrize("spec", [*RECIPES, *presets.PRESETS])
def test_saved_plans(spec):
    """The plan of each recipe and preset is valid."""
    assert not problems("plan", json.loads(read(spec).plan.to_json()))


@pytest.mark.parametrize("text", ["host=8", "host=2,leaf=2:25GB", "pix=2,numa=2,host=2,leaf=4,spine=2"])
def test_printed_clusters(text, rankmesh):
    """What ``cluster --json`` prints is valid, with hosts in another order too."""
    assert not problems("cluster", json.loads(rankmesh("cluster", text, "--json").out))
    assert not problems("cluster", Cluster.parse("host=2,leaf=2", hosts="node10,node9").to_dict())


def test_documents_of_the_pages():
    """The traffic, tensors and cluster files that the pages and docstrings show are valid."""
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert not problems("tensors", json.loads(re.search(r"`tensors\.json`:\n\n```json\n(.*?)```", page, re.DOTALL)[1]))
    page = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
    assert not problems("traffic", yaml.safe_load(re.search(r"`traffic\.yaml`:\n\n```yaml\n(.*?)```", page, re.S)[1]))
    shown = re.search(r"```yaml\n(.*?)```", Cluster.from_dict.__doc__, re.DOTALL)[1]
    assert not problems("cluster", yaml.safe_load(shown))
    for name in COLLECTIVES:
        assert not problems("traffic", Traffic({"tp": [{"collective": name, "bytes": 1}]}).to_dict())


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_schema_refuses_is_refused(name, reads):
    """Of all documents that differ from a valid one in one place, the reader takes none that the schema refuses."""
    for document in EXAMPLES[name]:
        assert reads(name, document)
        assert not problems(name, document)
        refused = [mutation for mutation in mutations(document) if problems(name, mutation)]
        assert len(refused) > 50
        assert not [mutation for mutation in refused if reads(name, mutation)]


@pytest.mark.parametrize(
    ("name", "path", "change"),
    [
        ("plan", ("mesh",), "missing"),
        ("plan", ("groups", 0, "name"), "missing"),
        ("plan", ("groups", 2, "level"), "missing"),
        ("plan", ("groups", 0, "options", "timout"), 5),
        ("plan", ("schema",), 2),
        ("plan", ("mesh", "axes", 0), ["tp"]),
        ("plan", ("mesh", "axes", 0, 1), "2"),
        ("plan", ("mesh", "consecutive"), 1),
        ("cluster", ("levels", 0, "speed"), 1),
        ("cluster", ("levels", 0, "bandwidth"), 0),
        ("cluster", ("hosts", 0, "devices"), "8"),
        ("cluster", ("hosts", 0, "pix"), [0, True]),
        ("cluster", ("hosts",), []),
        ("traffic", ("tp", 0, "bytes"), "missing"),
        ("traffic", ("tp", 0, "collective"), "all-sum"),
        ("traffic", ("tp", 0, "size"), 1),
        ("traffic", ("tp",), {"collective": "ring", "bytes": 8}),
        ("tensors", ("qkv", "shape"), "missing"),
        ("tensors", ("qkv", "source", "dims"), []),
        ("tensors", ("qkv", "source", "cut"), "tp"),
        ("tensors", ("norm", "target"), []),
        ("tensors", (), {}),
    ],
)
def test_structure_that_readers_refuse(name, path, change, reads):
    """A wrong type, an unknown key of a form that refuses them, and a missing key are refused by both."""

    def edit(container, key):
        container.pop(key) if change == "missing" else container.__setitem__(key, change)

    document = changed(EXAMPLES[name][0], path, edit)
    assert problems(name, document)
    assert not reads(name, document)
