"""The command on eight real ranks, bounded from outside; its figures, never its times."""

import json
import subprocess
import sys

import pytest

from bench.__main__ import main

pytest.importorskip("torch.distributed")

KEYS = {"built", "used", "descriptors", "threads", "groups", "store_operations"}


@pytest.mark.nightly
def test_every_section_is_measured(tmp_path):
    """8 gloo ranks: each section has our figures; a live world counts what is open, and no fewer groups than a peer's.

    A time of ours is of no less work. The page is written from the same figures.
    """
    figures, document = tmp_path / "results.json", tmp_path / "benchmarks.md"
    command = [sys.executable, "-m", "bench", "--quick", "--json", str(figures), "--markdown", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    items = json.loads(figures.read_text())["comparisons"]
    assert {item["section"] for item in items} == {"live", "dry", "planning", "getters"}
    for item in items:
        assert "ours" not in item["failures"], item
        ours, theirs = item["both"]["ours"], item["both"]["theirs"]
        assert ours
        assert item["section"] != "live" or set(ours) >= KEYS
        if "groups" in ours and theirs:
            assert theirs["groups"]["median"] <= ours["groups"]["median"] <= theirs["groups"]["median"] + 1, item
    live = [item["peer"] for item in items if item["section"] == "live"]
    assert live == ["megatron-core", "DeviceMesh"]
    assert len([line for line in done.stderr.splitlines() if line.startswith("live, 8 ranks")]) == len(live)
    again = tmp_path / "again.md"
    assert main(["--from", str(figures), "--markdown", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == document.read_text(encoding="utf-8")


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    """Nothing is measured while the load is above the number of cores, unless that is asked for."""
    monkeypatch.setattr("os.getloadavg", lambda: (2.25, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("bench.__main__._comparisons", lambda given: iter(()))
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "error: the load is 2.25 on 2 cores, so times would be those of other work, too; "
        "wait until it is below 2, or add --loaded\n"
    )
    assert main(["--only", "live", "--loaded"]) == 0
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 9.0, 9.0))
    assert main(["--only", "live"]) == 0


@pytest.mark.parametrize("arguments", ["--ranks 12", "--ranks eight", "--worlds 1032", "--only dri"])
def test_bad_words_are_refused(arguments):
    """Sizes that the layout does not divide, and unknown sections."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
