"""The page "hang": its first command, on the recordings of a real hang, which are kept."""

import shutil

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
