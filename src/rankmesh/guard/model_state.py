"""The state of a model and its optimizer as tensors and shardings, the same on every rank.

```
a DTensor            its placements, on the axes of the plan that its DeviceMesh has
a plain parameter    a copy on every rank along the axes that it is replicated over, another tensor elsewhere
optimizer state      as its parameter; what is not a shard of it, such as Adam's step, is a copy
```

A program may replace a buffer, and ``load_state_dict`` replaces the state of an optimizer: both are looked up whenever
they are read. A parameter stays the same object.

A rank knows its own stage only, so all ranks exchange what they have: one of those that have the same gives it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor

from rankmesh.core.grouped import grouped
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, quoted
from rankmesh.guard.everyone import gathered, results
from rankmesh.runtime.live import LiveGroups

__all__ = ["CurrentTensors", "later_state", "model_state", "unreplicated_axes"]

# How one tensor is sharded: axes by dimension, the whole shape, dtype, the view that has these axes, and whether each
# rank has values of its own.
_Described = tuple[tuple[str | None, ...], tuple[int, ...], str, str | None, bool]
_Read = Callable[[], Tensor]
_LOCAL_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)


class CurrentTensors(Mapping[str, Tensor]):
    """Tensors by name, each looked up whenever it is read.

    ``local`` names those whose values differ between replicas, ``states`` those that an optimizer keeps.

    >>> buffers = {"mean": torch.zeros(1)}
    >>> current = CurrentTensors({"mean": lambda: buffers["mean"]})
    >>> buffers["mean"] = torch.ones(1)
    >>> current["mean"]
    tensor([1.])
    """

    def __init__(
        self, read: Mapping[str, Callable[[], Tensor]], local: Collection[str] = (), states: Collection[str] = ()
    ) -> None:
        self._read, self.local, self.states = read, local, states

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def model_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    groups: LiveGroups,
    replicated: str | None = None,
) -> tuple[CurrentTensors, dict[str, Sharding]]:
    """Return the parameters and persistent buffers of a model, and the state of its optimizer, with their shardings.

    State that an optimizer makes at its first step is made now. Plain tensors are replicated over the axes
    ``replicated`` (``"dp-cp"``), None: over all; along the others each is a tensor of its own. Every rank calls it.
    Raises ``PlanError`` for DTensors on other ranks than the plan's axes have, and for a tensor that ranks describe
    differently.
    """
    plan, rank = groups.plan, groups.rank
    place = plan.mesh.coordinate(rank)
    suffix = "".join(f"@{axis}{place[axis]}" for axis in _unreplicated(plan.mesh, replicated))
    tensors: dict[str, _Read] = {}
    described: dict[str, _Described] = {}
    local = _statistics(model)

    def describe() -> str:
        for name, read, is_shard in _tensors(model, optimizer):
            tensor = read()
            is_dtensor = hasattr(tensor, "placements")
            full = name if is_dtensor or not is_shard else name + suffix
            tensors[full] = read
            whole = (None,) * tensor.dim(), tuple(tensor.shape), str(tensor.dtype), None, name in local
            described[full] = _of_dtensor(plan, rank, name, tensor) if is_dtensor else whole
        return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    shardings, found = _merged(groups, described, results(groups, describe, "Guard.of()"))
    states = {name for name, read in tensors.items() if isinstance(read, partial) and read.func is _state_of}
    return CurrentTensors(tensors, found, states), shardings


def later_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[[], list[str]]:
    """Return a function that names the parameters which have optimizer state now, but have none when this is called."""
    if optimizer is None:
        return list
    names = {parameter: name for name, parameter in model.named_parameters()}
    without = [one for group in optimizer.param_groups for one in group["params"] if not optimizer.state.get(one)]
    return lambda: [names[one] for one in without if optimizer.state.get(one)]


def unreplicated_axes(shardings: Mapping[str, Sharding], mesh: Mesh, replicated: str | None) -> dict[str, int]:
    """Return the axes, with sizes, along which plain tensors of ``model_state`` are tensors of their own, if there are.

    >>> mesh = Mesh(tp=2, dp=2)
    >>> unreplicated_axes({"w@tp1": Sharding(mesh, shape=(4,), at={"tp": 1})}, mesh, "dp")
    {'tp': 2}
    >>> unreplicated_axes({"w": Sharding(mesh, ("tp",), shape=(4,))}, mesh, "dp")
    {}
    """
    axes = _unreplicated(mesh, replicated)

    def is_plain(name: str, at: Mapping[str, Any]) -> bool:
        return axes.keys() <= at.keys() and name.endswith("".join(f"@{axis}{at[axis][0]}" for axis in axes))

    return axes if axes and any(is_plain(name, one.at or {}) for name, one in shardings.items()) else {}


def _unreplicated(mesh: Mesh, replicated: str | None) -> dict[str, int]:
    shared = mesh.axes if replicated is None else mesh.axis_pairs(replicated) if replicated else {}
    return {axis: size for axis, size in mesh.axes.items() if size > 1 and axis not in shared}


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, _Read, bool]]:
    """Yield each tensor's name, a function that reads it, and whether it may differ along axes without replicas.

    FSDP2 replaces a module's parameter by a gathered one for some time, so a parameter is not looked up in its module.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    yield from ((name, partial(_itself, parameter), True) for parameter, name in names.items())
    kept = model.state_dict(keep_vars=True)
    owners = {one: (module, key) for module in model.modules() for key, one in module.named_buffers(recurse=False)}
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, partial(getattr, *owners[buffer]), True
    if optimizer is None:
        return
    _make_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise PlanError("the optimizer has a parameter that the model does not have; give the whole model")
            for key, value in sorted(optimizer.state[parameter].items()):
                if not isinstance(value, Tensor):
                    raise PlanError(
                        f"the optimizer keeps {key!r} of {names[parameter]!r} as {type(value).__name__}, no tensor; "
                        "give tensors and shardings instead of the optimizer",
                        name=names[parameter],
                    )
                of = partial(_state_of, optimizer, parameter, names[parameter], key)
                yield f"{names[parameter]}.{key}", of, not hasattr(parameter, "placements")


def _statistics(model: torch.nn.Module) -> set[str]:
    """Return the names of the buffers in which norms keep what they have seen on this rank alone."""
    local = [name for name, one in model.named_modules() if isinstance(one, _LOCAL_NORMS)]
    return {f"{name}.{key}".removeprefix(".") for name in local for key in ("running_mean", "running_var")}


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, key: str) -> Tensor:
    value = optimizer.state.get(parameter, {}).get(key)
    if not isinstance(value, Tensor):
        raise PlanError(
            f"the optimizer no longer keeps {key!r} of {name!r}: the state that was loaded into it does not have it; "
            "load a state that was saved after the first step",
            name=name,
        )
    return value


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer that has not done a step make its state, as it is before the first one.

    Raises ``PlanError`` for an optimizer whose first step no such state gives.
    """
    if any(optimizer.state.values()):
        return
    _check_first_step(optimizer)
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    gradients = [one.grad for one in parameters]
    kept = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:  # a step that changes no parameter, of gradients that are zero
        group.update({name: 0.0 for name in ("lr", "weight_decay") if name in group})
    for one in parameters:
        one.grad = torch.zeros_like(one)
    try:
        # Neither the hooks of the optimizer, nor a scheduler that counts its steps.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.update(before)
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (first := _first_value(optimizer, group, key)) is not None:
                    value.fill_(first)


def _check_first_step(optimizer: torch.optim.Optimizer) -> None:
    fix = "give tensors and shardings instead of the optimizer"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PlanError(f"LBFGS keeps numbers and lists, not only tensors; {fix}")
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]:
            raise PlanError(
                f"SGD with dampening={group['dampening']} does not dampen its first step, so no momentum stands for "
                f"the state before it; give dampening=0, or {fix}"
            )


def _first_value(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], key: str) -> float | None:
    """Return the number that every element of a state is before the first step, if a step with zeros changes it."""
    if key == "step":
        return 0.0
    if key == "mu_product" and isinstance(optimizer, torch.optim.NAdam):
        return 1.0
    if key in {"eta", "step_size"} and isinstance(optimizer, torch.optim.ASGD | torch.optim.Rprop):
        return float(group["lr"])
    return None


def _of_dtensor(plan: Plan, rank: int, name: str, tensor: Any) -> _Described:
    """Return the cuts of a DTensor by axes of the plan: those along which its DeviceMesh has the same ranks."""
    from rankmesh.backend.dtensors import cut_of  # loads DTensor, a third of torch's time

    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    along = {}
    for number, dim in enumerate(mesh.mesh_dim_names):
        row = mesh.mesh[tuple(slice(None) if other == number else at for other, at in enumerate(place))]
        along[dim] = row.tolist()
    for view in (None, *plan.mesh.views):
        axes = {dim: _axes_along(plan, view, rank, ranks) for dim, ranks in along.items()}
        if None not in axes.values():
            cut = ("-".join(axes[dim] or "" for dim in (one or "").split("-") if one) for one in cut_of(tensor))
            return tuple(axes or None for axes in cut), tuple(tensor.shape), str(tensor.dtype), view, False
    raise PlanError(
        f"{quoted(name)} is a DTensor whose DeviceMesh has ranks {quoted(along)}; the plan has no axes with these "
        "ranks; make it with groups.device_mesh()",
        name=name,
    )


def _axes_along(plan: Plan, view: str | None, rank: int, ranks: Sequence[int]) -> str | None:
    """Return the axes, outermost first, whose group of a rank has these ranks: "" for one rank, None for no axes."""
    viewed = plan.mesh.view(view)
    kinds = [(axis,) for axis in viewed.axes] + [spec.axes for spec in plan.specs if spec.view == view]
    for axes in kinds if len(ranks) > 1 else ():
        if [*plan.mesh.groups(axes, view=view).of(rank)] == [*ranks]:
            return "-".join(axis for axis in reversed(viewed.axes) if axis in axes)
    return "" if len(ranks) == 1 else None


def _merged(
    groups: LiveGroups, mine: Mapping[str, _Described], digests: Mapping[int, str]
) -> tuple[dict[str, Sharding], set[str]]:
    """Return the shardings of all tensors of the job, in the order of their names, and which are of each rank.

    ``digests`` of what each rank describes are equal on ranks that have the same tensors.
    """
    plan = groups.plan
    same = grouped((digest, rank) for rank, digest in digests.items())  # the ranks that have the same tensors
    is_first = any(ranks[0] == groups.rank for ranks in same.values())
    documents = gathered(groups, mine if is_first else None, "Guard.of()")
    holders: dict[str, list[int]] = {}
    found: dict[str, list[Any]] = {}
    for first, document in documents.items():
        for name, one in document.items():
            if found.setdefault(name, one) != one:
                raise PlanError(
                    f"{quoted(name)} is {one} on rank {first}, and {found[name]} on rank {holders[name][0]}; give the "
                    "axes that plain parameters are replicated over, such as replicated='dp'",
                    name=name,
                )
            holders.setdefault(name, []).append(first)
    places: dict[tuple[object, ...], dict[str, tuple[int, ...]] | None] = {}
    shardings = {}
    for name in sorted(found):
        cut, shape, dtype, view, _ = found[name]
        having = (view, *holders[name])
        if having not in places:
            there = [rank for ranks in same.values() if ranks[0] in holders[name] for rank in ranks]
            places[having] = _at(plan.mesh.view(view), there)
        if (at := places[having]) is None:
            raise PlanError(
                f"the ranks that have {quoted(name)} do not form a block of {plan.mesh}; give tensors and shardings "
                "instead of the model",
                name=name,
            )
        shardings[name] = Sharding(plan.mesh, tuple(cut), tuple(shape), dtype, at=at or None, view=view)
    return shardings, {name for name, (*_, is_local) in found.items() if is_local}


def _at(mesh: Mesh, ranks: Sequence[int]) -> dict[str, tuple[int, ...]] | None:
    """Return the positions of these ranks by axes on which they do not have all; None if they are not a block."""
    places = [mesh.coordinate(rank) for rank in ranks]
    present = {axis: sorted({place[axis] for place in places}) for axis in mesh.axes}
    if prod(map(len, present.values())) != len(ranks):
        return None
    return {axis: tuple(found) for axis, found in present.items() if len(found) < mesh.axes[axis]}
