"""Nodes and GPUs of a run: what Slurm, a manifest and an engine say of them, and where they contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from rankmesh.readers.config import Layout
from rankmesh.readers.options import Option, Options
from rankmesh.readers.plans import written
from rankmesh.readers.tokens import shown
from rankmesh.readers.tools.containers import Container
from rankmesh.readers.tools.finding import Finding
from rankmesh.readers.tools.rules import Checked

__all__ = ["Machine", "machine_of", "of_counts", "of_engine"]

# Options of launchers and engines that count nodes, and the ranks on each of them.
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines", "PET_NNODES", "NNODES")
_EACH = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "PET_NPROC_PER_NODE", "NPROC_PER_NODE")
_RAY = re.compile(r"(?<![\w-])ray(?![\w-])|multi-node-serving")
# Options of vLLM with which other nodes run replicas of their own.
_ELSEWHERE = {"data_parallel_rank", "data_parallel_start_rank", "headless", "data_parallel_external_lb"}
_ELSEWHERE |= {"data_parallel_address", "node_rank"}


@dataclass(frozen=True)
class Machine:
    """The machine of a run by Slurm or a manifest: possible numbers of nodes, and the GPUs of a node.

    ``together``: how many nodes run an engine; None where a cluster of Ray does, or a number that is not known.
    """

    rule: str
    nodes: tuple[Option, ...]
    gpus: Option | None
    together: int | None


def machine_of(run: Options, container: Container | None, asked: Mapping[str, tuple[int, int]]) -> Machine:
    """Return the machine of a run; ``asked``: the counts that Slurm is asked for, each with its line."""

    def count(name: str, variable: str) -> tuple[Option, ...]:
        return (Option((name,), *asked[variable]),) if variable in asked else ()

    nodes, gpus = count("nodes", "SLURM_NNODES"), next(iter(count("GPUs", "SLURM_GPUS_ON_NODE")), None)
    rule, together = "asks Slurm for", nodes[0].value if nodes else 1
    visible, line = run.command.variable("CUDA_VISIBLE_DEVICES")
    if re.fullmatch(r"\d+(,\d+)*", shown(visible)):
        gpus = Option(("CUDA_VISIBLE_DEVICES",), len(shown(visible).split(",")), line)
    commands = str(run.command)
    if container is not None:
        nodes, gpus = tuple(replace(each, path=("pods",)) for each in container.pods), container.gpus
        rule, together = "makes", container.group
        commands = " ".join(map(str, container.script.commands))
    if (of_run := _stated(run, _NODES)) is not None:
        together = of_run.value
    elif "--nnodes" in commands or (together == 1 and _RAY.search(commands)):
        together = None
    return Machine(rule, nodes, gpus, together)


def _stated(run: Options, names: tuple[str, ...]) -> Option | None:
    """Return a count as the launcher or the engine is given it, None if it is not a number."""
    found = next((option for option in run.counts if option.key in names), None)
    known = found is not None and isinstance(found.first, str) and re.fullmatch(r"[1-9]\d{0,5}", found.first)
    return replace(found, value=int(found.first)) if found is not None and known else None


def of_counts(run: Options, machine: Machine, checked: Checked | None) -> Iterator[Finding]:
    """Yield a finding if a launcher has another number of nodes than its job, or starts more ranks than GPUs."""
    nodes, ranks, gpus = _stated(run, _NODES), _stated(run, _EACH), machine.gpus
    of_step = {option.first for option in run.flags if option.key in ("-N", "--nodes")}
    of_pod = nodes is not None and nodes.value == 1 and machine.rule == "makes"  # a run in each

    def fix(stated: Option, value: int) -> str | None:
        """Return the fix of a count, if the sizes fit the world that it makes."""
        if checked is not None:
            world = checked.given.get("world_size")
            changed: dict[str, Any] = {"world_size": world * value // stated.value} if world else {}
            if not checked.problem and not checked.fits(changed):
                return None
            checked.given.update(changed)
        return written(stated.path, value, "")

    if nodes is not None and machine.nodes and str(nodes.value) not in of_step and not of_pod:
        each = machine.nodes[-1]
        if all(count.value != nodes.value for count in machine.nodes):
            message = f"{nodes}; line {each.line} {machine.rule} {each.value} {each.key}"
            yield Finding(run.path, nodes.line, "nodes", message, fix(nodes, each.value))
    if gpus is not None and ranks is not None and ranks.value > gpus.value:
        message = f"{ranks}; a node has {gpus.value} GPUs (line {gpus.line})"
        yield Finding(run.path, ranks.line, "gpus", message, fix(ranks, gpus.value))


def of_engine(run: Options, machine: Machine, checked: Checked) -> Iterator[Finding]:
    """Yield a finding where an engine has more ranks than GPUs, or SGLang ranks that its nodes do not share evenly."""
    layout = checked.layout
    sizes, together = _sizes_here(layout, machine.together)
    ranks, size = prod(sizes.values()), max(sizes, key=lambda name: sizes[name], default="")
    line = next((each.line for each in layout.readings if each.argument == size), run.command.line)
    product = " x ".join(f"{name} {count}" for name, count in sizes.items()) + f" = {ranks} ranks"
    nodes, gpus = _stated(run, _NODES), machine.gpus
    if layout.format == "sglang" and nodes is not None and "tp" in sizes and ranks % nodes.value:
        yield Finding(layout.path, nodes.line, "nodes", f"{nodes} does not divide {product} (line {line})")
    elif gpus is not None and together and ranks > gpus.value * together:
        where = f"{together} nodes have {gpus.value} GPUs each" if together > 1 else f"a node has {gpus.value} GPUs"
        value, rest = divmod(gpus.value * together * sizes[size], ranks)
        works = value and not rest and size in checked.given and checked.fits({"world_size": None, size: value})
        fix, edit = (f"{size}={value}", layout.spelled(size, value)) if works else (None, None)
        message = f"{product}, but {where} (line {gpus.line})"
        yield Finding(layout.path, line, "gpus", message, fix, None, edit)


def _sizes_here(layout: Layout, together: int | None) -> tuple[dict[str, int], int | None]:
    """Return the sizes whose product is the ranks of an engine on some nodes, and how many nodes these are.

    vLLM starts its data parallel replicas on the same nodes, unless its options give their number or other nodes.
    """
    sizes = {name: layout.arguments[name] for name in ("tp", "pp", "pcp") if name in layout.arguments}
    names = {option.name: option.first for option in layout.stated}
    local = str(names.get("data_parallel_size_local", ""))
    if layout.format == "vllm" and re.fullmatch(r"[1-9]\d{0,4}", local):
        return {**sizes, "local dp": int(local)}, together and 1
    if layout.format == "vllm" and "dp" in layout.arguments and _ELSEWHERE.isdisjoint(names):
        sizes["dp"] = layout.arguments["dp"]
    return sizes, together
