"""The example as a program that is compared, and copies of it in which one collective is made on another group."""

import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from rankmesh import sim

GPT = Path(__file__).parents[2] / "examples" / "train_gpt" / "gpt"


# What a layer could take for its own group: a group that it has besides, or is given for its collective alone.
PREPARED = (
    ("tensor_parallel.py", "        self.tp = weights.groups.tp\n",
     "        self.tp, self.wrong = weights.groups.tp, weights.groups.data\n"),
    ("context_parallel.py", "values: Tensor, cp: ProcessGroup", "values: Tensor, cp: ProcessGroup, over: ProcessGroup"),
    ("context_parallel.py", "torch.stack([keys, values]), cp)", "torch.stack([keys, values]), over)"),
    ("model.py", "values, self.groups.cp)", "values, self.groups.cp, self.groups.cp)"),
)  # fmt: skip


@dataclass(frozen=True)
class Break:
    """One collective: its file, what it is made on, what instead, and the layouts that are compared.

    ``named`` is the line that makes the collective, where another one chooses its group.
    """

    file: str
    line: str
    right: str
    wrong: str
    layouts: tuple[str, ...]
    operation: str = "all-reduce"
    named: str = ""

    def apply(self, folder):
        """Change the copy of the example in a folder; the line that should be named."""
        path = folder / self.file
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [number for number, line in enumerate(lines) if self.line in line]
        assert len(found) == 1, (self, found)
        changed = lines[found[0]].replace(self.right, self.wrong)
        assert changed != lines[found[0]], self
        lines[found[0]] = changed
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 1 + next(number for number, line in enumerate(lines) if (self.named or lines[found[0]]) in line)


def copy_of(folder, name):
    """A copy of the example's package, which can be imported under a name of its own."""
    shutil.copytree(GPT, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, known, changed in PREPARED:
        path = folder / name / file
        text = path.read_text(encoding="utf-8")
        assert text.count(known) == 1
        path.write_text(text.replace(known, changed), encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return folder / name


def megatron(*layouts):
    """SPECs of Megatron's recipe."""
    return tuple(f"megatron:{layout}" for layout in layouts)


TP, DP = megatron("tp=2,dp=1", "tp=2,dp=2"), megatron("dp=2", "tp=2,dp=2")
PP, CP = megatron("pp=2,dp=1", "pp=2,dp=1,tp=2"), megatron("tp=2,cp=2,dp=1")
EP = megatron("dp=2,ep=2", "tp=2,dp=2,ep=2")
# Replicas of the experts, as many as ranks that hold different ones.
REPLICAS = megatron("dp=4,ep=2")
OTHERS, WORLD = ", self.groups.expert_shards)", ", torch.distributed.group.WORLD)"
MODEL, TENSOR, LOOP, EXPERTS, OPTIMIZER = (
    f"{name}.py" for name in ("model", "tensor_parallel", "loop", "experts", "optimizer")
)
BREAKS = {
    "vocabulary, forward": Break(MODEL, "x = embedded(", "groups.tp", "groups.data", TP),
    "cross-entropy": Break(MODEL, "loss = cross_entropy(", "groups.tp", "groups.data", TP),
    "attention, in": Break(MODEL, 'torch.einsum("bpe,thwe->tbhpw"', "groups.tp", "groups.data", TP),
    "attention, out": Break(MODEL, "return summed(torch.einsum", "groups.tp", "groups.data", TP),
    "feed-forward, in": Break(TENSOR, "units = F.gelu(copied", "self.tp", "self.wrong", TP),
    "feed-forward, out": Break(TENSOR, "return summed(torch.matmul", "self.tp", "self.wrong", TP),
    "loss": Break(LOOP, "loss = total(pipeline", "groups.data", "groups.tp", DP),
    "loss over stages": Break(LOOP, "loss = total(pipeline", "data, groups.pp", "data, groups.tp", PP),
    "tied tables": Break(OPTIMIZER, "total(self.table.grad", "*self.groups.tied", "self.groups.tp", PP),
    "dense norm": Break(OPTIMIZER, "dense = total(", "*self.groups.model", "self.groups.pp", TP),
    "dense norm, replicas": Break(OPTIMIZER, "dense = total(", "groups.shards", "groups.tp", DP),
    "experts, in": Break(EXPERTS, "copied(rows", "groups.ep_tp", "groups.data", TP),
    "experts, out": Break(EXPERTS, "summed(torch.cat(done)", "groups.ep_tp", "groups.data", TP),
    "cross-entropy, wanted": Break(TENSOR, "wanted = summed(", ", tp)", WORLD, TP),
    "cross-entropy, normaliser": Break(TENSOR, "normaliser = summed(", ", tp)", WORLD, TP),
    "keys and values": Break(MODEL, "seen = causal_", "cp, self.groups.cp", "cp, self.groups.tp", CP, "all-gather"),
    "tokens, counts": Break(EXPERTS, "arriving = exchange(", ", ep)", OTHERS, REPLICAS, "all-to-all"),
    "tokens, there": Break(EXPERTS, "return exchanged(", "received, ep)", f"received{OTHERS}", REPLICAS, "all-to-all"),
    "tokens, back": Break(EXPERTS, "return exchanged(", "sent, ep)", f"sent{OTHERS}", REPLICAS, "all-to-all"),
    "tokens": Break(EXPERTS, "ep = self.groups.ep", "groups.ep", "groups.expert_shards", REPLICAS, "all-to-all",
                    "arriving = exchange("),
    "experts' norm": Break(OPTIMIZER, "return (dense + total(", "groups.expert_model", "groups.model", EP),
}  # fmt: skip


def program_of(package, *, steps=2):
    """Return a program: some steps of the example in ``package``, then every weight and moment."""
    layout, loop, model = (importlib.import_module(f"{package}.{name}") for name in ("layout", "loop", "model"))
    shape = model.Shape(layers=2, hidden=8, heads=2, experts=4, top=2, sequence=8, batch=4, microbatches=1)
    run = loop.Run(shape, steps=steps, rate=0.01, clip=0.25, dtype="float64")

    def program(groups):
        trainer = loop.Trainer(run, layout.of(groups), torch.device("cpu"))
        for step in trainer.steps():
            sim.see("loss", step.loss)
            sim.see("norm", step.norm)
        state = trainer.state()
        for name, sharding in trainer.shardings.items():
            if name in state:
                sim.see(name, state[name], sharding.cut, view=sharding.view, at=sharding.at)

    return program
