"""Blame: which collective made a value differ, and which change of the program would make it right.

```
record        the failing layout and the reference run again, with every collective and its lines
suspects      collectives whose results, put together, differ from the reference, in the order of the program
trials        the same run with one repair; one that makes what was seen right is tried under every layout
```

Only a repair that worked is reported: in its run the value is right under every layout where it was wrong, and so is,
unless the program has a second defect, everything that is seen after it. Where none works the first suspect is named.
Sends and receives have nothing on one process to be compared with: of these only a repair that worked says anything.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from rankmesh.sim.calls import Call, Site
from rankmesh.sim.comparison.aligned import DIFFERENT, ORDER, SAME, SCALED, UNKNOWN, match
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.repairs import Repair, reductions, regroupings, scalings
from rankmesh.sim.comparison.runner import Runner
from rankmesh.sim.comparison.session import SAME_SHAPE, Deviation, Key, Record, Reference, Session
from rankmesh.sim.comparison.stacks import Node, Stack, nodes_of
from rankmesh.sim.failures import RanksFailed

__all__ = ["Cause", "Failing", "find", "find_failure"]


@dataclass(frozen=True)
class Cause:
    """What made a value differ: a collective, or a missing one (``operation`` and ``group`` are None then).

    ``settles``: whether the repair makes everything that is seen right, under every layout but those in ``untried``,
    in which it could not be tried. ``others`` are lines whose calls it changes as well.
    """

    site: Site | None
    operation: str | None = None
    group: str | None = None
    repair: Repair | None = None
    settles: bool = False
    lines: tuple[Site, ...] = ()
    untried: tuple[str, ...] = ()
    others: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Failing:
    """What differs: the first deviation of the layout that is looked into, and all deviations of all layouts."""

    layout: Layout
    first: Deviation
    by_layout: dict[str, dict[Key, Deviation]]


@dataclass
class _Search:
    """The trials of one comparison."""

    layouts: Sequence[Layout]
    reference: Reference
    failing: Failing
    runner: Runner
    deadline: float
    fallback: Cause | None = None
    tried: set[Repair] = field(default_factory=set)

    def cause(self, phases: Iterable[Iterable[Repair]]) -> Cause | None:
        """Return what the first repair that settles everything shows, else the first that helps."""
        for repair in chain.from_iterable(phases):
            found = self._shown(repair)
            if found is not None and not found.settles:
                self.fallback = self.fallback or found
                # The backward pass of these lines may be wrong in the same way.
                found = self._shown(_widened(repair))
            if found is not None and found.settles:
                return found
        return self.fallback

    def _shown(self, repair: Repair) -> Cause | None:
        """Return the cause that a repair shows; None where it does not help, or was tried before."""
        if repair in self.tried or time.monotonic() > self.deadline:
            return None
        self.tried.add(repair)
        tried = self._left(repair)
        if tried is None:
            return None
        left, untried = tried
        cause = Cause(self.failing.first.site) if repair.node is None else _of(repair.node)
        others = tuple(node.site for node in repair.others)
        return replace(cause, repair=repair, settles=not left, untried=untried, others=others)

    def _left(self, repair: Repair) -> tuple[int, tuple[str, ...]] | None:
        """Return how many values still differ with a repair, and the untried layouts; None where it does not help.

        It does not help where the first value still differs, or the program fails under the layout that is looked
        into. Other layouts say nothing where the program fails because its tensors have the shape of the former
        group, or does not make the collective because that group has one rank.
        """
        key, left, same_sums, other_sums, untried = self.failing.first.key, 0, 0, 0, list[str]()
        ordered = sorted(self.layouts, key=lambda layout: layout is not self.failing.layout)
        for layout in ordered:
            session = Session(layout, self.reference, repair=repair, until=key)
            outcome = self.runner.tried(session)
            if layout is not self.failing.layout and (
                (outcome == "failed" and _sized(repair))
                or (key in session.deviations and not session.chosen and _single(repair, layout))
            ):
                untried.append(layout.name)
                continue
            if outcome != "ended" or key in session.deviations:
                return None
            left += len(session.deviations)
            same_sums, other_sums = same_sums + session.sums_of_equal, other_sums + session.sums_of_different
        # Sums of equal numbers only multiply: that is a scale, and another defect.
        return None if same_sums and not other_sums else (left, tuple(untried))


def find(layouts: Sequence[Layout], reference: Reference, failing: Failing, runner: Runner, *, seconds: float) -> Cause:
    """Return what made the first value differ, within about so many seconds of trials."""
    single = Session(runner.reference, None, trace=True)
    runner.run(single)
    failing, record = _looked_into(layouts, reference, failing, runner)
    first, layout = failing.first, failing.layout
    nodes = nodes_of((one.stack, one.kind, one.call.operation) for ranks in record.records.values() for one in ranks)
    suspects = _suspects(layout, record, single, first.key, nodes)
    before = _before(record, first.key, nodes)
    search = _Search(layouts, reference, failing, runner, time.monotonic() + seconds)
    found = search.cause(_phases(layouts, suspects, before))
    return found or (_of(suspects[0][0]) if suspects else Cause(first.site))


def find_failure(
    layouts: Sequence[Layout], reference: Reference, failing: Failing, runner: Runner, *, seconds: float
) -> Cause | None:
    """Return which change of a call lets a program end whose ranks diverge under a layout, and makes it right."""
    record = Session(failing.layout, reference, trace=True)
    with suppress(RanksFailed):
        runner.run(record)
    first = failing.first
    records = [one for ranks in record.records.values() for one in ranks]
    nodes = nodes_of((one.stack, one.kind, one.call.operation) for one in records)
    # What some rank waits for is most suspect.
    waits = {node for one in records if one.call.results is None for node in nodes.get((one.stack, one.kind), ())}
    before = sorted(_before(record, first.key, nodes), key=lambda found: waits.isdisjoint(found))
    search = _Search(layouts, reference, failing, runner, time.monotonic() + seconds)
    regrouped = [
        way
        for found in before
        for repair in regroupings(found[0], layouts)
        # A program that fails has not made its backward pass yet.
        for way in (repair, _widened(repair))
    ]
    return search.cause((regrouped, _together(before, before, layouts)))


def _looked_into(
    layouts: Sequence[Layout], reference: Reference, failing: Failing, runner: Runner
) -> tuple[Failing, Session]:
    """Return the layout whose collectives are looked into, and its run.

    Programs make no collective on a group of one rank: then the layout with the most axes that has the same first
    difference, where one makes more of them.
    """

    def traced(layout: Layout) -> Session:
        session = Session(layout, reference, trace=True)
        runner.run(session)
        return session

    simple, key = traced(failing.layout), failing.first.key
    same = [one for one in layouts if min(failing.by_layout[one.name], key=reference.place, default=None) == key]
    richest = max(same, key=lambda one: sum(size > 1 for size in one.mesh.axes.values()), default=failing.layout)
    if richest is failing.layout:
        return failing, simple
    session = traced(richest)
    made = {(one.stack.sites, one.kind) for ranks in simple.records.values() for one in ranks}
    more = {one.kind for ranks in session.records.values() for one in ranks if (one.stack.sites, one.kind) not in made}
    if all(failing.layout.kinds[kind].size > 1 for kind in more if kind in failing.layout.kinds):
        return failing, simple
    return Failing(richest, failing.by_layout[richest.name][key], failing.by_layout), session


def _phases(
    layouts: Sequence[Layout], suspects: list[list[Node]], before: list[list[Node]]
) -> Iterator[Iterable[Repair]]:
    """Yield the repairs that are tried, in the order in which one that works is believed."""
    every = [*suspects, *(nodes for nodes in before if nodes not in suspects)]
    plain = [nodes for nodes in every if _matters(nodes[0], layouts)]
    trivial = [nodes for nodes in every if not _matters(nodes[0], layouts)]
    likely = [nodes for nodes in plain if nodes in suspects]
    yield [repair for nodes in likely for repair in regroupings(nodes[0], layouts)]
    yield _together(likely, plain, layouts)
    yield [repair for nodes in plain for repair in regroupings(nodes[0], layouts)]
    # Coarse nodes came first, then finer ones.
    for depth in range(1, max(map(len, every), default=0)):
        at_depth = [nodes[depth] for nodes in plain if depth < len(nodes)]
        yield [repair for node in at_depth for repair in regroupings(node, layouts)]
    yield _together(plain, plain, layouts)
    yield reductions(layouts)
    for depth in range(max(map(len, every), default=0)):
        at_depth = [nodes[depth] for nodes in every if depth < len(nodes)]
        yield [repair for node in at_depth for repair in scalings(layouts, node)]
    yield scalings(layouts)
    yield [repair for nodes in trivial for node in nodes for repair in regroupings(node, layouts)]


def _together(likely: list[list[Node]], every: list[list[Node]], layouts: Sequence[Layout]) -> list[Repair]:
    """Move all collectives of a function on one kind to another: it got, or chose, that group once."""
    functions = {_function(nodes[0]): None for nodes in likely}
    found = []
    for function in functions:
        nodes = sorted({one[0] for one in every if _function(one[0]) == function}, key=lambda node: node.site.line)
        if len(nodes) > 1:
            found += [Repair("group", one.what, nodes[0], tuple(nodes[1:])) for one in regroupings(nodes[0], layouts)]
    return found


def _widened(repair: Repair) -> Repair:
    """Another group for all that a line makes, in the backward pass too; any other repair as it is."""
    node = repair.node
    if repair.form != "group" or node is None:
        return repair
    return Repair("group", repair.what, Node((node.site,), node.kind, node.operation, anywhere=True))


def _function(node: Node) -> tuple[str, str, str]:
    return node.site.file, node.site.function, node.kind


def _sized(repair: Repair) -> bool:
    """Return whether tensors have the shape of the group, so that another group of another size cannot be tried."""
    nodes = (repair.node, *repair.others) if repair.form == "group" and repair.node is not None else ()
    return any(node.operation not in SAME_SHAPE for node in nodes)


def _single(repair: Repair, layout: Layout) -> bool:
    """Return whether the collectives of a repair are on a group of one rank, on which a program need not make them."""
    return repair.node is not None and repair.node.kind in layout.kinds and layout.kinds[repair.node.kind].size == 1


def _matters(node: Node, layouts: Sequence[Layout]) -> bool:
    """Return whether the group of a node has more than one rank under some layout."""
    return any(node.kind not in layout.kinds or layout.kinds[node.kind].size > 1 for layout in layouts)


def _of(node: Node) -> Cause:
    operation = node.operation.removesuffix("_coalesced").removesuffix("_single")
    return Cause(node.site, operation.replace("_", "-"), node.kind, lines=node.sites)


def _before(record: Session, key: Key, nodes: dict[tuple[Stack, str], list[Node]]) -> list[list[Node]]:
    """Return the nodes of the collectives that some rank made before it saw the value, the latest first."""
    found: dict[tuple[Node, ...], None] = {}
    ends = record.seen_at.get(key, {})
    for rank, records in record.records.items():
        end = ends.get(rank, float("inf"))
        for one in reversed(records):
            if one.order < end and (one.stack, one.kind) in nodes:
                found.setdefault(tuple(nodes[one.stack, one.kind]))
    return [list(one) for one in found]


# In which order what was found about collectives makes them suspect.
_SUSPECT = ("wrong", DIFFERENT, SCALED, ORDER)


def _suspects(
    layout: Layout, record: Session, single: Session, key: Key, nodes: dict[tuple[Stack, str], list[Node]]
) -> list[list[Node]]:
    """Return the nodes of collectives that differ from the reference, the most suspect first, then in program order."""
    references = _by_line(single.records)
    ends, found = record.seen_at.get(key, {}), defaultdict[str, dict[tuple[Node, ...], None]](dict)
    for lines, calls in _by_line(record.records, ends).items():
        wholes = references.get(lines)
        if not wholes:
            continue
        for number, ranks in calls.items():
            state = _state(layout, ranks, [*wholes.get(number, {}).values()] or _all(wholes), _all(wholes))
            if state in _SUSPECT:
                one = next(iter(ranks.values()))
                found[state].setdefault(tuple(nodes[one.stack, one.kind]))
    ordered = [nodes for state in _SUSPECT for nodes in found[state]]
    return [list(one) for one in dict.fromkeys(ordered)]


def _all(wholes: dict[int, dict[int, Record]]) -> list[Record]:
    return [one for ranks in wholes.values() for one in ranks.values()]


def _by_line(
    records: dict[int, list[Record]], ends: dict[int, int] | None = None
) -> dict[tuple[Site, ...], dict[int, dict[int, Record]]]:
    """Return the calls of each stack, by their number on each rank; those before ``ends`` only."""
    found: dict[tuple[Site, ...], dict[int, dict[int, Record]]] = {}
    for rank, calls in records.items():
        numbers: dict[tuple[Site, ...], int] = defaultdict(int)
        for one in calls:
            if one.stack.sites and (ends is None or one.order < ends.get(rank, one.order + 1)):
                lines = one.stack.sites
                found.setdefault(lines, {}).setdefault(numbers[lines], {})[rank] = one
                numbers[lines] += 1
    return found


def _state(layout: Layout, ranks: dict[int, Record], likely: list[Record], every: list[Record]) -> str:
    """Return what one collective's results are, and where they differ, whether its inputs did before."""
    states = {_compared(layout, ranks, whole.call, _results) for whole in likely}
    if states - {DIFFERENT, SCALED, ORDER} or not states:
        return SAME
    # Stages of a pipeline number their calls differently.
    if any(_compared(layout, ranks, whole.call, _results) in (SAME, UNKNOWN) for whole in every):
        return SAME
    state = next(one for one in (SCALED, ORDER, DIFFERENT) if one in states)
    given = {_compared(layout, ranks, whole.call, _given) for whole in likely}
    return "wrong" if state == DIFFERENT and SAME in given else state


def _compared(
    layout: Layout, ranks: dict[int, Record], whole: Call, tensors: Callable[[Call], list[torch.Tensor]]
) -> str:
    expected = tensors(whole)
    local = {rank: tensors(one.call) for rank, one in ranks.items()}
    if not expected or any(len(one) != len(expected) for one in local.values()):
        return UNKNOWN
    states = [
        match(layout.mesh, {rank: one[index] for rank, one in local.items()}, tensor)
        for index, tensor in enumerate(expected)
    ]
    return next((state for state in (DIFFERENT, ORDER, SCALED, UNKNOWN) if state in states), SAME)


def _given(call: Call) -> list[torch.Tensor]:
    """Return what a call gives, the parts of one tensor as that."""
    return [torch.cat(call.given)] if call.operation.endswith("_single") and call.given else call.given


def _results(call: Call) -> list[torch.Tensor]:
    """Return the results in the shapes of the tensors that get them; what is gathered as one tensor."""
    results = call.results or []
    if len(results) != len(call.outputs):
        return []
    shaped = [result.reshape(output.shape) for result, output in zip(results, call.outputs, strict=True)]
    if shaped and (call.operation in ("all_gather", "gather") or call.operation.endswith("_single")):
        # One tensor, as the rows of all members are.
        return [torch.cat(shaped)] if shaped[0].dim() else []
    return shaped
