"""Search: sizes and orders of a layout for a world, a cluster and a model, by the predicted time of a step.

```
sizes            tp divides the heads and stays inside hosts · pp up to the layers, which need not divide · cp leaves
                 2,048 tokens to a rank · ep divides the experts, up to tp · dp · cp · etp is 1 or tp
for each         microbatch, virtual stages and recomputation, where they are not given: the quickest that fits,
                 recomputing no more than it must
memory           ``memory``, and LIBRARIES beside it, at most what the device has
seconds          ``predict``, under the placement that costs least
```

A prediction ranks layouts; it is not a measurement. docs/benchmarks.md sets it beside published runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES, Device
from rankmesh.core.model import Sizes, Training, Transformer
from rankmesh.core.plan import Plan
from rankmesh.errors import PlacementError
from rankmesh.placement.compute import flops
from rankmesh.placement.memory import LIBRARIES, memory
from rankmesh.placement.place import place
from rankmesh.placement.predict import Links, Step, least, predict, search_plan

__all__ = ["FREE", "Found", "candidates", "evaluate", "search", "settled"]

# What is tried where it is not given.
FREE = ("microbatch", "virtual_stages", "recompute")
MICROBATCHES, RECOMPUTES = (1, 2, 4, 8), ("none", "selective", "full")
# Tokens of a sequence that context parallelism leaves to a rank, at least.
_SHARE = 2048


_USUAL_ORDER = ("tp", "cp", "dp", "pp")  # Megatron's


@dataclass(frozen=True)
class Found:
    """One layout: its sizes and order, how it is trained, the predicted step, and bytes of a device by part."""

    sizes: Sizes
    training: Training
    order: str
    step: Step
    memory_by_part: Mapping[str, float]
    flops: float

    @property
    def seconds(self) -> float:
        """Predicted seconds of one training step."""
        return self.step.seconds

    @property
    def memory(self) -> float:
        """Bytes that the fullest device allocates."""
        return sum(self.memory_by_part.values())

    @property
    def tflops(self) -> float:
        """TFLOP/s of a device that the model needs, without recomputation."""
        return self.flops / self.seconds / self.sizes.world / 1e12

    @property
    def spec(self) -> str:
        """The layout as a SPEC; the order of one with experts is left to ``rankmesh place``."""
        sizes = {name: getattr(self.sizes, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        experts = self.sizes.ep > 1
        words = [f"world={self.sizes.world}"]
        words += [
            f"{name}={size}"
            for name, size in sizes.items()
            if (size > 1 or name == "etp") and (name not in ("ep", "etp") or experts)
        ]
        names = [name for name in self.order.split("-") if getattr(self.sizes, name, 1) > 1]
        usual = [name for name in _USUAL_ORDER if name in names]
        return f"megatron:{','.join(words)}" + (f",order={self.order}" if names != usual and not experts else "")

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        sizes, training, step = self.sizes, self.training, self.step
        return {
            "spec": self.spec,
            **{name: getattr(sizes, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp")},
            "order": self.order,
            "microbatch": training.microbatch,
            "virtual_stages": training.virtual_stages,
            "recompute": training.recompute,
            "seconds": self.seconds,
            "tflops": self.tflops,
            "memory": self.memory,
            "parts": {"compute": step.compute, "bubble": step.bubble, "communication": step.communication},
            "seconds_by_part": dict(step.parts),
            "hidden": dict(step.hidden),
            "memory_by_part": dict(self.memory_by_part),
        }


def search(
    world_size: int,
    cluster: Cluster,
    model: Transformer,
    training: Training,
    *,
    top: int = 20,
    device: Device = DEVICES["h100"],
    free: tuple[str, ...] = FREE,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Found, ...]:
    """Return the ``top`` quickest layouts that fit into the memory of a device; predicted, not measured.

    Args:
        world_size: the number of ranks.
        cluster: the hosts and links.
        model: the transformer that is trained.
        training: how it is trained.
        top: how many layouts are returned (default 20).
        device: the accelerator that computes (default h100).
        free: the fields of ``training`` that the search chooses for each layout; the others stay as given.
        progress: called with the number of layouts done and the number of all (default None).

    Raises ``PlacementError`` where none fits, with the least memory that one needs.
    """
    available = device.memory - LIBRARIES
    tight: list[float] = []
    widest = max(cluster.host_sizes)
    fitting = [
        (sizes, how)
        for sizes in candidates(world_size, widest, model, training)
        for how in _ways(sizes, model, training, free, available, tight)
    ]
    if not fitting:
        raise _none(world_size, model, training, tight, device.memory)
    bounds = sorted(
        (least(model, how, sizes, device), number, sizes, how) for number, (sizes, how) in enumerate(fitting)
    )
    best: dict[Sizes, tuple[float, Training]] = {}
    links: dict[Sizes, Links] = {}
    for number, (bound, _, sizes, how) in enumerate(bounds):
        worst = nsmallest(top, (seconds for seconds, _ in best.values()))
        if len(worst) == top and bound >= worst[-1]:
            break
        if sizes in best and best[sizes][0] <= bound:
            continue
        if sizes not in links:
            plan = search_plan(sizes, how)
            links[sizes] = next(iter(links.values())).of(plan) if links else Links(plan, cluster, device=device)
        seconds = predict(model, how, device, links[sizes]).seconds
        links[sizes].forget()
        if sizes not in best or seconds < best[sizes][0]:
            best[sizes] = seconds, how
        if progress is not None:
            progress(number + 1, len(bounds))
    chosen = nsmallest(top, best, key=lambda sizes: best[sizes][0])
    placed = (evaluate(sizes, cluster, model, best[sizes][1], device) for sizes in chosen)
    return tuple(sorted(placed, key=lambda each: each.seconds))


def evaluate(
    sizes: Sizes, cluster: Cluster, model: Transformer, training: Training, device: Device = DEVICES["h100"]
) -> Found:
    """Return one layout in the order that costs least."""
    plan = search_plan(sizes, training)
    placed = place(plan, cluster, model=model, training=training, device=device, exact=False)
    assert placed.step is not None  # noqa: S101  - a model is given
    return Found(sizes, training, placed.order, placed.step, memory(model, training, sizes), flops(model, training))


def settled(
    plan: Plan,
    cluster: Cluster,
    model: Transformer,
    training: Training,
    *,
    device: Device = DEVICES["h100"],
    free: Collection[str] = FREE,
) -> Training | None:
    """Return the training of a plan's layout with its ``free`` fields chosen as ``search`` does; None if none fits."""
    links = Links(plan, cluster, device=device)
    ways = list(_ways(links.roles.layout, model, training, free, device.memory - LIBRARIES, []))
    return min(ways, key=lambda how: predict(model, how, device, links).seconds, default=None)


def _none(
    world_size: int, model: Transformer, training: Training, tight: list[float], capacity: float
) -> PlacementError:
    """Return the error for a search without a layout: none fits into memory, or no sizes divide what they cut."""
    if not tight:
        return PlacementError(
            f"no sizes fit {world_size} ranks: tp divides {model.heads} heads and a host, pp is at most "
            f"{model.layers} layers, cp divides the sequence {training.sequence}, and dp microbatches of "
            f"{training.microbatch} the batch {training.batch}; change the batch to a multiple of {world_size}, or the "
            "number of ranks",
            world_size=world_size,
            least=None,
        )
    return PlacementError(
        f"no layout of the model on {world_size} ranks fits into {capacity / 1e9:.0f} GB a device; the least that one "
        f"needs is {min(tight) / 1e9:.0f} GB a device; take more ranks, a smaller batch, or devices with more memory",
        world_size=world_size,
        least=min(tight),
    )


def candidates(world: int, widest: int, model: Transformer, training: Training) -> Iterator[Sizes]:
    """Yield all sizes that divide the model, the batch and the sequence; ``widest``: devices of a host."""
    for tp in _divisors(model.heads, widest):
        for pp in _divisors(world, model.layers):
            for cp in _divisors(training.sequence, max(1, training.sequence // _SHARE)):
                if world % (tp * pp * cp):
                    continue
                dp = world // (tp * pp * cp)
                if training.batch % dp or (dp * cp) % training.replicate:
                    continue
                for ep in _divisors(model.experts, tp * dp * cp) if model.experts else (1,):
                    for etp in sorted({1, tp}) if model.experts else (tp,):
                        if tp * dp * cp % (ep * etp) == 0:
                            yield Sizes(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp)


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def _ways(
    sizes: Sizes, model: Transformer, training: Training, free: Collection[str], available: float, tight: list[float]
) -> Iterator[Training]:
    """Yield how a layout may be trained: each free field, and no more recomputed than it must be to fit.

    ``tight`` gets the memory that the others need.
    """
    for microbatch in MICROBATCHES if "microbatch" in free else (training.microbatch,):
        if training.batch % (sizes.dp * microbatch):
            continue
        for parts in _virtual(sizes, model, training, microbatch, free):
            for recompute in RECOMPUTES if "recompute" in free else (training.recompute,):
                how = replace(training, microbatch=microbatch, virtual_stages=parts, recompute=recompute)
                need = sum(memory(model, how, sizes).values())
                if need <= available:
                    yield how
                    break
                tight.append(need + LIBRARIES)


def _virtual(
    sizes: Sizes, model: Transformer, training: Training, microbatch: int, free: Collection[str]
) -> tuple[int, ...]:
    """Return the virtual stages to try: they divide each stage's layers, and pp the microbatches.

    The embedding and the loss may count as layers of the first and the last stage, as Megatron's
    ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split`` have it.
    """
    if training.schedule == "dualpipe":
        return (1,) if sizes.pp % 2 == 0 else ()
    counted = (model.layers + ends for ends in (0, 1, 2))
    layers = next((each // sizes.pp for each in counted if each % sizes.pp == 0), 1)
    if "virtual_stages" not in free:
        given = training.virtual_stages if sizes.pp > 1 else 1
        return (given,) if layers % given == 0 else ()
    if sizes.pp == 1 or training.batch // (sizes.dp * microbatch) % sizes.pp:
        return (1,)
    return tuple(parts for parts in _divisors(layers, layers) if parts <= 8 or parts == layers)
