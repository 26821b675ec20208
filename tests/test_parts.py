"""The parts of the package import what pyproject.toml lets them, and the page shows them."""

import re

import pytest
from tests import parts

KNOWN = parts.parts()


def test_each_part_imports_only_what_it_may():
    """Of all imports, those in functions and for types too, none leads from a part to one that it may not import."""
    assert [pair for pair in parts.imports() if parts.is_wrong(*pair, KNOWN)] == []


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("rankmesh.core.plan", "rankmesh.placement.cost", True),
        ("rankmesh.transfer.live.run", "rankmesh.transfer.layouts.known", True),
        ("rankmesh.transfer.layouts.known", "rankmesh.transfer", False),
        ("rankmesh.placement.cost", "rankmesh", False),
    ],
)
def test_a_wrong_import_is_noticed(importer, imported, wrong):
    """The longest name decides which part a module is in; the package itself is in none."""
    assert parts.is_wrong(importer, imported, KNOWN) is wrong


def test_the_page_shows_the_parts():
    """The table, and the arrows but for their numbers; `python -m tests.parts` writes both."""
    assert parts.table(KNOWN) in parts.PAGE.read_text(encoding="utf-8")
    shown, drawn = parts.PICTURE.read_text(encoding="utf-8"), parts.picture(parts.arrows(KNOWN))
    assert re.sub(">[0-9]+<", "", shown) == re.sub(">[0-9]+<", "", drawn)


def test_a_file_of_tests_belongs_to_the_parts_that_it_names():
    """By the package's public names, by modules, and by the files of tests that it imports."""
    assert parts.needs(parts.REPOSITORY / "tests/groups/test_device_mesh.py") == {"kernel"}
    assert parts.needs(parts.REPOSITORY / "tests/survival/test_simulated.py") >= {"kernel", "survive", "sim"}
