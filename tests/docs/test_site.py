"""Docstrings in Markdown become what Sphinx reads; `make docs` fails on any warning."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
