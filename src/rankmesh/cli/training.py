"""The options of a model and its training, which ``search`` and ``place`` share, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any

import typer

from rankmesh.core.clusters.hardware import DEVICES, Device, device
from rankmesh.core.documents import parse, read_text, refused_as
from rankmesh.core.model import ATTENTION, CONTEXT, PRECISION, RECOMPUTE, SCHEDULE
from rankmesh.errors import PlacementError, quoted, quoted_path
from rankmesh.placement import Training, Transformer
from rankmesh.placement.search import FREE
from rankmesh.readers.model import read_model

__all__ = ["DEVICE_HELP", "MODEL_HELP", "Trained", "TrainingOptions", "speed_of", "trained"]

DEVICE_HELP = f"One of {', '.join(DEVICES)}."
MODEL_HELP = "config.json, a Megatron script, numbers, llama3-8b."
_SUCH_AS = {"batch": 256, "sequence": 4096}


def _count(text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=text)


def _known(words: tuple[str, ...], text: str) -> Any:
    return typer.Option(metavar="WORD", help=f"{text}: {', '.join(words)}.")


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a model and its training, which have the names of the fields of ``Training``; and of its device.

    None is an option that is not given.
    """

    batch: Annotated[int | None, _count("Sequences in one step.")] = None
    sequence: Annotated[int | None, _count("Tokens in a sequence.")] = None
    vocabulary: Annotated[int | None, _count("Rows of the embedding, with its padding.")] = None
    microbatch: Annotated[int | None, _count("Sequences in one pass; default: the best of 1, 2, 4, 8.")] = None
    virtual_stages: Annotated[int | None, _count("Parts of each pipeline stage (interleaved); default: the best.")] = (
        None
    )
    schedule: Annotated[str | None, _known(SCHEDULE, "Pipeline schedule")] = None
    recompute: Annotated[str | None, _known(RECOMPUTE, "Activations to recompute; default: as few as fit")] = None
    sequence_parallel: Annotated[bool | None, typer.Option(help="Where tp is above 1; default: yes.")] = None
    zero: Annotated[
        int | None,
        typer.Option(min=0, max=3, metavar="0-3", help="Sharded: optimizer (1), gradients (2), weights (3, FSDP)."),
    ] = None
    replicate: Annotated[int | None, _count("Copies of the shards (HSDP).")] = None
    precision: Annotated[str | None, _known(PRECISION, "Precision of matrix products")] = None
    attention: Annotated[str | None, _known(ATTENTION, "Attention kernel")] = None
    context: Annotated[str | None, _known(CONTEXT, "Context parallel attention")] = None
    overlap: Annotated[
        str | None, typer.Option(metavar="LIST", help="Overlapped communication, of dp,cp,pp,tp,ep; default: dp,cp,pp.")
    ] = None
    device_name: Annotated[str, typer.Option("--device", metavar="NAME", help=DEVICE_HELP)] = "h100"
    memory: Annotated[
        float | None, typer.Option(min=0.1, metavar="GB", help="Memory of a device; default: its own.")
    ] = None
    speed: Annotated[
        str | None,
        typer.Option(
            metavar="TFLOPS|N%|FILE",
            help="Speed of one device: 400, 40% of its peak, or measure --json; default: modelled.",
        ),
    ] = None


@dataclass(frozen=True)
class Trained:
    """A model, its training and its device as the options have them; ``free``: what may be chosen of the training."""

    model: Transformer
    training: Training
    free: tuple[str, ...]
    device: Device
    speed_from: str


def trained(model: str, options: TrainingOptions) -> Trained:
    """Read a model and the options of its training."""
    fields = dict(vars(options))
    vocabulary, name, memory, speed = (fields.pop(key) for key in ("vocabulary", "device_name", "memory", "speed"))
    if fields["overlap"] is not None:
        fields["overlap"] = tuple(name for name in fields["overlap"].split(",") if name)
    transformer, stated = read_model(model, vocabulary=vocabulary)
    training, free = _training(stated, fields)
    of = device(name)
    flops, speed_from = (None, "") if speed is None else speed_of(speed, of.peak(training.precision))
    of = replace(of, speed=flops, memory=of.memory if memory is None else memory * 1e9)
    return Trained(transformer, training, free, of, speed_from)


def _training(stated: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Training, tuple[str, ...]]:
    """Return the training, whose options win over its file, and the fields that the search may choose."""
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
