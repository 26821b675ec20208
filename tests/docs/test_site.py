"""The site is built without a warning, from every page and every docstring, and nothing of them is lost."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "rankmesh",
    *(f"rankmesh.{name}" for name in ("errors", "core", "placement", "runtime", "viz", "sim", "testing", "transfer")),
    *(f"rankmesh.core.{name}" for name in ("recipes", "presets")),
    "rankmesh.readers",
    "rankmesh.readers.source",
    "rankmesh.launch",
    "rankmesh.debug.doctor",
    "rankmesh.debug.watch",
    "rankmesh.testing.strategies",
    *(f"rankmesh.dialects.{name}" for name in ("megatron", "nanotron", "ezpz", "ezpz.layers", "ezpz.mappings")),
    *(f"rankmesh.dialects.{name}" for name in ("fairscale", "process_groups", "deepspeed", "device_mesh")),
    "rankmesh.dialects.accelerate",
)

EMBEDDING = {"playground.html": 1, "concepts.html": 2}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    strictly = ("--fail-on-warning", "--nitpicky", "--keep-going", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strictly, "-d", str(folder / "trees"), "docs", str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "html"


def _text(html):
    return unescape(re.sub(r"<[^>]+>", "", html))


def _literal_blocks(site):
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("reference/*.html")]
    found = [block for page in pages for block in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    return "\n".join(_text(block) for block in found)


def test_the_make_target_is_as_strict():
    """`make docs` gives the flags that the test gives."""
    assert "--fail-on-warning --nitpicky --keep-going --quiet docs build/docs" in (ROOT / "Makefile").read_text()


@pytest.mark.long
def test_every_public_name_has_its_entry(site):
    """What the packages offer, and the methods of what `import rankmesh` offers, can be looked up."""
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, target: target)
    known = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    documented = {id(pkgutil.resolve_name(name)) for name in known}
    missing = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
        if f"{package}.{name}" not in known
        and id(getattr(importlib.import_module(package), name)) not in documented
        and not name.isupper()
    ]
    assert missing == ["rankmesh.recipes"]  # a module, whose page has each recipe
    assert {"rankmesh.Mesh.with_view", "rankmesh.Plan.digest", "rankmesh.LiveGroup.pg"} <= known


@pytest.mark.long
def test_drawings_and_examples_are_literal_blocks(site):
    """Each drawing and each example of the main docstrings stands on the site, line by line, as in the source."""
    shown = _literal_blocks(site)
    modules = ["errors", *(f"core.{name}" for name in ("mesh", "groups", "job", "plan", "spec", "options", "local"))]
    modules += ["core.recipes.megatron_core", "runtime.connect", "placement.crossings", "viz.grid", "sim.run"]
    for name in modules:
        text = inspect.getdoc(importlib.import_module(f"rankmesh.{name}"))
        drawings = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        examples = re.findall(r"^>>> .*$", text, re.MULTILINE)
        assert drawings or examples
        for part in (*drawings, *examples):
            assert part.rstrip() in shown, f"{name}: {part}"


@pytest.mark.long
def test_nothing_of_markdown_is_left(site):
    """No fence and no message of the parser is on a page of the reference."""
    for page in site.rglob("reference/*.html"):
        text = page.read_text(encoding="utf-8")
        assert "```" not in text, page.name
        assert 'class="system-message' not in text, page.name


@pytest.mark.long
def test_the_explorer_is_on_the_site(site):
    """The playground and the concepts embed the page that the wheel holds, which lies beside them."""
    assert (site / "explorer.html").read_bytes() == (ROOT / "src" / "rankmesh" / "viz" / "explorer.html").read_bytes()
    embedded = {page: (site / page).read_text().count('<iframe src="explorer.html') for page in EMBEDDING}
    assert embedded == EMBEDDING


def _docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_markdown_becomes_restructured_text():
    """Drawings, names with their meaning, code and examples, each in Sphinx's words."""
    lines = ["A `word`, ``tp_`` and tp_.", "```", "a  b", "", "c", "```", "", "    x = y", "", "``a``   one"]
    lines += ["        more", "``b``   two", "", ">>> 1", "1"]
    assert "\n".join(_docstrings().to_rst(lines)).rstrip() == (
        "A ``word``, ``tp_`` and tp\\_.\n\n"
        ".. code-block:: text\n\n    a  b\n\n    c\n\n"
        ".. code-block:: text\n\n        x = y\n\n"
        "``a``\n    one\n    more\n``b``\n    two\n\n"
        ">>> 1\n1"
    )
