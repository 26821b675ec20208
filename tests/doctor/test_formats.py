"""One hang as recordings, logs, reports and stacks: each format gives one diagnosis, and names nobody who waits."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.making import WORLD, call, document, write
from tests.doctor.test_evidence import LOADS, WAITS, dumps
from tests.doctor.test_logs import asked, lines_of, timed_out
from tests.doctor.test_ras import as_json, as_text

import rankmesh as rm
from rankmesh.debug.doctor import doctor
from rankmesh.errors import RecordingError


def recorded(folder, states):
    """A recording of each rank."""
    entries = {"waits": [call(WORLD, 6), call(WORLD, 7, done=False)], "behind": [call(WORLD, 6)]}
    there = {rank: entries[state] for rank, state in enumerate(states) if state in entries}
    write(folder, {rank: document(each, {WORLD: range(len(states))}, rank=rank) for rank, each in there.items()})


def logged(folder, states):
    """A log with the lines of all ranks."""
    lines = {"waits": lambda rank: timed_out(rank, 7), "behind": lambda rank: asked(rank, 6, 6)}
    text = lines_of(*(lines[state](rank) for rank, state in enumerate(states) if state in lines))
    (folder / "train.log").write_text("\n".join(text), encoding="utf-8")


def reported(form):
    """A report of ncclras."""

    def render(folder, states):
        counts = {rank: 7 - (state == "behind") for rank, state in enumerate(states) if state != "missing"}
        missing = [rank for rank, state in enumerate(states) if state == "missing"]
        report = form([(list(range(len(states))), {"AllReduce": counts}, missing)], len(states))
        (folder / "ras.txt").write_text(report, encoding="utf-8")

    return render


def dumped(folder, states):
    """A stack of each rank."""
    dumps(folder, *({"waits": WAITS, "behind": LOADS, "missing": ""}[state] for state in states))


FORMATS = {
    "recordings": recorded,
    "log": logged,
    "json": reported(lambda communicators, _size: as_json(communicators)),
    "text": reported(as_text),
    "stacks": dumped,
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["waits", "waits", "behind", "missing"]), min_size=3, max_size=8))
def test_one_hang_in_every_format(tmp_path_factory, name, states):
    """The only rank that does not wait is named in each; of several by its lines only one that did not answer NCCL."""
    folder, others = tmp_path_factory.mktemp(name), [rank for rank, state in enumerate(states) if state != "waits"]
    FORMATS[name](folder, states)
    with suppress(RecordingError):
        found = doctor(folder, rm.recipes.axes(rm.Mesh(dp=len(states))))
        named = {rank: cause.cause for cause in found.causes for rank in cause.ranks}
        expected = {rank: "late" if states[rank] == "behind" else "dead" for rank in others}
        gone = {rank: cause for rank, cause in expected.items() if cause == "dead"}
        if others == [*range(len(states))]:
            assert not named.keys() - gone.keys()
        elif name == "recordings":
            assert named == (expected if others and 2 * len(gone) <= len(states) else named)
        elif len(others) == 1:
            assert named == expected
            assert found.at_fault == tuple(others)
            assert found.causes[0].confidence in ("likely", "possible")
        elif others:
            assert named == (gone if name in ("json", "text") else {})
        if others:
            assert set(found.waiting) <= {rank for rank, state in enumerate(states) if state == "waits"}


def test_recordings_and_a_log_of_one_hang(tmp_path):
    """8 ranks: lines stand for two ranks that left no recording; the sentence is that of recordings alone."""
    states = ["behind" if rank == 3 else "waits" for rank in range(8)]
    recorded(tmp_path, states)
    whole = doctor(tmp_path)
    logged(tmp_path, states)
    for rank in (3, 5):
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    mixed = doctor(tmp_path)
    for one, confidence in ((whole, ""), (mixed, "likely")):
        assert [(c.cause, c.ranks, c.call, c.confidence) for c in one.causes] == [("late", (3,), 7, confidence)]
        assert one.verdict.startswith("late: rank 3 behind by 1 call of world: ")
        assert "; ranks 0, 1, 2, 4, 5, 6, 7 wait in all_reduce, call 7 of world" in one.verdict
        assert (one.at_fault, one.world_size) == ((3,), 8)
