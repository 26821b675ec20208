"""The guide's loop: train two steps, sync, generate; the tokens are those of a model loaded from the checkpoint."""

import os
import subprocess
import sys

import pytest
from tests.docs.pages import ROOT, blocks
from tests.peers import fetch


@pytest.mark.nightly
def test_the_loop_of_the_guide(tmp_path):
    """docs/howto/sync.md: two versions reach the engine in the bytes that the page shows, and the tokens are equal."""
    page = (ROOT / "docs" / "howto" / "sync.md").read_text(encoding="utf-8")
    program, shown = (block.text for block in list(blocks(page))[:2])
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(fetch.engines())}
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == shown
