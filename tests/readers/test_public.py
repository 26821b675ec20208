"""The list of public files that was made by hand, and the script that makes it."""

from collections import Counter

from tests.readers.public import LIST, possible, same, sizes_of_words


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


def test_what_is_expected_is_taken_from_words():
    """The sizes of a command by its own names, whatever rankmesh makes of them; impossible ones are known as such."""
    words = ["torchrun", "--nproc_per_node", "8", "--nnodes=2", "a.py", "--tensor-model-parallel-size", "4"]
    assert sizes_of_words(words, {}) == {"tp": "4", "world": "16"}
    assert sizes_of_words(["torchrun", "a.py"], {}) is None
    assert possible({"tp": "4", "world": "16"})
    assert not possible({"tp": "3", "world": "16"})
    assert not possible({"tp": ""})
    assert same({"tp": "4"}, {"tp": 4, "pp": 1})
    assert not same({"tp": "4"}, {"pp": 2})
    verl = ["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    assert sizes_of_words([*verl, "trainer.nnodes=1", "trainer.n_gpus_per_node=8"], {}) == {"tp": "2", "world": "8"}
