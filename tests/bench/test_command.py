"""The command on eight real ranks, bounded from outside; its structure, never its times."""

import json
import subprocess
import sys

import pytest

from bench.__main__ import run

pytest.importorskip("torch.distributed")

KEYS = {"built", "used", "descriptors", "threads", "added_descriptors", "added_threads", "groups", "store_operations"}
LIMIT = 90


def bench(*arguments):
    """Run the command in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The figures of one quick run, its document, and what it said."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench("--quick", "--json", "-", "--markdown", folder / "benchmarks.md")
    return json.loads(done.stdout), (folder / "benchmarks.md").read_text(encoding="utf-8"), done.stderr


@pytest.mark.long
def test_every_section_is_measured(quick):
    """A quick run has live, dry, planning and getters."""
    figures, _, _ = quick
    sections = {item["section"] for item in figures["comparisons"]}
    assert sections == {"live", "dry", "planning", "getters"}


@pytest.mark.long
def test_ours_always_has_figures(quick):
    """Our side of every comparison is there, whoever the peer is."""
    for item in quick[0]["comparisons"]:
        assert item["both"]["ours"], item
        assert "ours" not in item["failures"]


@pytest.mark.long
def test_live_worlds_count_what_is_open(quick):
    """A live world has its times, descriptors, threads, groups and store operations."""
    live = [item for item in quick[0]["comparisons"] if item["section"] == "live"]
    assert [item["peer"] for item in live] == [
        "megatron-core",
        "megatron-core, default",
        "DeviceMesh",
        "HyperCommGrid",
    ]
    for item in live:
        assert set(item["both"]["ours"]) >= (KEYS if sys.platform == "linux" else {"built", "used"})


@pytest.mark.long
def test_we_make_no_fewer_groups_than_the_peer(quick):
    """Where a peer is there, we make at least as many groups as it does, so no time of ours is of less work."""
    for item in quick[0]["comparisons"]:
        ours, theirs = item["both"]["ours"], item["both"]["theirs"]
        if "groups" in ours and theirs:
            assert theirs["groups"]["median"] <= ours["groups"]["median"] <= theirs["groups"]["median"] + 1, item[
                "what"
            ]


@pytest.mark.long
def test_the_document_has_a_table_for_each_section(quick):
    """The document has the headings, and names machine and versions without a host or a path."""
    _, document, _ = quick
    for heading in ("# Benchmarks", "## Live groups", "## Planning", "## Getters"):
        assert heading in document.splitlines()
    assert "cores" in document
    assert "torch" in document


@pytest.mark.long
def test_progress_goes_to_stderr(quick):
    """Each comparison is told as it is done, away from the figures."""
    assert len([line for line in quick[2].splitlines() if line.startswith("live, 8 ranks")]) == 4


@pytest.mark.long
def test_figures_are_shown_again_without_measuring(quick, tmp_path, capsys):
    """--from reads the figures back; the document that it writes is the same."""
    figures, document, _ = quick
    (tmp_path / "results.json").write_text(json.dumps(figures), encoding="utf-8")
    assert run(["--from", str(tmp_path / "results.json"), "--markdown", str(tmp_path / "again.md")]) == 0
    assert (tmp_path / "again.md").read_text(encoding="utf-8") == document
    assert "Live groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "meaning", "code"),
    [
        (("--ranks", "12"), "multiples of 8", 2),
        (("--ranks", "eight"), "multiples of 8", 2),
        (("--worlds", "1032"), "multiples of 1024", 2),
        (("--only", "live,dri"), "the sections are live, dry, planning, getters", 2),
        (("--from", "absent.json"), "no readable JSON", 3),
        (("--from", __file__), "no readable JSON", 3),
    ],
)
def test_bad_words_are_refused(arguments, meaning, code, capsys):
    """Sizes that the layout does not divide, unknown sections and unreadable files are one line each."""
    assert run(arguments) == code
    result = capsys.readouterr().err
    assert meaning in result
    assert result.count("\n") == 1


def test_figures_of_another_shape_are_refused(tmp_path, capsys):
    """JSON that is no result of ours is named as such."""
    (tmp_path / "other.json").write_text('{"comparisons": [{}]}', encoding="utf-8")
    assert run(["--from", str(tmp_path / "other.json")]) == 3
    assert "lack a field" in capsys.readouterr().err
