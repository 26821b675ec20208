"""The commands of the pages "hang" and "evidence", on files that are kept, and of the README, on a job that hangs."""

import shutil
import sys

import pytest
from tests.docs.pages import ROOT, blocks
from tests.docs.running import run, same
from tests.hangs.keep import KEPT


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


@pytest.mark.parametrize("name", ["recordings", "ras.txt", "train.log", "stacks.txt"])
def test_the_files_of_a_page(name, tmp_path):
    """The doctor's sentence on recordings that are kept, and on the report, log and stacks that a page shows above."""
    page = "hang" if name == "recordings" else "evidence"
    shown_blocks = list(blocks((ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8")))
    place = next(i for i, block in enumerate(shown_blocks) if f"doctor {name}" in block.text)
    if name == "recordings":
        shutil.copytree(KEPT / "loads_slowly", tmp_path / name)
    else:
        (tmp_path / name).write_text(shown_blocks[place - 1].text, encoding="utf-8")
    [(command, shown)] = shown_blocks[place].commands
    status, printed = run(command, tmp_path)
    assert status == 7
    assert same(shown, printed), printed
