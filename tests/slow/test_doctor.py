"""The doctor on a folder in which the watch of a slow job has left what it found."""

import shutil
from dataclasses import replace
from pathlib import Path

from tests.slow.making import LATE, report

from rankmesh.debug.doctor import doctor
from rankmesh.debug.doctor.diagnosis import report as text_of
from rankmesh.debug.slow import FILE

RECORDINGS = Path(__file__).parents[1] / "hangs" / "recordings" / "loads_slowly"


def test_a_slow_job(tmp_path):
    """Without a recording: the costliest finding first, then the others; no rank hangs."""
    report(16, LATE, replace(LATE, ranks=(7,))).write(tmp_path / "4711")
    found = doctor(tmp_path)
    assert (found.verdict, found.waiting, found.world_size) == (f"slow: {LATE.sentence}", (), 16)
    first, second = text_of(found).splitlines()
    assert ("rank 13" in first, second.startswith("slow       rank 7 ")) == (True, True)
    assert [finding["sentence"] for finding in found.to_dict()["slow"]][:1] == [LATE.sentence]


def test_a_job_that_is_not_slow(tmp_path):
    """Its verdict is that; the newest report counts."""
    report(16, LATE).write(tmp_path / "one")
    replace(report(16), time=1).write(tmp_path / "two")
    assert doctor(tmp_path).verdict == "no rank waits, and nothing is slow"
    assert doctor(tmp_path).to_dict()["slow"] == []


def test_a_job_that_hangs(tmp_path):
    """The hang is the verdict; what was slow is told beside it. A report that cannot be read is a note."""
    shutil.copytree(RECORDINGS, tmp_path, dirs_exist_ok=True)
    report(4, replace(LATE, ranks=(3,))).write(tmp_path)
    found = doctor(tmp_path)
    assert found.verdict == doctor(RECORDINGS).verdict
    assert [one.ranks for one in found.slow.findings] == [(3,)]
    assert found.notes == doctor(RECORDINGS).notes
    (tmp_path / FILE).write_text("{}")
    assert any(FILE in note for note in doctor(tmp_path).notes)
