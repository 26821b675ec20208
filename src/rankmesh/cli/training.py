"""The options of a model and its training, which ``search`` and ``place`` share, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

__all__ = [
    "MODEL_HELP",
    "Attention",
    "Batch",
    "Context",
    "DeviceName",
    "Memory",
    "Microbatch",
    "Overlap",
    "Precision",
    "Recompute",
    "Replicate",
    "Schedule",
    "Sequence",
    "SequenceParallel",
    "Speed",
    "Trained",
    "VirtualStages",
    "Vocabulary",
    "Zero",
    "speed_of",
    "trained",
]

_SUCH_AS = {"batch": 256, "sequence": 4096}


def _count(name: str, text: str) -> Any:
    return typer.Option(name, min=1, metavar="N", help=text)


def _known(name: str, words: tuple[str, ...], text: str) -> Any:
    return typer.Option(name, metavar="WORD", help=f"{text}: {', '.join(words)}.")


Batch = Annotated[int | None, _count("--batch", "Sequences of one step.")]
Sequence = Annotated[int | None, _count("--sequence", "Tokens of a sequence.")]
Vocabulary = Annotated[int | None, _count("--vocabulary", "Rows of the embedding, with its padding.")]
Microbatch = Annotated[int | None, _count("--microbatch", "Sequences of one pass; without, the best of 1, 2, 4, 8.")]
VirtualStages = Annotated[
    int | None, _count("--virtual-stages", "Parts of each pipeline stage (interleaved); without, the best.")
]
Schedule = Annotated[str | None, _known("--schedule", SCHEDULE, "Of the pipeline")]
Recompute = Annotated[
    str | None, _known("--recompute", RECOMPUTE, "Activations computed again; without, as few as fit")
]
SequenceParallel = Annotated[
    bool | None,
    typer.Option("--sequence-parallel/--no-sequence-parallel", help="Where tp is above 1; without, yes."),
]
Zero = Annotated[
    int | None,
    typer.Option(
        "--zero", min=0, max=3, metavar="0-3", help="Sharded: optimizer (1), gradients (2), weights (3, FSDP)."
    ),
]
Replicate = Annotated[int | None, _count("--replicate", "Copies of the shards (HSDP).")]
Precision = Annotated[str | None, _known("--precision", PRECISION, "Of matrix products")]
Attention = Annotated[str | None, _known("--attention", ATTENTION, "Kernel of attention")]
Context = Annotated[str | None, _known("--context", CONTEXT, "Context parallel attention")]
Overlap = Annotated[
    str | None,
    typer.Option("--overlap", metavar="LIST", help="Communication that hides: of dp,cp,pp,tp,ep; without, dp,cp,pp."),
]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help=f"One of {', '.join(DEVICES)}.")]
Memory = Annotated[
    float | None, typer.Option("--memory", min=0.1, metavar="GB", help="Of one device; without, the device's.")
]
Speed = Annotated[
    str | None,
    typer.Option(
        "--speed",
        metavar="TFLOPS|N%|FILE",
        help="Of one device: 400, 40% of its peak, or measure --json; without, modelled.",
    ),
]
MODEL_HELP = "config.json, a Megatron script, numbers, llama3-8b."


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


def trained(
    model: str,
    *,
    vocabulary: int | None,
    device_name: str,
    memory: float | None,
    speed: str | None,
    overlap: str | None,
    **fields: Any,
) -> Trained:
    """Return what the options of a model mean; ``fields`` are those of ``Training``, None where not given."""
    transformer, stated = read_model(model, vocabulary=vocabulary)
    names = None if overlap is None else tuple(name for name in overlap.split(",") if name)
    training, free = _training(stated, {**fields, "overlap": names})
    of = device(device_name)
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
            f"--speed {quoted(text)} is no speed; give TFLOP/s as 400, or a share of the peak as 40%"
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
