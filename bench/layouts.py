"""Steps of ``examples/train_gpt`` on random layouts, predicted, then measured: ``python -m bench.layouts``, as root.

```
drawn       sizes, order of the axes and microbatches from SEED, for four hosts of two ranks in two racks
calibrated  latencies and bandwidths of all levels, by ``measure``, as a user does it
predicted   as ``rankmesh search`` predicts, with computation that takes no time; written to the file
measured    each rank's calls of one step of the example, recorded, then made again without its computation
```

Links are slow, so that waiting for them is nearly all of what the calls take, whatever else the machine does.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rankmesh as rm
from bench.cluster import described, load_example, measured_levels, ordered
from bench.emulated import emulated, require
from bench.report import load, options, record
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES
from rankmesh.core.model import Sizes
from rankmesh.placement.calibrated import calibrated
from rankmesh.placement.predict import Links, predict

__all__ = ["COUNT", "Layout", "drawn", "main", "predicted"]

FIGURES = Path(__file__).parent
RACKS = (("node1", "node2"), ("node3", "node4"))
RANKS, LINK, TRUNK, BURST = 2, 50, 50, 16
SEED, COUNT = 30, 30
# The example's model and batch: every size that eight ranks can have divides them.
SHAPE = {"layers": 8, "hidden": 128, "heads": 8, "experts": 4, "top": 4, "sequence": 128, "batch": 16}
# A layout is measured again until the quickest two of its steps differ by less than this part.
SPREAD, LEAST, MOST = 0.03, 2, 3
SIZES = (4 * 2**10, 2**20)
_AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Layout:
    """Sizes, the order of the axes on the devices, innermost first, and microbatches of a replica."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    order: Sequence[str]
    microbatches: int

    @property
    def sizes(self) -> Sizes:
        """As the search has them: an expert is split over the ranks of tp."""
        return Sizes(tp=self.tp, cp=self.cp, pp=self.pp, dp=self.dp, ep=self.ep, etp=self.tp)

    @property
    def rank_map(self) -> tuple[int, ...]:
        """The rank at each position of the mesh."""
        return ordered({axis: getattr(self, axis) for axis in _AXES}, self.order)

    @property
    def plan(self) -> rm.Plan:
        """The groups of the example."""
        plan = rm.recipes.megatron(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep)
        return plan.replace(rank_map=self.rank_map)


def drawn(count: int = COUNT, seed: int = SEED, world: int = 8) -> tuple[Layout, ...]:
    """Draw layouts of the world, all different, each as likely as any other that the example can train.

    >>> drawn(3) == drawn(3), len(set(drawn(30))), {each.sizes.world for each in drawn(30)}
    (True, 30, {8})
    """
    every = sorted(set(_every(world)), key=str)
    return tuple(random.Random(seed).sample(every, count))  # noqa: S311  - a draw that anyone can repeat


def _every(world: int) -> Iterator[Layout]:
    powers = [2**power for power in range(world.bit_length())]
    for tp, cp, dp in ((tp, cp, dp) for tp in powers for cp in powers for dp in powers if world % (tp * cp * dp) == 0):
        pp = world // (tp * cp * dp)
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        real = [axis for axis in _AXES if sizes[axis] > 1]
        for order in permutations(real):
            rest = tuple(axis for axis in _AXES if axis not in real)
            for ep in (size for size in powers if dp * cp % size == 0 and SHAPE["experts"] % size == 0):
                for microbatches in (size for size in (1, 2, 4) if SHAPE["batch"] % (dp * size) == 0):
                    yield Layout(**sizes, ep=ep, order=(*order, *rest), microbatches=microbatches)


def predicted(layout: Layout, cluster: Cluster) -> float:
    """Predict the seconds of a step's communication as the search does, with computation that takes no time."""
    model, training = described(SHAPE, layout.dp, layout.microbatches, overlap=())
    links = Links(layout.plan, cluster, "gloo")
    return predict(model, training, replace(DEVICES["h100"], speed=float("inf")), links).seconds


# -- on the ranks -------------------------------------------------------------------------------------------------


def _calibration() -> rm.Plan:
    """Return groups inside a host, a rack, and between racks, on which `measure` runs the example's collectives."""
    return rm.Plan(rm.Mesh(tp=2, cp=2, dp=2), [rm.GroupSpec(name) for name in ("tp", "cp", "dp")])


def _ahead() -> None:
    """Run before whatever else the machine does, and the ranks that are forked from here with it: they mostly wait."""
    os.setpriority(os.PRIO_PROCESS, 0, -15)


@contextmanager
def _recorded() -> Iterator[list[Callable[[], None]]]:
    """Record the calls inside this block, each to be made again."""
    import torch
    import torch.distributed as dist

    from gpt import collectives

    calls: list[Callable[[], None]] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(lambda: _again(function, given, named))
            return function(*given, **named)

        return call

    places = [(dist, name) for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv")]
    places += [(collectives, name) for name in ("_gather", "_scatter_sum")]
    with ExitStack() as patched:
        for module, name in places:
            patched.enter_context(patch.object(module, name, recording(getattr(module, name))))
        yield calls
    torch.set_grad_enabled(False)


def _again(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> None:
    for work in function(*given, **named) or ():
        work.wait()


def _step(layout: Layout) -> list[float]:
    """Time the calls of one step of the example by themselves, on this rank."""
    import torch
    import torch.distributed as dist

    from gpt.layout import Sizes as Axes
    from gpt.layout import rankmesh
    from gpt.loop import Run, Trainer
    from gpt.model import Shape

    axes = Axes(layout.tp, layout.cp, layout.dp, layout.pp, layout.ep)
    with rankmesh(axes, layout.rank_map) as groups:
        trainer = Trainer(Run(Shape(**SHAPE, microbatches=layout.microbatches)), groups, torch.device("cpu"))
        dist.barrier()
        with _recorded() as calls:
            trainer.step(0)
        times: list[float] = []
        while not _settled(times):
            dist.barrier()
            started = time.perf_counter()
            for call in calls:
                call()
            slowest = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
    return times


def _settled(times: Sequence[float]) -> bool:
    """Return whether the two quickest are near each other, or there are enough."""
    if len(times) < LEAST:
        return False
    first, second = sorted(times)[:2]
    return second <= (1 + SPREAD) * first or len(times) >= MOST


# -- the program --------------------------------------------------------------------------------------------------


def predictions(layouts: Sequence[Layout], cluster: Cluster, seed: int = SEED) -> dict[str, Any]:
    """Return the predictions, which the file has before anything is measured."""
    return {
        "seed": seed,
        "link": LINK,
        "trunk": TRUNK,
        "shape": SHAPE,
        "ranks": RANKS,
        "racks": RACKS,
        "levels": [level.to_dict() for level in cluster.levels],
        "rows": [{**asdict(each), "predicted": predicted(each, cluster)} for each in layouts],
    }


def complete(
    found: Mapping[str, Any],
    measure: Callable[[Layout], list[float]],
    save: Callable[[Mapping[str, Any]], None],
) -> None:
    """Save the predictions; then measure one layout after the other, saving each."""
    save(found)
    for row in found["rows"]:
        layout = Layout(**{field.name: row[field.name] for field in fields(Layout)})
        begun = load()
        row["times"] = measure(layout)
        row["measured"], row["load"] = min(row["times"]), [begun, load()]
        save(found)


def main() -> None:
    """Draw, predict, write, measure, write."""
    parser = options("layouts", __doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw; another one tells whether the model fits")
    parser.set_defaults(json=None)
    given = parser.parse_args()
    path = given.json or FIGURES / ("layouts.json" if given.seed == SEED else f"layouts_{given.seed}.json")
    require()
    _ahead()
    load_example()
    with emulated(RACKS, ranks=RANKS, link=LINK, trunk=TRUNK, burst=BURST) as there:

        def calibrate() -> Cluster:
            plan = _calibration()
            return calibrated(there.cluster, plan, there.on_ranks(measured_levels, SIZES, plan)[0])

        def measure(layout: Layout) -> list[float]:
            times: list[float] = there.on_ranks(_step, layout)[0]
            return times

        def save(found: Mapping[str, Any]) -> None:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            done = [row for row in found["rows"] if "measured" in row]
            for row in done[-1:]:
                sys.stderr.write(f"{len(done)}: {row['predicted'] / row['measured']:.3f} {json.dumps(row)}\n")

        found = predictions(drawn(given.count, given.seed), calibrate(), given.seed)
        complete(found, measure, save)
        record(path, found)


if __name__ == "__main__":
    main()
