"""``rankmesh layout``: what it refuses before any framework runs, and what it prints."""

import json
import sys
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rankmesh as rm
from rankmesh.cli.weights.layout import config_of
from rankmesh.errors import LayoutError, MissingExtra
from rankmesh.transfer.layouts import sides
from rankmesh_engines.loaders import Side


def _llama(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return folder


def test_a_model_is_a_folder_or_its_config(tmp_path):
    """Both name the same configuration; a missing, torn or foreign file is refused with its path."""
    assert config_of(_llama(tmp_path)) == config_of(tmp_path / "config.json") == {"model_type": "llama"}
    with pytest.raises(LayoutError, match=r"there is no '.*'; give a folder"):
        config_of(tmp_path / "nowhere")
    (tmp_path / "torn.json").write_text('{"model_type', encoding="utf-8")
    with pytest.raises(LayoutError, match="is not valid JSON"):
        config_of(tmp_path / "torn.json")
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LayoutError, match="has no model_type"):
        config_of(tmp_path / "other.json")


def test_a_model_by_its_name(tmp_path, monkeypatch):
    """The published sizes; a folder of that name goes first; a name that is nearly one is offered the right one."""
    assert config_of(Path("deepseek-v3"))["n_routed_experts"] == 256
    with pytest.raises(LayoutError, match="there is no 'llama-3-8b'; did you mean 'llama3-8b'"):
        config_of(Path("llama-3-8b"))
    with pytest.raises(LayoutError, match=r"or one of llama3-8b, llama3-70b, .*gemma3-27b"):
        config_of(Path("nowhere"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepseek-v3").mkdir()
    assert config_of(_llama(Path("deepseek-v3"))) == {"model_type": "llama"}


@pytest.fixture
def installed(monkeypatch):
    """Let these sides be the installed ones: functions by name, or what an entry point says where one is.

    ``requires`` is what the metadata of their package says that it requires.
    """

    def install(requires=(), **made):
        points = []
        for name, side in made.items():
            monkeypatch.setattr(sys.modules[__name__], f"side_{name}", side, raising=False)
            value = side if isinstance(side, str) else f"{__name__}:side_{name}"
            points.append(EntryPoint(name, value, "rankmesh.sides")._for(SimpleNamespace(requires=requires)))
        monkeypatch.setattr(sides, "entry_points", lambda group: EntryPoints(points).select(group=group))

    return install


def test_unknown_sides_and_sizes_are_refused(installed):
    """Before anything is imported; a framework that is not installed is named."""
    installed(vllm="a_missing_engine:side")
    with pytest.raises(LayoutError, match="unknown side 'trt'; known are vllm"):
        sides.side("trt:tp=2", {})
    with pytest.raises(LayoutError, match="'tp=two' of side 'vllm:tp=two' is not a size; write tp=8"):
        sides.side("vllm:tp=two", {})
    with pytest.raises(LayoutError, match="has tp twice"):
        sides.side("vllm:tp=2,tp=4", {})
    with pytest.raises(MissingExtra) as caught:
        sides.side("vllm:tp=2", {})
    assert caught.value.names == ("a_missing_engine",)


def test_without_the_engines_the_command_says_how_to_install_them(tmp_path, installed, rankmesh):
    """Of a model that rankmesh's table does not have: one line with what to run, and the exit code of wrong usage."""
    installed()
    (tmp_path / "config.json").write_text('{"model_type": "toy"}', encoding="utf-8")
    done = rankmesh("layout", str(tmp_path), "--side", "vllm:tp=2")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("pip install 'rankmesh-engines[vllm]'\n")
    assert done.err.count("\n") == 1
    with pytest.raises(MissingExtra) as caught:
        sides.layout("vllm:tp=2", {})
    assert caught.value.name == "rankmesh_engines"


def test_all_packages_that_a_side_needs_are_named_at_once(installed):
    """Those of its own extra that are missing, by one command, before anything is imported."""
    requires = [
        "rankmesh[torch]<0.2",
        'missing_core>=2; extra == "vllm"',
        "numpy; extra == 'vllm'",
        'missing-loader ; extra == "vllm"',
        'missing_other; extra == "sglang"',
    ]
    installed(requires, vllm="a_missing_engine:side", sglang="a_missing_engine:side")
    with pytest.raises(MissingExtra, match=r"pip install missing_core missing-loader$") as caught:
        sides.side("vllm:tp=2", {})
    assert (caught.value.names, caught.value.extra) == (("missing_core", "missing-loader"), "vllm")
    with pytest.raises(MissingExtra) as caught:
        sides.side("sglang:tp=2", {})
    assert caught.value.names == ("missing_other",)


def _lazily(error):
    """As transformers does, which imports late."""
    raise RuntimeError("Failed to import a module") from error


ABSENT = {
    "by pip's words": (
        ImportError("Using `tp_plan` requires Accelerate: `pip install 'accelerate>=0.26'`"), "accelerate"),
    "by its module": (ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core"), "megatron-core"),
    "by a requirement": (PackageNotFoundError(
        "The 'safetensors>=0.4.3' distribution was not found and is required by this application."), "safetensors"),
    "of no known name": (ImportError("cannot import name 'a' from 'b' (b.py)"), None),
}  # fmt: skip


@pytest.mark.parametrize("how", ABSENT)
@pytest.mark.parametrize("when", ["constructed", "loaded", "behind another error"])
def test_a_package_that_is_missed_late_is_named(installed, how, when):
    """Whenever a framework finds it out, the error names the package, and no sizes."""
    error, package = ABSENT[how]

    def load(rank, tensors):
        raise error

    def side(config, *, tp):
        if when == "behind another error":
            _lazily(error)
        if when == "constructed":
            raise error
        return Side("vllm", rm.Mesh(tp=tp), {}, load)

    installed(vllm=side)
    with pytest.raises(MissingExtra) as caught:
        sides.layout("vllm:tp=2", {})
    assert caught.value.names == ((package,) if package else ())
    assert "sizes" not in str(caught.value)


def _asserts(tp):
    raise AssertionError


def _explains(tp):
    raise AssertionError("tp_size must divide")


REFUSED = {
    "with its words": (_explains, "tp_size must divide; change the sizes or the model"),
    "without a word": (_asserts, r"AssertionError at test_layout.py:\d+: raise AssertionError; change the sizes"),
    "by a defect": (lambda tp: {}["rope_theta"], "KeyError: 'rope_theta'; this release of sglang"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_framework_refuses_has_its_words(installed, how):
    """SGLang and vLLM check their arguments with assertions too, some of them without a word."""
    refuses, why = REFUSED[how]

    def side(config, *, tp):
        return Side("sglang", rm.Mesh(tp=tp), {}, lambda rank, tensors: refuses(tp)) if config else refuses(tp)

    installed(sglang=side)
    with pytest.raises(LayoutError, match=f"sglang refuses 'tp=3' for this model: {why}"):
        sides.side("sglang:tp=3", {})
    with pytest.raises(LayoutError, match=f"sglang cannot load this model as rank 0: {why}"):
        sides.layout("sglang:tp=3", {"model_type": "llama"})
    with pytest.raises(LayoutError, match="sglang has no option 'cp'"):
        sides.side("sglang:cp=3", {})


def test_a_layout_is_printed_as_a_table_and_as_json(tmp_path, monkeypatch, rankmesh):
    """The shardings by name, with positions, parts and padding; refusals below."""

    def side(text, config):
        assert (text, config["model_type"]) == ("toy:tp=2", "llama")

        def load(rank, tensors):
            row = torch.empty(1, 4)
            row.copy_(tensors["up"].narrow(0, rank, 1))
            scaled = torch.empty(2)
            scaled.copy_(tensors["norm"] * 2)
            return {"up": row, "scaled": scaled}

        return Side("toy", rm.Mesh(tp=2), {"up": ((2, 4), "float32"), "norm": ((2,), "float32")}, load)

    monkeypatch.setattr(sides, "side", side)
    shown = rankmesh("layout", str(_llama(tmp_path)), "--side", "toy:tp=2").out
    assert "up      2 x 4  float32  tp, -" in shown
    assert "refused: norm: scaled: it holds values that mul computes; only copies have a layout" in shown
    data = json.loads(rankmesh("layout", str(tmp_path), "--side", "toy:tp=2", "--json").out)
    assert data["tensors"]["up"]["cut"] == ["tp", None]
    assert list(data["refused"]) == ["norm"]
