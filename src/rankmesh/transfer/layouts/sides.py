"""Sides: frameworks that construct and load a model themselves, each run as every rank in turn.

```
transformers:tp=2,fsdp=4      DistributedConfig: tp, fsdp (FSDP2), dp_replicate, pp, ep
vllm:tp=8                     tp, pp, dp; ep=1: --enable-expert-parallel
sglang:tp=8,dp=2              tp, pp; of tp: dp (attention's), ep
megatron:tp=2,pp=2,ep=2       tp, cp, dp, pp, ep, etp; vpp, first, last: stages; vocab=128: multiple of the vocabulary
```

These are in the package rankmesh-engines. Any package can offer a side: an entry point of the group ``rankmesh.sides``
names a function of a ``config.json`` and of sizes that returns a ``rankmesh_engines.loaders.Side``, or another object
whose ``read()`` returns a `Layout`. An extra of that package with the name of the side lists the packages that the side
needs, which are looked up before anything is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from inspect import signature
from typing import Protocol

from rankmesh.errors import LayoutError, MissingExtra, RankmeshError, quoted
from rankmesh.transfer.layouts.layout import Layout
from rankmesh.transfer.layouts.refusals import missing, not_installed, refusal

__all__ = ["Side", "check_options", "layout", "side", "sizes_of"]

# No size is longer.
_DIGITS = 7


class Side(Protocol):
    """A framework with the sizes of its parallelism and a model."""

    def read(self) -> Layout:
        """Return the framework's sharding of every tensor of the model."""


def side(text: str, config: Mapping[str, object]) -> Side:
    """Return the side that a text such as ``vllm:tp=8`` names, with the model of a ``config.json``."""
    name, _, sizes = text.partition(":")
    offered = entry_points(group="rankmesh.sides")
    if not offered:
        raise MissingExtra(
            f"side {quoted(name)} needs the package 'rankmesh-engines', which is not installed; "
            f"pip install {f'rankmesh-engines[{name}]'!r}",
            name="rankmesh_engines",
            extra=name,
        )
    if name not in offered.names:
        known = ", ".join(sorted(offered.names))
        raise LayoutError(f"unknown side {quoted(name)}; known are {known}, such as vllm:tp=8", side=name)
    given = sizes_of(text)
    if absent := missing(offered[name]):
        raise not_installed(name, absent)
    try:
        make = offered[name].load()
    except ImportError as error:
        raise refusal(f"side {name} cannot be loaded", name, error, side=text) from error
    check_options(text, given, make)
    try:
        found: Side = make(config, **given)
    except RankmeshError:
        raise
    except Exception as error:
        raise refusal(f"{name} refuses {quoted(sizes)} for this model", name, error, side=text) from error
    return found


def layout(text: str, config: Mapping[str, object]) -> Layout:
    """Return a side's sharding of every tensor of a model's checkpoint: ``layout("vllm:tp=8", config)``."""
    return side(text, config).read()


def sizes_of(text: str) -> dict[str, int]:
    """Return the sizes of a text such as ``vllm:tp=8``. Raises ``LayoutError`` for what is none."""
    given: dict[str, int] = {}
    for part in filter(None, text.partition(":")[2].split(",")):
        axis, equals, size = part.partition("=")
        if not equals or not size.isdecimal() or len(size) > _DIGITS:
            raise LayoutError(f"{quoted(part)} of side {quoted(text)} is not a size; write tp=8", side=text)
        if axis in given:
            raise LayoutError(f"side {quoted(text)} has {axis} twice; give it once", side=text)
        given[axis] = int(size)
    return _without_world(text, given)


def _without_world(text: str, given: dict[str, int]) -> dict[str, int]:
    """Replace the world of ``megatron:world=8,tp=2,pp=2``, as in a SPEC, by the data parallel size: ``dp=2``."""
    world = given.pop("world", None) if text.startswith("megatron:") else None
    if world is None:
        return given
    block = given.get("tp", 1) * given.get("cp", 1) * given.get("pp", 1)
    if not block or world % block or given.get("dp", world // block) != world // block:
        shown = " x ".join(f"{name} {given[name]}" for name in ("tp", "cp", "pp", "dp") if name in given)
        raise LayoutError(
            f"world={world} of side {quoted(text)} does not go with {shown}; use a multiple of {block} ranks, or leave "
            "dp out",
            side=text,
        )
    return {**given, "dp": world // block}


def check_options(text: str, given: Mapping[str, int], make: Callable[..., object]) -> None:
    """Raise ``LayoutError`` for a size that the function of a side has no option for."""
    options = list(signature(make).parameters)[1:]
    for axis in given:
        if axis not in options:
            raise LayoutError(
                f"{text.partition(':')[0]} has no option {axis!r}; it has {', '.join(options)}", side=text
            )
