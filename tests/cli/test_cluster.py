import json

import pytest

import rankmesh as rm

TREE = "SwitchName=s1 Nodes=node[1-2]\nSwitchName=s2 Nodes=node[3-4]\nSwitchName=top Switches=s[1-2]\n"


# A search of layouts, which lacks nothing.
SEARCH = ("search", "-w", 8, "-c", "host=8", "-m", "llama3-8b", "--batch", 64, "--sequence", 2048)


def test_cluster_of_a_string(rankmesh) -> None:
    """Levels and hosts for people, and the document of the design for programs, which is a file again."""
    shown = rankmesh("cluster", "host=2,leaf=2,spine=2")
    assert "8 devices, 4 hosts of 2, levels host leaf spine" in shown.out
    data = json.loads(rankmesh("cluster", "host=2,leaf=2,spine=2", "--json").out)
    assert [set(level) for level in data["levels"]] == [{"name", "latency", "bandwidth", "default"}] * 3
    assert data["hosts"][3] == {"name": "node3", "devices": 2, "leaf": "leaf1", "spine": "spine0"}
    assert rm.Cluster.from_dict(data) == rm.Cluster.parse("host=2,leaf=2,spine=2")


def test_default_bandwidths_are_marked(rankmesh, tmp_path) -> None:
    """Figures that nobody gave are called defaults, in the cluster and under a placement; given ones are not."""
    shown = rankmesh("cluster", "host=2,leaf=2")
    assert shown.out.count("default\n") == 2
    assert "default: assumed, not measured" in shown.out
    assumed = "h100: NVLink of 450 GB/s with NVLS, 2 ports of 50 GB/s"
    assert assumed in shown.out
    placed = rankmesh("place", "tp=2,dp=2", "-c", "host=2,leaf=2")
    assert f"{assumed}; host, leaf by default" in placed.err
    assert json.loads(rankmesh("cluster", "host=2,leaf=2", "--json").out)["links"] == assumed
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "levels: [{name: host, latency: 1.0e-6, bandwidth: 9.0e+11}, {name: leaf, bandwidth: 25.0e+9}]\n"
        "hosts: [{name: 'n[1-2]', devices: 2, leaf: a}]\n"
    )
    assert "default" not in rankmesh("cluster", file).out
    assert "by default" not in rankmesh("place", "tp=2,dp=2", "-c", file).err
    file.write_text(file.read_text().replace(", bandwidth: 25.0e+9", ""))
    assert "leaf by default, not measured" in rankmesh("place", "tp=2,dp=2", "-c", file).err


def test_cluster_of_a_file(rankmesh, tmp_path, monkeypatch) -> None:
    """A topology file, some of its hosts; what nobody says is noted; inside a Slurm job its own hosts are taken."""
    (tmp_path / "topology.conf").write_text(TREE)
    path = tmp_path / "topology.conf"
    ran = rankmesh("cluster", path, "--hosts", "node3,node[1-2]", "--json")
    assert [host["name"] for host in json.loads(ran.out)["hosts"]] == ["node1", "node2", "node3"]
    assert "8 are assumed" in ran.err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[2-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    assert "8 devices, 2 hosts of 4" in rankmesh("cluster", path).out
    assert "8 devices, 2 hosts of 4, levels host network" in rankmesh("cluster").out


def test_place(rankmesh, tmp_path) -> None:
    """The constraint is met; the saved plan is a SPEC with the rank map."""
    (tmp_path / "traffic.json").write_text('{"tp": [{"collective": "all-reduce", "bytes": 1048576, "times": 4}]}')
    saved = tmp_path / "placed.json"
    arguments = ("place", "dp=4,tp=2", "-c", "host=2,leaf=2,spine=2", "--within", "tp=host")
    ran = rankmesh(*arguments, "--traffic", tmp_path / "traffic.json", "--save", saved, "--json")
    data = json.loads(ran.out)
    assert (data["order"], data["rank_map"], data["within"]) == ("tp-dp", [0, 2, 4, 6, 1, 3, 5, 7], {"tp": "host"})
    assert data["cost"] < data["before"]
    assert rm.Plan.from_json(saved.read_text()).groups("tp").tolist()[0] == [0, 1]
    shown = rankmesh(*arguments)
    assert "tp-dp on 8 devices" in shown.out
    assert "predicted, not measured" in shown.out
    assert "usual transformer" in shown.err


def test_search(rankmesh, tmp_path) -> None:
    """A ranked table, quickest first, of layouts that fit; honest words; a model that fits nowhere is refused."""
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("search", "--world", 8, "-c", "host=4,leaf=2", "--model", tmp_path / "config.json")
    asked = (*asked, "--batch", 32, "--sequence", 1024)
    ran = rankmesh(*asked, "--json")
    data = json.loads(ran.out)
    rows = data["rows"]
    assert "predicted, not measured" in ran.err
    assert all(row["parts"].keys() == {"compute", "bubble", "communication"} for row in rows)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert all(row["tp"] * row["cp"] * row["pp"] * row["dp"] == 8 for row in rows)
    assert data["assumptions"]["recompute"] == "chosen for each layout"
    shown = rankmesh(*asked, "--explain", 2, "--top", 3).out
    assert "row  tp  cp  pp  dp  order" in shown
    assert "row 2: seconds of a step" in shown
    assert "sequence parallel  where tp is above 1" in shown
    for more, code, output in (("--explain", 500), 2, "is beyond the"), (("--memory", 0.1), 3, "no layout of"):
        refused = rankmesh(*asked, *more)
        assert (refused.code, output in refused.err) == (code, True)


def test_a_measurement_without_a_speed_is_refused(rankmesh, tmp_path) -> None:
    """What an older release measured has none; the command that measures it is named."""
    (tmp_path / "old.json").write_text(json.dumps({"kinds": []}))
    ran = rankmesh(*SEARCH, "--speed", tmp_path / "old.json")
    assert (ran.code, "has no speed of a device; write one with rankmesh measure SPEC --json" in ran.err) == (3, True)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("flags", "name", "assumed"),
    [
        (("--no-sequence-parallel", "--schedule", "dualpipe"), "schedule", "dualpipe"),
        (("--recompute", "full"), "recompute", "full"),
        (("--microbatch", 4, "--virtual-stages", 2), "microbatch", "4"),
        (("--vocabulary", 50_000), "model", "a vocabulary of 50,000"),
        (("--precision", "fp8"), "device", "1979 TFLOP/s in fp8"),
        (("--device", "a100", "--memory", 40), "memory", "40 GB"),
        (("--speed", "40%"), "device", "395.6 TFLOP/s of everything, 40% of the peak, as given"),
        (("--speed", "measured.json"), "device", "123 TFLOP/s of everything, the slowest rank's matrix products in"),
        (("--overlap", "dp,ep"), "overlap", "communication of dp, ep"),
        (("--zero", 1, "--replicate", 2), "replicate", "2 copies"),
        (("--context", "all-gather", "--attention", "unfused"), "attention", "unfused, causal; with cp by all-gather"),
    ],
)
def test_search_says_what_it_assumes(rankmesh, tmp_path, monkeypatch, flags, name, assumed) -> None:
    """Each flag is in the assumptions, and in every row where rows have it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.json").write_text(json.dumps({"kinds": [], "speed": 123e12}))
    data = json.loads(rankmesh(*SEARCH, *flags, "--json").out)
    assert data["assumptions"][name].startswith(assumed) or assumed in data["assumptions"][name]
    if name in ("recompute", "microbatch"):
        assert {str(row[name]) for row in data["rows"]} == {assumed}


def test_show_on_a_cluster(rankmesh) -> None:
    """show --cluster says the level that holds the groups of each kind."""
    data = json.loads(rankmesh("show", "tp=2,dp=4", "--cluster", "host=2,leaf=2,spine=*", "--json").out)
    assert [kind["level"] for kind in data["kinds"]] == ["host", "spine"]
    assert "level" in rankmesh("show", "tp=2,dp=4", "--cluster", "host=2,leaf=2,spine=*").out
