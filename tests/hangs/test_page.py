"""The commands of the pages "hang" and "evidence", on files that are kept, and of the README, on a job that hangs."""

import shutil
import sys

import pytest
from tests.docs.pages import ROOT, blocks
from tests.docs.running import run, same
from tests.hangs.keep import KEPT


def test_the_first_command_of_the_page(tmp_path):
    """4 ranks, recorded once: the page hang.md begins with what the doctor says of them."""
    shutil.copytree(KEPT / "loads_slowly", tmp_path / "recordings")
    text = (ROOT / "docs" / "howto" / "hang.md").read_text(encoding="utf-8")
    first = next(block for block in blocks(text) if block.language == "console")
    [(command, shown)] = first.commands
    status, printed = run(command, tmp_path)
    assert status == 7
    assert same(shown, printed), printed


@pytest.mark.long
def test_the_first_screen_of_the_readme(tmp_path):
    """4 ranks: its program hangs, and the watch logs what is shown."""
    program, console = list(blocks((ROOT / "README.md").read_text(encoding="utf-8")))[:2]
    (tmp_path / program.file).write_text(program.text, encoding="utf-8")
    [(command, shown)] = console.commands
    ran = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    status, printed = run(f"{ran} 2>&1", tmp_path)
    assert status != 0
    assert shown in printed


@pytest.mark.parametrize("name", ["ras.txt", "train.log", "stacks.txt"])
def test_the_files_of_the_page(name, tmp_path):
    """The report, the log and the stacks that the page shows give what it shows below."""
    shown_blocks = list(blocks((ROOT / "docs" / "howto" / "evidence.md").read_text(encoding="utf-8")))
    place = next(i for i, block in enumerate(shown_blocks) if f"doctor {name}" in block.text)
    (tmp_path / name).write_text(shown_blocks[place - 1].text, encoding="utf-8")
    [(command, shown)] = shown_blocks[place].commands
    status, printed = run(command, tmp_path)
    assert status == 7
    assert same(shown, printed), printed
