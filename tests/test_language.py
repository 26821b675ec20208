"""The words of the messages: each begins with what is wrong."""

import ast
import re
from pathlib import Path

import pytest

import rankmesh

SOURCES = sorted(Path(rankmesh.__file__).parent.rglob("*.py"))


def _documents(tree):
    """The docstrings of a module: a text that stands alone is in no message."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _openings(source, opening):
    """The lines of the texts that begin with what ``opening`` matches, outside of docstrings."""
    tree = ast.parse(source)
    single = _documents(tree)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.lineno for node in texts if id(node) not in single and re.match(opening, node.value)]


# At the start of a message, or after the file, line or rank that it is of.
RECEIVED = r"(.*: )?received "


@pytest.mark.parametrize(
    "source",
    [
        'f"received {x!r}; give a plan"',
        '"received no world"',
        'f"{path}:{line}: received {x}"',
        '"rank 2: received no up"',
    ],
)
def test_an_opening_is_seen(source):
    """What the next test looks for is found in each form that a message has."""
    assert _openings(f"raise ValueError({source})", RECEIVED) == [1]
    assert _openings(f"def made():\n    {source.removeprefix('f')}\n", RECEIVED) == []


def test_no_message_begins_with_received():
    """A message begins with what is wrong, in the user's words, not with what was received."""
    found = {str(path): lines for path in SOURCES if (lines := _openings(path.read_text(encoding="utf-8"), RECEIVED))}
    assert len(SOURCES) > 100
    assert found == {}
