"""The sides that this distribution offers: rankmesh finds each, and says which framework is missing."""

import sys
from importlib.metadata import distributions

import pytest

from rankmesh.errors import LayoutError, MissingExtra
from rankmesh.transfer.layouts import sides

pytestmark = pytest.mark.skipif(
    not list(distributions(name="rankmesh-engines")),
    reason="rankmesh-engines is not installed: pip install -e packages/rankmesh-engines",
)

# What each side imports first of its framework.
FIRST = {"megatron": "mbridge", "sglang": "transformers", "transformers": "transformers", "vllm": "vllm"}


@pytest.mark.parametrize("name", FIRST)
def test_a_side_without_its_framework_names_it(monkeypatch, name):
    """Each side is an entry point that loads its own module, which asks for its framework first."""
    for module in [module for module in sys.modules if module.startswith("rankmesh_engines.")]:
        monkeypatch.delitem(sys.modules, module)
    for package in (*FIRST, *FIRST.values()):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        sides.side(f"{name}:tp=2", {})
    assert FIRST[name] in caught.value.names
    assert caught.value.extra == name


def test_an_unknown_side_is_offered_these():
    """The message lists what is installed."""
    with pytest.raises(LayoutError, match=r"known are .*megatron, .*sglang, .*transformers, .*vllm"):
        sides.side("trt:tp=2", {})
