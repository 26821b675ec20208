"""A slow job on one screen of text."""

import re
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.docs.pages import ROOT, blocks
from tests.docs.running import run, same
from tests.slow.making import LATE, report

from rankmesh.debug.speed import lines


def test_a_slow_job():
    """Trend, findings, the slowest rank beside others of its place, and the device that others wait for."""
    shown = "\n".join(lines(report(64, LATE), 3.0)).splitlines()
    assert shown[0] == "64 ranks on 8 hosts, 3 s ago"
    assert shown[1] == f"step  610 ms  {'▁' * 21}{'▆' * 39}"
    assert shown[2] == "lost  10 % of the ranks' time; 98 steps in 60 s"
    assert shown[3] == f"slow  {LATE.sentence}"
    (row,) = (line for line in shown if line.startswith("    13 "))
    assert row.split()[1:] == ["node1", "84", "ms", "480", "ms", "396", "ms", "2", "ms"]
    maps = [line for line in shown if line.startswith("device ")]
    assert maps == [f"device {row}  {'···▓▓▓' if row == 5 else '······'}{'·' * 18}" for row in range(8)]


def test_one_screen_shows_any_job():
    """16,384 ranks with many findings; a job that has ended is told from one that runs."""
    for size, devices in ((1, 1), (16, 16), (16384, 8), (4096, 64)):
        late = [replace(LATE, ranks=(size - 1,))] * 9
        shown = "\n".join(lines(report(size, *late, devices=devices), 1e4, 80)).splitlines()
        assert len(shown) <= 34
        assert shown[0].endswith("; the job has ended, or it hangs: run rankmesh doctor")
        assert "slow  and 6 more: rankmesh doctor lists them" in shown
        assert max(len(line) for line in shown if not line.startswith("slow")) <= max(80, len(shown[0]))
        assert sum(line.count("▓") for line in shown if line.startswith("device ")) in (1, 3)


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 0.5)), min_size=1, max_size=150))
def test_a_cell_has_the_slowest_of_its_ranks(ranks):
    """Each rank, on any host, by a second computation."""
    names = tuple(map(str, range(41)))
    hosts, caused = zip(*ranks, strict=True)
    size = len(hosts)
    each = (0.0,) * size
    made = replace(report(size), host_names=names, hosts=hosts, caused=caused, waits=each, computes=each, step=1.0)
    maps = [line[10:] for line in "\n".join(lines(made, 0.0, 30)).splitlines() if line.startswith("device ")]
    most, cells = max(map(hosts.count, hosts)), {}
    for rank, host in enumerate(hosts):
        row = hosts[:rank].count(host) * len(maps) // most
        cells.setdefault((row, host * 20 // 41), []).append(caused[rank])
    assert len(maps) == min(most, 16)
    shades = {at: "·░▒▓█"[sum(max(found) >= share for share in (0.02, 0.05, 0.1, 0.3))] for at, found in cells.items()}
    assert maps == ["".join(shades.get((row, column), "·") for column in range(20)) for row in range(len(maps))]


def test_the_page(tmp_path):
    """512 ranks: the page slow.md shows what `rankmesh top` prints, but for the time of day."""
    late = replace(LATE, evidence="it computes for longer than the 255 other ranks in its place")
    replace(report(512, late), time=time.time()).write(tmp_path / "job")
    text = (ROOT / "docs" / "howto" / "slow.md").read_text(encoding="utf-8")
    [(command, shown)] = next(block for block in blocks(text) if block.language == "console").commands
    status, printed = run(command, tmp_path)
    assert status == 0
    assert same(*(re.sub(r"\d\d:\d\d:\d\d", "*", text) for text in (shown, printed))), printed
