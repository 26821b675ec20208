"""Exchange: the entries of all ranks reach one of them, merged, whoever is late or gone; and what that costs."""

import json
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.ranges import ranks_in
from rankmesh.debug.watch.exchange import Exchange, merged
from rankmesh.rendezvous import StoreChannel


class Store:
    """The channel of all ranks, which counts its calls and their bytes, by rank; `post` and `posted` as in a store."""

    def __init__(self):
        self.texts, self.numbers, self.rank = {}, Counter(), None
        self.calls, self.bytes = Counter(), Counter()

    def _count(self, size):
        self.calls[self.rank] += 1
        self.bytes[self.rank] += size

    def post(self, key, rank, text):
        """Append a line."""
        self._count(len(text))
        self.texts.setdefault(key, {}).setdefault(rank, []).append(text)

    def posted(self, key, _writers):
        """The lines under a key."""
        found = self.texts.get(key, {})
        self._count(sum(len(text) for texts in found.values() for text in texts))
        return found

    def tick(self, key, amount):
        """Add to a number."""
        self._count(8)
        self.numbers[key] += amount
        return self.numbers[key]

    def delete(self, keys):
        """Delete keys."""
        for key in keys:
            self._count(0)
            self.texts.pop(key, None)
            self.numbers.pop(key, None)


def exchanged(size, given, patience=10.0, store=None):
    """What is concluded when these ranks give these entries, in their order, and look until nothing is left."""
    store, found = store or Store(), []
    ranks = {
        rank: Exchange(store, rank, size, lambda name, entries: found.append((name, entries)), patience)
        for rank in given
    }
    for rank, entry in given.items():
        store.rank = rank
        ranks[rank].give("a", entry)
    while leading := [rank for rank, one in ranks.items() if one.leads]:
        for rank in leading:
            store.rank = rank
            ranks[rank].look()
    assert not store.texts
    assert not store.numbers
    return found


@given(st.sets(st.integers(0, 300)))
def test_ranges(ranks):
    """Ranges of ranks have those ranks, in order."""
    (found,) = merged([{"i": {"v": [[rank, rank + 1, 1] for rank in ranks]}}])["i"].values()
    assert ranks_in(found) == sorted(ranks)


@given(size=st.integers(1, 300), data=st.data())
def test_all_entries_are_merged(size, data):
    """By whoever is first, in one part or several; a rank that does not give is left out."""
    order = data.draw(st.permutations(range(size)))
    absent = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
    values = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    given = {rank: {"w": values[rank]} for rank in order if rank not in absent}
    found = exchanged(size, given, 0.0 if absent else 10.0)
    if not absent:
        assert [name for name, _ in found] == ["a"]
    together = merged(entries for _, entries in found)
    by_value = {value: ranks_in(ranges) for value, ranges in together.get("w", {}).items()}
    assert by_value == {
        value: [rank for rank in range(size) if rank in given and values[rank] == value]
        for value in {values[rank] for rank in given}
    }


def test_what_16384_ranks_cost():
    """A rank makes two calls of 100 bytes; a part's first rank reads 128 others, and one of them the 128 parts."""
    store = Store()
    given = {rank: {f"{rank % 128}": "0123456789abcdef", "all": "0123456789abcdef"} for rank in range(2**14)}
    ((_, entries),) = exchanged(2**14, given, store=store)
    assert len(entries) == 129
    assert entries["all"]["0123456789abcdef"] == [[0, 2**14, 1]]
    calls = sorted(store.calls.values())
    assert calls[: 2**14 - 128] == [2] * (2**14 - 128)
    assert max(calls) <= 14
    assert max(store.bytes.values()) < 2**21
    assert sum(store.bytes.values()) < 2**23


@pytest.mark.parametrize("size", [1, 3, 70])
def test_a_store_of_torch(size):
    """The same over a store."""
    found = exchanged_over(StoreChannel(dist.HashStore(), "here"), size)
    assert json.loads(json.dumps(found)) == [["a", {"w": {"7": [[0, size, 1]]}}]]


def exchanged_over(channel, size):
    """What is concluded over a channel."""
    found = []
    ranks = [Exchange(channel, rank, size, lambda *each: found.append(each)) for rank in range(size)]
    for one in ranks:
        one.give("a", {"w": "7"})
    while any(one.leads for one in ranks):
        for one in ranks:
            one.look()
    return found
