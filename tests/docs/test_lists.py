"""Lists on pages that must be complete: errors, exit statuses, commands, peers."""

import re

import pytest
from tests.docs.pages import ROOT

from rankmesh import errors, sim
from rankmesh.cli.app import PANELS
from rankmesh.cli.shell import ExitCode


def _page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_every_error_is_explained():
    """Each error has a heading on the page of errors, and its line in the tree names its built-in base."""
    headings = re.findall(r"^## (.*)$", _page("errors"), re.MULTILINE)
    named = {name for heading in headings for name in heading.split(", ")}
    public = {name: getattr(sim, name) for name in sim.__all__}
    failures = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    tree = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert {*tree, *failures} == named - {"The command line"}
    for name in {*tree, *failures} - {"RankmeshError"}:
        kind = getattr(errors, name, None) or getattr(sim, name)
        builtin = next(base for base in kind.__bases__ if base.__module__ == "builtins")
        assert f"{name}({builtin.__name__})" in _page("errors")


def test_every_exit_status_is_listed():
    """The page of the command line has each exit status with the words of the help."""
    for code in ExitCode:
        message = re.sub(r"^(diff|check|where|doctor):", r"`\1`:", code.meaning)
        assert f"| {code.value} | {message} |" in _page("command_line")


@pytest.mark.parametrize("command", PANELS)
def test_every_command_shows_its_help(command):
    """Each command has a heading with its help, which the test of the page compares, and a row in the first table."""
    assert f"](#{command}) |" in _page("command_line").partition("\n## ")[0]
    assert f"## {command}\n\n```console\n$ rankmesh {command} --help\n" in _page("command_line")


def test_the_house_is_that_of_the_import_contract():
    """The page of the inside lists the layers as the contract of the imports has them, from the bottom up."""
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    layers = re.findall(r'"\(?(\w+)\)?"', contract[1])
    listed = re.search(r"```text\n(errors .*?)```", _page("inside"), re.DOTALL)[1]
    assert [line.split()[0] for line in listed.splitlines()] == layers[::-1]


def test_every_decision_has_a_number_and_a_date():
    """Each entry begins with a number of its own, and the day of the decision."""
    entries = [text for text in _page("decisions").split("\n\n") if text.startswith("**")]
    found = [re.match(r"\*\*(\d+)\.\*\* \(\d{4}-\d\d-\d\d\) \*\*", entry) for entry in entries]
    assert [entry for entry, match in zip(entries, found, strict=True) if match is None] == []
    assert len({match[1] for match in found}) == len(found) > 200
