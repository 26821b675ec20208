"""The command that writes the explorer's page: what it gives the page, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from rankmesh.cli.look.explore import explored
from rankmesh.core.plan import Plan
from rankmesh.errors import ClusterError, PlacementError, UnknownGroup
from rankmesh.readers.source import read
from rankmesh.viz.explorer import fragment, given, page, spec_of

RECORDINGS = Path(__file__).parents[1] / "hangs" / "recordings"
SCRIPT = "#!/bin/bash\ntorchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 \\\n"
SCRIPT += "  --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --num-distributed-optimizer-instances 2\n"


def _inside(text):
    found = re.search(r'<script type="application/json" id="given">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def test_the_page_is_written_with_the_layout(rankmesh, tmp_path):
    """The file is one page that holds the SPEC and the cluster; words go to stderr."""
    file = tmp_path / "layout.html"
    ran = rankmesh("explore", "tp=2,dp=4", "--cluster", "host=4,leaf=*", "--html", file)
    assert (ran.code, ran.out, ran.err) == (0, "", f"wrote {file}\n")
    assert _inside(file.read_text()) == {"state": {"spec": "tp=2,dp=4", "cluster": "host=4,leaf=*"}}


def test_gpus_per_node_are_the_devices_of_a_host(rankmesh, tmp_path):
    """-g sets the devices of a host, as it does for show; a cluster that is given says them itself."""
    for options, cluster in ((("-g", 4), "4"), ((), "8"), (("-g", 4, "--cluster", "host=2,leaf=*"), "host=2,leaf=*")):
        ran = rankmesh("explore", "tp=2,dp=4", *options, "--html", tmp_path / "a.html", "--json")
        assert json.loads(ran.out)["state"]["cluster"] == cluster


def test_json_says_what_the_page_is_given(rankmesh, tmp_path):
    """--json has the file, the fragment of a link, the world and what is given."""
    ran = rankmesh("explore", "tp=2,dp=*", "-w", 8, "--html", tmp_path / "a.html", "--json")
    data = json.loads(ran.out)
    assert (data["world_size"], data["fragment"]) == (8, "spec=tp=2,dp=*&world=8&cluster=8")
    assert (tmp_path / "a.html").exists()


def test_a_config_is_the_recipe_of_its_lines(tmp_path):
    """A launch script is given as a SPEC that makes the same plan, to be played with."""
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    spec, world = spec_of(read(script))
    assert (spec, world) == ("megatron:world=16,tp=2,pp=2,order=tp-cp-ep-pp-dp,optimizer_instances=2", None)
    assert read(spec).plan == read(script).plan


def test_a_plan_that_no_spec_says_is_given_as_it_is(tmp_path):
    """A saved plan with a rank map comes along whole, and is the same plan again."""
    plan = read("tp=2,dp=2").plan.replace(rank_map=(0, 2, 1, 3))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    data = given(read(file))
    assert data["state"]["spec"] == "given"
    assert Plan.from_json(json.dumps({"schema": 1, **data["plan"]})) == plan


def test_a_preset_brings_its_hosts():
    """Devices a host are the preset's; others start with eight."""
    assert given(read("llama3-405b"))["state"] == {"spec": "llama3-405b", "cluster": "8"}


def test_a_cluster_too_small_is_refused():
    """Each rank needs a device; a file that is no string of axes comes along as a document."""
    with pytest.raises(ClusterError, match="rank 15 has no device: the cluster has 8 devices, for ranks 0 to 7"):
        explored("dp=16", cluster="host=8")


def test_a_measurement_is_drawn_by_group(tmp_path):
    """What measure --json prints comes along; what it has not measured of this plan is refused."""
    row = {"name": "dp", "collective": "all-reduce", "bytes": 4096, "seconds": 1.0, "busbw": 2.0, "slowest": {}}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"backend": "gloo", "kinds": [{**row, "groups": [1.0, 0.5]}], "slow_hosts": ["b"]}))
    data = explored("tp=2,dp=4", measured=file)
    assert data["measured"]["kinds"][0]["groups"] == [1.0, 0.5]
    assert data["state"]["overlay"] == "measured"
    with pytest.raises(PlacementError) as error:
        explored("tp=4,dp=4", measured=file)
    assert (error.value.kind, error.value.groups) == ("dp", 4)
    with pytest.raises(UnknownGroup):
        explored("tp=4,cp=2", measured=file)
    file.write_text("[]")
    with pytest.raises(PlacementError, match="not a measurement"):
        explored("tp=2,dp=4", measured=file)
    file.write_text("{")
    with pytest.raises(PlacementError, match="is not valid JSON"):
        explored("tp=2,dp=4", measured=file)


def test_recordings_of_a_hang_say_who_waits_for_whom():
    """The doctor's causes, and each unfinished call with those who wait and those who have not come."""
    data = explored("tp=2,dp=2", recordings=RECORDINGS / "skips_a_call")
    assert data["state"]["overlay"] == "hang"
    assert data["hang"]["causes"]
    turns = data["hang"]["turns"]
    assert turns
    assert all(turn["waiting"] for turn in turns)


def test_texts_cannot_end_the_script():
    """A title that looks like the end of a script stays text."""
    data = {"state": {"spec": "given"}, "title": "</script><script>alert(1)</script>"}
    assert _inside(page(data)) == data


def test_fragments_are_quoted():
    """What has a meaning in a fragment is escaped."""
    assert fragment({"spec": "a&b#c d"}) == "spec=a%26b%23c%20d"
