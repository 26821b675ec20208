"""The options of a model and its training, which ``search`` and ``place`` share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from math import inf
from typing import Annotated, Any

import typer

from rankmesh.core.documents import parse, read_text, refused_as
from rankmesh.errors import PlacementError, quoted, quoted_path
from rankmesh.placement import Training, Transformer
from rankmesh.placement.devices import DEVICES, Device, device
from rankmesh.placement.model import ATTENTION, CONTEXT, PRECISION, RECOMPUTE, SCHEDULE
from rankmesh.placement.search import FREE
from rankmesh.readers.model import read_model

__all__ = ["MODEL_HELP", "Trained", "speed_of", "trained", "with_training"]

MODEL_HELP = "config.json, a Megatron script, numbers, llama3-8b."
_SUCH_AS = {"batch": 256, "sequence": 4096}


def _count(name: str, text: str) -> Any:
    return Annotated[int | None, typer.Option(name, min=1, metavar="N", help=text)]


def _known(name: str, words: tuple[str, ...], text: str) -> Any:
    return Annotated[str | None, typer.Option(name, metavar="WORD", help=f"{text}: {', '.join(words)}.")]


# The options by the names of the fields of Training, and some of the model and its device.
_OPTIONS: Mapping[str, Any] = {
    "batch": _count("--batch", "Sequences in one step."),
    "sequence": _count("--sequence", "Tokens in a sequence."),
    "vocabulary": _count("--vocabulary", "Rows of the embedding, with its padding."),
    "microbatch": _count("--microbatch", "Sequences in one pass; default: the best of 1, 2, 4, 8."),
    "virtual_stages": _count("--virtual-stages", "Parts of each pipeline stage (interleaved); default: the best."),
    "schedule": _known("--schedule", SCHEDULE, "Pipeline schedule"),
    "recompute": _known("--recompute", RECOMPUTE, "Activations to recompute; default: as few as fit"),
    "sequence_parallel": Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="Where tp is above 1; default: yes."),
    ],
    "zero": Annotated[
        int | None,
        typer.Option(
            "--zero", min=0, max=3, metavar="0-3", help="Sharded: optimizer (1), gradients (2), weights (3, FSDP)."
        ),
    ],
    "replicate": _count("--replicate", "Copies of the shards (HSDP)."),
    "precision": _known("--precision", PRECISION, "Precision of matrix products"),
    "attention": _known("--attention", ATTENTION, "Attention kernel"),
    "context": _known("--context", CONTEXT, "Context parallel attention"),
    "overlap": Annotated[
        str | None,
        typer.Option(
            "--overlap", metavar="LIST", help="Overlapped communication, of dp,cp,pp,tp,ep; default: dp,cp,pp."
        ),
    ],
    "device_name": Annotated[str, typer.Option("--device", metavar="NAME", help=f"One of {', '.join(DEVICES)}.")],
    "memory": Annotated[
        float | None, typer.Option("--memory", min=0.1, metavar="GB", help="Memory of a device; default: its own.")
    ],
    "speed": Annotated[
        str | None,
        typer.Option(
            "--speed",
            metavar="TFLOPS|N%|FILE",
            help="Speed of one device: 400, 40% of its peak, or measure --json; default: modelled.",
        ),
    ],
}
_DEFAULTS = {"device_name": "h100"}


def with_training(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all these options in the place of its parameter ``options``, which gets them as a mapping."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        options = {name: given.pop(name) for name in _OPTIONS}
        command(**given, options=options)

    made: list[Parameter] = []
    plain = signature(command, eval_str=True)
    for parameter in plain.parameters.values():
        if parameter.name != "options":
            made.append(parameter)
            continue
        for name, annotation in _OPTIONS.items():
            default = _DEFAULTS.get(name)
            made.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation))
    with_options.__signature__ = plain.replace(parameters=made)  # type: ignore[attr-defined]  # typer reads it
    return with_options


@dataclass(frozen=True)
class Trained:
    """A model and its training as the options have them; ``free``: the fields of the training that may be chosen."""

    model: Transformer
    training: Training
    free: tuple[str, ...]
    device: Device
    capacity: float | None
    speed: float | None
    speed_from: str


def trained(model: str, options: Mapping[str, Any]) -> Trained:
    """Return what a model and the options that ``with_training`` adds mean; None is an option that is not given."""
    fields = {**options}
    vocabulary, name, memory, speed = (fields.pop(key) for key in ("vocabulary", "device_name", "memory", "speed"))
    if fields["overlap"] is not None:
        fields["overlap"] = tuple(name for name in fields["overlap"].split(",") if name)
    transformer, stated = read_model(model, vocabulary=vocabulary)
    training, free = _training(stated, fields)
    of = device(name)
    flops, speed_from = (None, "") if speed is None else speed_of(speed, of.peak(training.precision))
    return Trained(transformer, training, free, of, None if memory is None else memory * 1e9, flops, speed_from)


def _training(stated: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Training, tuple[str, ...]]:
    """Return how the model is trained, options before its file; and what the search is free to choose."""
    chosen = {**stated, **{name: value for name, value in given.items() if value is not None}}
    missing = [name for name in ("batch", "sequence") if name not in chosen]
    if missing:
        such_as = " ".join(f"--{name} {_SUCH_AS[name]}" for name in missing)
        raise typer.BadParameter(f"no {' and no '.join(missing)} is given; add {such_as}, or yours")
    return Training(**chosen), tuple(name for name in FREE if name not in chosen)


def speed_of(text: str, peak: float) -> tuple[float, str]:
    """Return FLOP/s from TFLOP/s, a share of the peak, or a file of ``measure --json``; and where they are from.

    >>> speed_of("400", 989e12), speed_of("40%", 1000e12)
    ((400000000000000.0, 'as given'), (400000000000000.0, '40% of the peak, as given'))
    """
    share = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return _measured_speed(text), f"the slowest rank's matrix products in {quoted_path(text)}"
    if not 0 < number < inf or (share and number > 100):
        raise typer.BadParameter(
            f"--speed {quoted(text)} is not a speed; give TFLOP/s as 400, or a share of the peak as 40%"
        )
    return (number / 100 * peak, f"{number:g}% of the peak, as given") if share else (number * 1e12, "as given")


def _measured_speed(path: str) -> float:
    form = "write one with rankmesh measure SPEC --json > measured.json, or give TFLOP/s as 400, or a share as 40%"
    with refused_as(PlacementError, f"--speed {quoted_path(path)}", form, path=path):
        data = parse(read_text(path))
        speed = data.get("speed") if isinstance(data, dict) else None
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < inf:
        raise PlacementError(f"--speed {quoted_path(path)} has no speed of a device; {form}", path=path)
    return float(speed)
