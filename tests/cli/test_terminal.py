"""What reaches a terminal: no control character of a file's name or text, whichever way it is printed."""

import json

import pytest

from rankmesh.cli import console

EVIL = "w\x1b]0;title\x07\x9b2J\r"


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_a_tensors_name_does_not_reach_the_terminal_as_it_is(rankmesh, tmp_path, how):
    """A table and JSON, which is still JSON; the error about the file, whose own name has a control character, too."""
    tensor = {"shape": [8, 8], "dtype": "bfloat16", "source": {"cut": ["tp", None]}, "target": {"cut": [None, "tp"]}}
    path = tmp_path / "tensors\x1b[31m.json"
    for name, dtype in ((EVIL, "bfloat16"), (EVIL, "nothing")):
        path.write_text(json.dumps({name: tensor | {"dtype": dtype}}))
        ran = rankmesh("transfer", "tp=2", "tp=4", "--tensors", path, *how)
        assert not console._CONTROL.search(ran.out + ran.err)
        assert (ran.code == 0) == (dtype == "bfloat16")


@pytest.mark.parametrize("way", [console.write, console.note, console.error, console.write_filled])
def test_every_way_of_printing_writes_control_characters_out(capsys, way):
    """Text, notes and errors; ends of lines stay."""
    way(EVIL)
    printed = "".join(capsys.readouterr())
    assert not console._CONTROL.search(printed)
    assert printed.endswith("\n")
    assert "\\u001b]0;title" in printed


def test_what_rich_prints_has_the_colours_of_the_program_alone(capsys):
    """A table, a styled text and a plain one."""
    from rich.table import Table
    from rich.text import Text

    table = Table("name")
    table.add_row(EVIL)
    out = console.out()
    for one in (table, Text(EVIL, "bold"), EVIL):
        out.print(one)
    assert not console._CONTROL.search(capsys.readouterr().out)
