"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .loop import Step


def draw(path: Path, steps: Sequence[Step], title: str) -> None:
    """Write the losses of the steps, in nats a byte, as a PNG."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step.index for step in steps], [step.loss for step in steps], color="#2a6f97")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=100)
