"""Exchange: the entries of all ranks reach one of them, merged, whoever is late or gone; and what that costs."""

import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.grouped import grouped
from rankmesh.core.ranges import ranks_in
from rankmesh.debug.watch import exchange
from rankmesh.debug.watch.exchange import Exchange, Form
from rankmesh.guard.discover import merged, of_rank

FORM = Form(merged, json.dumps, json.loads)


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


def exchanged(size, given, store=None, root=None):
    """What is concluded when these ranks give these entries, in their order, and look until nothing is left."""
    store, found, now = store or Store(), [], [0.0]
    ranks = {rank: Exchange(store, rank, size, FORM, root=root) for rank in given}
    with patch.object(exchange, "time", SimpleNamespace(monotonic=lambda: now[0])):
        for rank, entry in given.items():
            store.rank = rank
            assert ranks[rank].give("a", of_rank(rank, entry))
        while leading := [rank for rank, one in ranks.items() if one.leads]:
            for rank in leading:
                store.rank = rank
                concluded = ranks[rank].look()
                assert root in (None, rank) or not concluded
                found += concluded
            now[0] += 3.0
    assert not store.texts
    if len(given) == size:
        assert not store.numbers
    for one in ranks.values():
        one.close()
    assert not store.numbers
    return found


@given(size=st.integers(1, 300), data=st.data())
def test_all_entries_are_merged(size, data):
    """By a root, or by whoever is first, in one part or several; a rank that does not give in time is left out."""
    order = data.draw(st.permutations(range(size)))
    root = data.draw(st.sampled_from([None, order[0]]))
    absent = data.draw(st.sets(st.integers(0, size - 1), max_size=3).filter(lambda ranks: root not in ranks))
    values = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    given = {rank: {"w": values[rank]} for rank in order if rank not in absent}
    found = exchanged(size, given, root=root)
    if not given:
        assert found == []
        return
    ((_, entry),) = found
    by_value = {value: ranks_in(ranges) for value, ranges in entry.get("w", {}).items()}
    assert by_value == grouped((values[rank], rank) for rank in sorted(given))


@pytest.mark.parametrize("size", [3, 70])
@pytest.mark.parametrize("root", [None, 0])
def test_a_late_rank(size, root, monkeypatch):
    """It is told so, makes no second result, and leaves nothing; nor does a rank that is dead."""
    store, now = Store(), [0.0]
    monkeypatch.setattr(exchange.time, "monotonic", lambda: now[0])
    ranks = [Exchange(store, rank, size, FORM, root=root) for rank in range(size)]
    for name in ("a", "b"):
        for rank in range(size - 2):
            assert ranks[rank].give(name, of_rank(rank, {"w": "7"}))
        assert looked(ranks) == []
        now[0] += 10.0
        found = looked(ranks)
        now[0] += 10.0
        found += looked(ranks)
        assert [(name, [[0, size - 2, 1]])] == [(name, entry["w"]["7"]) for name, entry in found]
        assert not ranks[size - 2].give(name, of_rank(size - 2, {"w": "7"}))
        now[0] += 60.0
        assert looked(ranks) == []
        assert not store.texts
    assert store.numbers
    now[0] += 600.0
    for rank, one in enumerate(ranks):
        one.give("c", of_rank(rank, {"w": "7"}))
    assert not any(counter.startswith(("a", "b")) for counter in store.numbers)


def looked(ranks):
    """What is concluded if each rank looks once, parts before the root."""
    return [one for rank in reversed(ranks) if rank.leads for one in rank.look()]


def test_what_16384_ranks_cost():
    """A rank makes two calls of 100 bytes; a part's first rank reads 128 others, and one of them the 128 parts."""
    store = Store()
    given = {rank: {f"{rank % 128}": "0123456789abcdef", "all": "0123456789abcdef"} for rank in range(2**14)}
    ((_, entries),) = exchanged(2**14, given, store=store, root=0)
    assert len(entries) == 129
    assert entries["all"]["0123456789abcdef"] == [[0, 2**14, 1]]
    calls = sorted(store.calls.values())
    assert calls[: 2**14 - 128] == [2] * (2**14 - 128)
    assert max(calls) <= 20
    assert max(store.bytes.values()) < 2**21
    assert sum(store.bytes.values()) < 2**23
