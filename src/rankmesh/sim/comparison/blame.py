"""Blame: which collective made a value differ, and which change of the program would make it right.

```
record        the failing layout and the reference run again, with every collective and its lines
suspects      collectives whose results, put together, differ from the reference, in the order of the program
trials        the same run with one repair; one that makes what was seen right is tried under every layout
```

Only a repair that worked is reported: in its run the value is right under every layout where it was wrong, and so is,
unless the program has a second defect, everything that is seen after it.

Where no repair works, a collective is named only if it gets the right numbers and its result is wrong.
One process makes no sends and receives, so none of them is named.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from rankmesh.sim.calls import Site
from rankmesh.sim.comparison.aligned import DIFFERENT, SAME, UNKNOWN, match
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.noise import proportion
from rankmesh.sim.comparison.repairs import Factor, Repair, equally_large, reductions, regroupings, scalings
from rankmesh.sim.comparison.result import Difference
from rankmesh.sim.comparison.runner import Runner
from rankmesh.sim.comparison.session import SAME_SHAPE, Key, Record, Reference, Session
from rankmesh.sim.comparison.stacks import Node, nodes_of

__all__ = ["find"]


# The site of collectives, then finer nodes.
_Nodes = tuple[Node, ...]


@dataclass
class _Search:
    """The trials of one comparison: ``runs`` are those without a repair, ``first`` what differs first in them.

    ``layout`` is the one that is looked into; in it some rank is ``stuck`` where the program fails.
    """

    runs: Mapping[Layout, Session]
    layout: Layout
    first: Difference
    key: Key
    reference: Reference
    runner: Runner
    deadline: float
    stuck: bool = False
    fallback: Difference | None = None
    tried: set[Repair] = field(default_factory=set)

    @property
    def layouts(self) -> list[Layout]:
        """All layouts, beginning with the one whose collectives are searched."""
        return sorted(self.runs, key=lambda layout: layout is not self.layout)

    def cause(self, phases: Iterable[Iterable[Repair]]) -> Difference | None:
        """Return the cause that the first repair shows after which everything is equal, else the first that helps."""
        for repair in chain.from_iterable(phases):
            found = self._shown(repair)
            if self.stuck if found is None else not found.settles:
                self.fallback = self.fallback or found
                # The backward pass of these lines may be wrong in the same way, or is not reached.
                found = self._shown(_widened(repair))
            if found is not None and found.settles:
                return found
        return self.fallback

    def _shown(self, repair: Repair) -> Difference | None:
        """Return the cause that a repair shows; None where it does not help, or was tried before.

        It does not help where the first value still differs, or the program fails under the layout that is looked
        into. Other layouts do not count where the program fails because its tensors have the shape of the former
        group, or does not make the collective because that group has one rank.
        """
        if repair in self.tried or time.monotonic() > self.deadline:
            return None
        self.tried.add(repair)
        key, left, same_sums, other_sums, untried = self.key, 0, 0, 0, list[str]()
        for layout in self.layouts:
            session = Session(layout, self.reference, repair=repair, until=key)
            outcome = self.runner.tried(session)
            if layout is not self.layout and (
                (outcome == "failed" and _sized(repair))
                or (key in session.deviations and not session.changed and _single(repair, layout))
            ):
                untried.append(layout.name)
                continue
            if outcome != "ended" or key in session.deviations:
                return None
            left += len(session.deviations)
            same_sums, other_sums = same_sums + session.sums_of_equal, other_sums + session.sums_of_different
        # Sums of equal numbers only multiply: that is a scale, and another defect.
        if same_sums and not other_sums:
            return None
        found = self.first if repair.node is None else _blamed(self.first, repair.node)
        others = tuple(node.site.short for node in repair.others)
        return replace(found, repair=repair.described(), settles=not left, untried=tuple(untried), others=others)

    def _factor(self, deviation: Difference | None) -> float | None:
        """Return the factor that makes a value right: 1 where it is right already; None where no factor does."""
        if deviation is None:
            return 1.0
        expected, got = deviation.expected, deviation.got
        if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and got.is_floating_point()):
            return None
        return proportion(got, expected, self.reference.allowed(self.key)) if deviation.why == "value" else None

    def scaled(self) -> list[Repair]:
        """Return the factor that makes what is seen right under every layout, where there is one."""
        factors = {layout: self._factor(run.deviations.get(self.key)) for layout, run in self.runs.items()}
        known = {layout: factor for layout, factor in factors.items() if factor is not None}
        return scalings(known) if len(known) == len(factors) else []


def find(
    runs: Mapping[Layout, Session],
    layout: Layout,
    first: Difference,
    reference: Reference,
    runner: Runner,
    seconds: float,
) -> Difference:
    """Return the first difference with its cause, after at most about ``seconds`` of trials."""
    key = (first.name, first.number)
    layout, states = _looked_into(runs, layout, key, reference, runner)
    search = _Search(runs, layout, first, key, reference, runner, time.monotonic() + seconds, _STUCK in states.values())
    found = search.cause(_phases(search, states))
    if found is not None:
        return found
    wrong, late = ([nodes[0] for nodes, one in states.items() if one == state] for state in (_WRONG, _LATE))
    if wrong:
        return _blamed(first, wrong[0])
    return replace(first, before=late[0].site.short if late else None)


def _blamed(first: Difference, node: Node) -> Difference:
    """Return a difference that a collective made."""
    operation = node.operation.removesuffix("_coalesced").removesuffix("_single").replace("_", "-")
    lines = tuple(map(str, node.sites))
    return replace(first, site=node.site.short, operation=operation, group=node.kind, lines=lines)


def _looked_into(
    runs: Mapping[Layout, Session], layout: Layout, key: Key, reference: Reference, runner: Runner
) -> tuple[Layout, dict[_Nodes, str]]:
    """Return the layout whose collectives are searched, and how each of these is.

    Programs make no collective on a group of one rank: then the layout with the most axes that has the same first
    difference, where one makes more of them.
    """

    def traced(layout: Layout) -> Session:
        session = Session(layout, reference, trace=key)
        runner.tried(session)
        return session

    single = Session(runner.reference, None, trace=key)
    runner.run(single)
    simple = traced(layout)
    same = [one for one, run in runs.items() if min(run.deviations, key=reference.place, default=None) == key]
    richest = max(same, key=lambda one: sum(size > 1 for size in one.mesh.axes.values()))
    if richest is layout or runs[layout].failure is not None:
        return layout, _states(layout, simple, single)
    session = traced(richest)
    made = {(one.stack.sites, one.kind) for ranks in simple.records.values() for one in ranks}
    more = {one.kind for ranks in session.records.values() for one in ranks if (one.stack.sites, one.kind) not in made}
    if all(layout.kinds[kind].size > 1 for kind in more if kind in layout.kinds):
        return layout, _states(layout, simple, single)
    return richest, _states(richest, session, single)


def _phases(search: _Search, states: dict[_Nodes, str]) -> Iterator[Iterable[Repair]]:
    """Yield candidate repairs, most plausible first. The first that makes the numbers equal is reported."""
    layouts = search.layouts
    suspects = sorted((nodes for nodes in states if states[nodes] in _SUSPECT), key=lambda one: _SUSPECT[states[one]])
    every = list(dict.fromkeys([*suspects, *reversed(states)]))
    plain = [nodes for nodes in every if _matters(nodes[0], layouts)]
    depths = range(max(map(len, every), default=0))
    likely = [nodes[0] for nodes in plain if nodes in suspects]
    yield [repair for node in likely for repair in regroupings(node, layouts)]
    yield _together(likely, plain, layouts)
    # Coarse nodes first, then finer ones.
    for depth in depths:
        yield [repair for nodes in plain for node in nodes[depth : depth + 1] for repair in regroupings(node, layouts)]
    yield _together([nodes[0] for nodes in plain], plain, layouts)
    if search.stuck:
        return
    yield reductions(layouts)
    for depth in depths:
        for nodes in plain:
            yield [repair for node in nodes[depth : depth + 1] for repair in _scalings(node, states, nodes, layouts)]
    yield search.scaled()
    yield [repair for nodes in every for node in nodes for repair in regroupings(node, layouts)]


def _scalings(node: Node, states: dict[_Nodes, str], nodes: _Nodes, layouts: Sequence[Layout]) -> list[Repair]:
    """Return the factors by which a collective can be wrong: the size of its group, and one over it.

    A sum of means has the factor before it as well; any other factor is not the collective's if its result has none,
    or its inputs have it. It may be another group's that always has as many ranks, unless the inputs are right. The
    line that makes the collective is tried before the one that chose its group, if all that it makes are like this one.
    """
    state = states[nodes]
    if state == _RIGHT or node.kind not in layouts[0].kinds or (state != _SCALED and equally_large(node.kind, layouts)):
        return []
    made = {one for other, one in states.items() if other[0].sites[0] == node.sites[0]}
    innermost = [replace(node, sites=node.sites[:1])] if made == {state} else []
    factors = [Factor(node.kind, divides=True), *([Factor(node.kind)] if state != _CARRIED else [])]
    return [Repair("scale", "", one, factor) for one in (*innermost, node) for factor in factors]


def _together(likely: list[Node], every: list[_Nodes], layouts: Sequence[Layout]) -> list[Repair]:
    """Move all collectives of a function on one kind to another: it got, or chose, that group once."""
    found = []
    for file, function, kind in dict.fromkeys((node.site.file, node.site.function, node.kind) for node in likely):
        inside = {one[0] for one in every if one[0].site.file == file and one[0].site.function == function}
        nodes = sorted((node for node in inside if node.kind == kind), key=lambda node: node.site.line)
        if len(nodes) > 1:
            found += [replace(one, others=tuple(nodes[1:])) for one in regroupings(nodes[0], layouts)]
    return found


def _widened(repair: Repair) -> Repair:
    """Return the repair for all calls that a line makes, also in the backward pass; any other repair unchanged."""
    node = repair.node
    if repair.form != "group" or node is None:
        return repair
    return replace(repair, node=Node((node.site,), node.kind, node.operation, anywhere=True), others=())


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


# How the results of a collective are, and its inputs where that matters; some rank waits for a stuck one.
_STUCK = "stuck"
_RIGHT, _UNKNOWN, _DIFFERENT = "right", "unknown", "different"
_WRONG = "wrong"  # other results, from inputs that are right, or right but for a factor
_LATE = "late"  # other results, from other inputs
_SCALED = "scaled"  # right but for a factor, which the inputs do not have
_CARRIED = "carried"  # right but for a factor, which the inputs have as well
# Which states make collectives suspect, and in which order.
_SUSPECT = {_STUCK: 0, _WRONG: 0, _DIFFERENT: 1, _LATE: 1, _SCALED: 2, _CARRIED: 2}


def _states(layout: Layout, record: Session, single: Session) -> dict[_Nodes, str]:
    """Compare the collectives before a value with the reference, in the order of the program.

    Of the calls of one node the most suspect one counts.
    """
    nodes = nodes_of((one.stack, one.kind, one.operation) for ranks in record.records.values() for one in ranks)
    references = _by_line(single.records)
    found: dict[_Nodes, str] = {}
    order = [*_SUSPECT, _UNKNOWN, _RIGHT]
    for lines, calls in _by_line(record.records).items():
        wholes = references.get(lines, {})
        every = [one for ranks in wholes.values() for one in ranks.values()]
        for number, ranks in calls.items():
            waits = any(one.results is None for one in ranks.values())
            likely = [*wholes.get(number, {}).values()] or every
            state = _STUCK if waits else _state(layout, ranks, likely, every)
            one = next(iter(ranks.values()))
            known = tuple(nodes[one.stack, one.kind])
            found[known] = min(state, found.get(known, state), key=order.index)
    return found


def _by_line(records: dict[int, list[Record]]) -> dict[tuple[Site, ...], dict[int, dict[int, Record]]]:
    """Return the calls of each stack whose tensors are kept, by their number on each rank."""
    found: dict[tuple[Site, ...], dict[int, dict[int, Record]]] = {}
    for rank, calls in records.items():
        numbers: dict[tuple[Site, ...], int] = defaultdict(int)
        for one in calls:
            if one.stack.sites and one.given is not None:
                lines = one.stack.sites
                found.setdefault(lines, {}).setdefault(numbers[lines], {})[rank] = one
                numbers[lines] += 1
    return found


def _state(layout: Layout, ranks: dict[int, Record], likely: list[Record], every: list[Record]) -> str:
    """Compare the results of one collective, and its inputs if those differ, with the reference."""
    factors = {_compared(layout, ranks, whole, _results) for whole in likely}
    if SAME in factors:
        return _RIGHT
    # Stages of a pipeline number their calls differently.
    factors |= {_compared(layout, ranks, whole, _results) for whole in every}
    if not factors or factors & {SAME, UNKNOWN}:
        return _UNKNOWN
    given = {_compared(layout, ranks, whole, _given) for whole in likely}
    if factors != {DIFFERENT}:
        return _CARRIED if factors & given - {DIFFERENT} else _SCALED
    return _LATE if given == {DIFFERENT} else _WRONG if given - {DIFFERENT, UNKNOWN} else _DIFFERENT


def _compared(
    layout: Layout, ranks: dict[int, Record], whole: Record, tensors: Callable[[Record], list[torch.Tensor]]
) -> float:
    """Return the factor that the tensors of a call have in common; DIFFERENT or UNKNOWN where one of them is."""
    expected = tensors(whole)
    local = {rank: tensors(one) for rank, one in ranks.items()}
    if not expected or any(len(one) != len(expected) for one in local.values()):
        return UNKNOWN
    factors = [
        match(layout.mesh, {rank: one[index] for rank, one in local.items()}, tensor)
        for index, tensor in enumerate(expected)
    ]
    if DIFFERENT in factors or UNKNOWN in factors:
        return DIFFERENT if DIFFERENT in factors else UNKNOWN
    return next((factor for factor in factors if factor != SAME), SAME)


def _given(call: Record) -> list[torch.Tensor]:
    """Return the inputs of a call; the parts of one tensor are joined."""
    given = call.given or []
    return [torch.cat(given)] if call.operation.endswith("_single") and given else given


def _results(call: Record) -> list[torch.Tensor]:
    """Return the results, in the shapes of the output tensors; gathered parts are joined."""
    shaped = call.results or []
    if shaped and (call.operation in ("all_gather", "gather") or call.operation.endswith("_single")):
        # One tensor, as the rows of all members are.
        return [torch.cat(shaped)] if shaped[0].dim() else []
    return shaped
