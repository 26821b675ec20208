"""What the watch last found of a slow job: the file, its sentences, and files that are no such thing."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.slow.making import LATE, report

from rankmesh.debug.slow import CAUSES, FILE, Finding, SlowReport
from rankmesh.errors import RecordingError

TIMES = st.floats(0, 1e6).map(lambda value: round(value, 6))


@st.composite
def reports(draw):
    """Reports of up to six ranks on up to three hosts."""
    size, names = draw(st.integers(1, 6)), draw(st.lists(st.text(max_size=5), min_size=1, max_size=3))
    ranks = st.lists(st.integers(0, size - 1), max_size=size).map(tuple)
    text = st.none() | st.text(max_size=5)
    finding = st.builds(
        Finding,
        st.sampled_from(CAUSES), ranks, text, text, text, st.lists(st.sampled_from(names), max_size=2).map(tuple),
        TIMES, TIMES, TIMES, st.integers(1, 99), TIMES, st.text(max_size=5),
    )  # fmt: skip

    def each(values, count=size):
        return st.lists(values, min_size=count, max_size=count).map(tuple)

    return SlowReport(
        *(draw(TIMES) for _ in range(2)), draw(st.integers(0, 99)), draw(TIMES), draw(TIMES),
        draw(st.lists(finding, max_size=2).map(tuple)), tuple(names),
        draw(each(st.integers(0, len(names) - 1))), draw(each(st.integers(0, 9))),
        *(draw(each(TIMES)) for _ in range(3)), draw(st.lists(TIMES, max_size=4).map(tuple)),
    )  # fmt: skip


@given(reports())
def test_a_report_is_read_as_it_was_written(tmp_path_factory, made):
    """Every field, through the file."""
    folder = tmp_path_factory.mktemp("job") / "recordings"
    assert SlowReport.read(folder) is None
    made.write(folder)
    assert SlowReport.read(folder) == made
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert all(finding.sentence for finding in made.findings)


def test_a_large_job_has_a_small_file(tmp_path):
    """16,384 ranks take less than 1 MiB, and are read within the reader's limits."""
    report(16384).write(tmp_path)
    assert (tmp_path / FILE).stat().st_size < 2**20
    assert len(SlowReport.read(tmp_path).caused) == 16384


DAMAGE = {
    "other text": lambda data: "no report",
    "a list": lambda data: [],
    "another format": lambda data: {**data, "format": 2},
    "no list of hosts": lambda data: {**data, "hosts": "0"},
    "a list of another length": lambda data: {**data, "waits": [0.5]},
    "a missing field": lambda data: {name: value for name, value in data.items() if name != "trend"},
    "a host that is not named": lambda data: {**data, "hosts": [5] * 16},
    "a rank that the job does not have": lambda data: {**data, "findings": [{**data["findings"][0], "ranks": [16]}]},
    "another cause": lambda data: {**data, "findings": [{**data["findings"][0], "cause": "bad luck"}]},
    "a truth value for a number": lambda data: {**data, "places": [True] * 16},
    "more values than any job": lambda data: {**data, "places": [0] * (1 << 21)},
    "deep lists": lambda data: [[[[[[[[[[]]]]]]]]]],
    # What is not JSON, or no text at all.
    "nothing": lambda data: b"",
    "a torn file": lambda data: b"{",
    "a byte of zero": lambda data: b"\0",
    "a number of no JSON": lambda data: b"NaN",
    "another encoding": lambda data: b"\xe9",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_a_report(tmp_path, damage):
    """An error of ours names the file."""
    found = DAMAGE[damage](report(16, LATE).to_dict())
    (tmp_path / FILE).write_bytes(found if isinstance(found, bytes) else json.dumps(found).encode())
    with pytest.raises(RecordingError, match=FILE):
        SlowReport.read(tmp_path)


COST = "84 ms of each step of 610 ms (14 %), since "


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, f"rank 13 (host node1) makes dp wait: {COST}*; it is late"),
        ({"kind": None, "hosts": (), "ranks": (3, 4)}, f"ranks 3, 4 make the others wait: {COST}*; it is late"),
        ({"cause": "host", "ranks": (8, 9)}, f"host node1 (ranks 8, 9) makes dp wait: {COST}*; it is late"),
        ({"cause": "link", "ranks": (3, 11), "evidence": "why"}, f"dp@tp1 of ranks 3, 11: why; {COST}*"),
        ({"cause": "everyone", "evidence": "why"}, f"the whole job is slower than before: {COST}*; why"),
        (
            {"cause": "pause", "hosts": (), "every": 40, "seconds": 0.0475, "evidence": "in next_batch at train.py:88"},
            "rank 13 is late once in about 40 steps, by 1.9 s, in next_batch at train.py:88",
        ),
    ],
)
def test_the_sentence_of_a_finding(changes, sentence):
    """Who, how long, since when, and why."""
    finding = Finding(**{**vars(LATE), **changes})
    assert re.sub(r"\d\d:\d\d:\d\d", "*", finding.sentence) == sentence
