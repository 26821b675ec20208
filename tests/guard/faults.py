"""A small model on tp, dp and pp, trained by hand, and faults of machines and programs in it, of one rank or line.

```
stage 0   embedding (tied) ── norm ── up (cut by tp) ── bias        gradients summed over dp; of bias also over tp
stage 1   the same, and the embedding once more                     its gradient summed over both stages
```
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import rankmesh as rm

LAYOUT = "tp=2,dp=2,pp=2"
_TRAINED = ("up", "norm", "bias")


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


class Trainer:
    """One rank of the model; ``fault(trainer, where)`` may change anything at each of its points."""

    def __init__(self, groups, fault):
        self.groups, self.fault, self.now = groups, fault, 0
        self.place, sizes = groups.plan.mesh.coordinate(groups.rank), groups.plan.mesh.axes
        self.stages = range(2)[self.place["pp"] :: sizes["pp"]]
        self.samples = range(2)[self.place["dp"] :: sizes["dp"]]
        rows = 8 // sizes["tp"]
        self.weights = {"embedding": torch.randn(3, 4, generator=_seeded(3), dtype=torch.float64)}
        for stage in self.stages:
            draw = torch.randn(8, 4, generator=_seeded(7 + stage), dtype=torch.float64)
            self.weights |= {
                f"{stage}.up": draw[self.place["tp"] * rows :][:rows].clone(),
                f"{stage}.norm": torch.ones(4, dtype=torch.float64),
                f"{stage}.bias": torch.zeros(4, dtype=torch.float64),
            }
        for name in list(self.weights):
            for moment in ("exp_avg", "exp_avg_sq"):
                self.weights[f"{name}.{moment}"] = torch.zeros_like(self.weights[name])
        self.weights |= {f"{stage}.step": torch.zeros((), dtype=torch.int64) for stage in self.stages}
        self.rate, self.decay = 0.05, 0.01
        self.first = {name: one.clone() for name, one in self.weights.items()}

    def full_name(self, name):
        """The full name of a tensor of this rank's stage."""
        return name if name.startswith("embedding") else f"{self.stages[0]}.{name}"

    def of(self, name):
        """A tensor of this rank's stage."""
        return self.weights[self.full_name(name)]

    def shardings(self):
        """How each tensor lies: stages have tensors of the same names, so these carry the stage."""
        mesh, found = self.groups.plan.mesh, {}
        for stage in range(2):
            at = {"pp": stage} if mesh.axes["pp"] > 1 else None
            for name, shape in (("up", (8, 4)), ("norm", (4,)), ("bias", (4,)), ("step", ())):
                for more in ("", ".exp_avg", ".exp_avg_sq") if name != "step" else ("",):
                    cut = ("tp", None) if name == "up" else None
                    dtype = "int64" if name == "step" else "float64"
                    found[f"{stage}.{name}{more}"] = rm.Sharding(mesh, cut, shape, dtype, at=at)
        for more in ("", ".exp_avg", ".exp_avg_sq"):
            found[f"embedding{more}"] = rm.Sharding(mesh, shape=(3, 4), dtype="float64")
        return found

    def step(self, now):
        """One step; the norm of the gradient, which all ranks believe to be the same."""
        self.now, w = now, self.weights
        self.gradients = {name: torch.zeros_like(one) for name, one in w.items() if name.partition(".")[2] in _TRAINED}
        self.gradients["embedding"] = torch.zeros(3, 4, dtype=torch.float64)
        for stage in self.stages:
            for sample in self.samples:
                self.backward(f"{stage}.", sample)
        self.sums = {"up": ["dp"], "norm": ["dp"], "bias": ["tp", "dp"], "embedding": ["pp", "dp"]}
        self.fault(self, "gradients")
        for name, gradient in self.gradients.items():
            for axis in self.sums[name.rpartition(".")[2]]:
                dist.all_reduce(gradient, group=self.groups[axis].pg)
        self.fault(self, "reduced")
        total = torch.stack([one.square().sum() for one in self.gradients.values()]).sum()
        dist.all_reduce(total, group=self.groups["tp"].pg)
        dist.all_reduce(total, group=self.groups["pp"].pg)
        self.norm = total.sqrt()
        self.fault(self, "norm")
        self.update()
        self.fault(self, "updated")
        return self.norm

    def backward(self, stage, sample):
        """Add the gradients of one sample."""
        w, self.batch = self.weights, self.now * 10 + sample
        self.fault(self, "batch")
        x = w["embedding"][self.batch % 3] * (1 + self.batch % 5)
        self.x = x * w[f"{stage}norm"]
        self.fault(self, "activation")
        hidden = torch.tanh(w[f"{stage}up"] @ self.x)
        upstream = hidden * (1 - hidden**2)
        back = w[f"{stage}up"].T @ upstream
        dist.all_reduce(back, group=self.groups["tp"].pg)
        self.gradients[f"{stage}up"] += torch.outer(upstream, self.x)
        self.gradients[f"{stage}norm"] += back * self.x  # equal on tp, as its inputs are
        self.gradients[f"{stage}bias"] += upstream.reshape(-1, 4).sum(0)  # a part, which tp sums
        self.gradients["embedding"][self.batch % 3] += back

    def update(self):
        """AdamW by hand."""
        w = self.weights
        for stage in self.stages:
            w[f"{stage}.step"] += 1
        step = int(self.of("step"))
        for name, gradient in self.gradients.items():
            gradient = gradient / torch.clamp(self.norm / 1e6, min=1.0)  # clipped where it is huge
            first, second = w[f"{name}.exp_avg"], w[f"{name}.exp_avg_sq"]
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.99).add_(0.01 * gradient**2)
            w[name].mul_(1 - self.rate * self.decay)
            w[name] -= self.rate * (first / (1 - 0.9**step)) / (
                (second / (1 - 0.99**step)).sqrt() + 1e-8
            )  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens at a point of step 3, on some ranks, and what has to be found: the first tensor, and the ranks."""

    where: str
    ranks: tuple[int, ...] | None
    change: Any
    tensor: str | None
    found: tuple[int, ...] | None
    always: bool = False

    def __call__(self, trainer, where):
        """At a point of the program."""
        here = self.ranks is None or trainer.groups.rank in self.ranks
        if where == self.where and here and (self.always or trainer.now == 3):
            self.change(trainer)


def flip(name, at, bit):
    """One bit of one element of a tensor."""

    def change(trainer):
        found = (trainer.gradients if ":" in at else trainer.weights)[trainer.full_name(name)]
        found.view(torch.int64).view(-1)[int(at.strip(":"))] ^= 1 << bit if bit < 63 else -(1 << 63)

    return change


def put(what):
    """Run a statement on the trainer, by the name ``t``."""

    def change(t):
        exec(what, {"t": t, "torch": torch, "nan": float("nan")})  # noqa: S102  - the corpus's own lines

    return change


# Ranks: tp is innermost, then dp, then pp: rank 5 is tp=1, dp=0, pp=1. Tensors are named in alphabetical order.
FAULTS = {
    "the lowest bit of a weight": Fault("updated", (1,), flip("up", "3", 0), "0.up", (1, 3)),
    "the sign of a weight": Fault("updated", (6,), flip("up", "0", 63), "1.up", (4, 6)),
    "the exponent of a norm": Fault("updated", (2,), flip("norm", "1", 52), "0.norm", (2,)),
    "a bit of a gradient": Fault("reduced", (7,), flip("norm", ":2", 40), "1.norm", (7,)),
    "a bit of a gradient before its sum": Fault("gradients", (7,), flip("bias", ":2", 40), None, None),
    "a bit of a first moment": Fault("updated", (4,), flip("norm.exp_avg", "0", 3), "1.norm.exp_avg", (4,)),
    "a bit of a second moment": Fault("updated", (3,), flip("bias.exp_avg_sq", "3", 1), "0.bias.exp_avg_sq", (3,)),
    "a bit of an activation": Fault(
        "activation", (5,), put("t.x.view(torch.int64)[0] ^= 1 << 45"), "1.norm", (4, 5, 6, 7)
    ),
    "a step counter": Fault("updated", (0,), put("t.of('step').add_(1)"), "0.step", (0,)),
    "a norm's sum over tp is missing": Fault(
        "gradients", None, put("t.sums['bias'] = ['dp']"), "0.bias", (0, 1, 2, 3), always=True
    ),
    "dropout that differs within tp": Fault(
        "activation", (1, 3, 5, 7), put("t.x = t.x * torch.tensor([2.0, 0, 2, 0])"), "0.norm", (0, 1, 2, 3)
    ),
    "a tied embedding that one stage updates": Fault(
        "gradients", None, put("t.sums['embedding'] = ['dp']"), "embedding", tuple(range(8)), always=True
    ),
    "a rank with an old checkpoint": Fault(
        "updated", (6,), put("[t.weights[n].copy_(one) for n, one in t.first.items()]"), "embedding", (6,)
    ),
    "a batch that is repeated": Fault("batch", (2, 3, 6, 7), put("t.batch -= 10"), None, None),
    "another rate of learning": Fault("norm", (1,), put("t.rate *= 1.001"), "embedding", (1,)),
    "no weight decay": Fault("norm", (4,), put("t.decay = 0.0"), "embedding", (4,)),
    "a step of the optimizer is skipped": Fault(
        "norm", (5,), put("t.gradients = {}; t.of('step').sub_(1)"), "embedding", (5,)
    ),
    "a NaN": Fault("updated", (0,), put("t.of('norm')[1] = nan"), "0.norm", (0,)),
    "a zero that is negative": Fault(
        "updated", None, put("t.of('norm.exp_avg')[0] = [0.0, -0.0][t.groups.rank == 2]"), "0.norm.exp_avg", (2,)
    ),
    "gradients clipped by a norm of one rank": Fault(
        "norm", (0,), put("t.norm = t.norm * 1e9"), "embedding", (0,)
    ),
    "shards of tp that are exchanged": Fault(
        "updated", (0,), put("t.of('up').copy_(t.of('up').flip(0))"), "0.up", (0, 2)
    ),
    "a stale copy of a parameter": Fault(
        "updated", (7,), put("t.of('embedding').copy_(t.first['embedding'])"), "embedding", (7,)
    ),
    "an update in lower precision": Fault(
        "updated", (3,), put("t.of('norm').copy_(t.of('norm').float())"), "0.norm", (3,)
    ),
    "a sum over another group": Fault(
        "gradients", None, put("t.sums['norm'] = ['tp']"), "0.norm", (0, 1, 2, 3), always=True
    ),
    "two gradients in one buffer": Fault(
        "gradients", (1,), put("t.gradients['0.norm'] = t.gradients['0.bias']"), "0.norm", (1, 3)
    ),
    "a gradient that one rank averages": Fault("reduced", (4,), put("t.gradients['1.norm'] /= 2"), "1.norm", (4,)),
    "a buffer of whatever each rank had there": Fault(
        "updated", None, put("t.of('embedding.exp_avg')[2, 3] += t.groups.rank"), "embedding.exp_avg", (*range(8),)
    ),
    "an element that nobody has initialised": Fault(
        "updated", (1,), put("t.of('embedding.exp_avg_sq')[2, 3] = 1e-300"), "embedding.exp_avg_sq", (1,)
    ),
}  # fmt: skip


def outcome(groups, fault, steps=6, every=1):
    """What a guard finds in a run with a fault: the tensor, the ranks, the step and since when; None for nothing."""
    trainer = Trainer(groups, fault)
    guard = rm.Guard(groups, trainer.weights, trainer.shardings(), every=every)
    try:
        for now in range(steps):
            guard.sum("norm", trainer.step(now), over="tp-dp-pp")
            guard.step(now)
        guard.check()
    except rm.Diverged as error:
        return error.tensor, error.ranks, error.step, error.since
    finally:
        guard.close()
    return None
