"""The list of public files that was made by hand, and the script that makes it."""

from collections import Counter

from tests.readers.public import LIST


def rows():
    """Each file of the list: its repository, path, sizes, and what running and reading made of it."""
    repository = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            repository, commit = line[2:].split()
            assert len(commit) == 40
        else:
            path, sizes, outcomes = line.rsplit(": ", 2)
            ran, read = outcomes.split()
            yield repository, path, dict(pair.split("=") for pair in sizes.split()), ran, read


def test_the_list_has_what_the_goal_asks():
    """Of the files that state a layout, 95 % are right with or without running, and none is wrong."""
    found = list(rows())
    assert len({repository for repository, *_ in found}) == 12
    best = Counter("right" if "right" in (ran, read) else "refused" for *_, ran, read in found)
    assert not any("wrong" in (ran, read) for *_, ran, read in found)
    assert best["right"] >= 0.95 * len(found)
