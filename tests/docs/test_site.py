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
    *(f"rankmesh.dialects.{name}" for name in ("megatron", "nanotron", "ezpz")),
    *(f"rankmesh.dialects.{name}" for name in ("fairscale", "process_groups", "deepspeed", "device_mesh")),
    "rankmesh.dialects.accelerate",
)

EMBEDDING = {"playground.html": 1, "concepts.html": 2}
DRAWN = ("errors", *(f"core.{name}" for name in ("mesh", "groups", "job", "plan", "spec", "options", "local")))
DRAWN += ("core.recipes.megatron_core", "runtime.connect", "placement.crossings", "viz.grid", "sim.run")


def _text(html):
    return unescape(re.sub(r"<[^>]+>", "", html))


@pytest.mark.long
def test_the_site_has_everything(tmp_path):
    """The site, built as `make docs` builds it: every public name has an entry, every drawing and example its block.

    No fence and no message of the parser is on a page of the reference. The pages that embed the explorer find the one
    that the wheel holds beside them.
    """
    site, strictly = tmp_path / "html", "--fail-on-warning --nitpicky --keep-going --quiet docs"
    assert f"{strictly} build/docs" in (ROOT / "Makefile").read_text()
    command = [sys.executable, "-m", "sphinx", "-d", str(tmp_path / "trees"), *strictly.split(), str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert _missing(site) == ["rankmesh.recipes"]  # a module, whose page has each recipe
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("reference/*.html")}
    blocks = [block for page in pages.values() for block in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    shown = "\n".join(map(_text, blocks))
    for name in DRAWN:
        text = inspect.getdoc(importlib.import_module(f"rankmesh.{name}"))
        drawings = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for part in (*drawings, *re.findall(r"^>>> .*$", text, re.MULTILINE)):
            assert part.rstrip() in shown, f"{name}: {part}"
    wrong = [name for name, text in pages.items() if "```" in text or 'class="system-message' in text]
    assert wrong == []
    assert (site / "explorer.html").read_bytes() == (ROOT / "src" / "rankmesh" / "viz" / "explorer.html").read_bytes()
    embedded = {page: (site / page).read_text().count('<iframe src="explorer.html') for page in EMBEDDING}
    assert embedded == EMBEDDING


def _missing(site):
    """What the packages offer, and has no entry in the site's inventory."""
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, target: target)
    known = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    documented = {id(pkgutil.resolve_name(name)) for name in known}
    offered = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]
    return [
        f"{package}.{name}"
        for package, name in offered
        if f"{package}.{name}" not in known
        and id(getattr(importlib.import_module(package), name)) not in documented
        and not name.isupper()
    ]


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
