"""Findings of lint: their codes, one finding as text and as data, and all of a file or of a folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

__all__ = ["CODES", "Finding", "Linted"]

CODES = {
    "sizes": "the sizes do not fit the world size or each other",
    "contradiction": "a size is set twice, to different values",
    "nodes": "the launcher and Slurm, or the manifest of its pods, have different node counts",
    "gpus": "a node has fewer GPUs than ranks",
    "batch": "the batch sizes of DeepSpeed do not multiply out",
    "unset-variable": "a size is a variable that the file does not set",
    "unknown-size": "a setting looks like a parallel size, and is not one",
    "not-a-size": "a parallel size is not a whole number of at least 1",
    "heads": "the tensor parallel size does not divide the attention heads",
    "experts": "the expert parallel size does not divide the experts",
    "layers": "the pipeline parallel size does not divide the layers",
}


@dataclass(frozen=True)
class Finding:
    """A layout that cannot run.

    ``line``    None where no line states it
    ``fix``     the size that would do, as in a SPEC (``tp=4``), or what to write; None where no single one does
    ``layout``  the file's as a SPEC, if it is one; ``edit``: the fix as the file writes it (``-tp 4``)
    """

    file: str
    line: int | None
    code: str
    message: str
    fix: str | None = None
    layout: str | None = None
    edit: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", self.line or None)

    @property
    def text(self) -> str:
        """The message with the fix, in the words of the file."""
        fix = self.edit or self.fix
        return self.message + (f"; fix: {fix}" if fix else "")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.code} {self.text}"

    def to_dict(self) -> dict[str, object]:
        """Return plain data with stable keys."""
        return dict(vars(self))


@dataclass(frozen=True)
class Linted:
    """Findings of one file or of several; ``notes``: why a file is not checked, or only in part.

    ``valid``: for each layout that fits, the lines that show why.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    valid: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def joined(cls, found: Iterable[Linted]) -> Linted:
        """Return the findings, notes and lines of several, in their order."""
        parts = [(each.findings, each.notes, each.valid) for each in found] or [((), (), ())]
        return cls(*(tuple(chain.from_iterable(part)) for part in zip(*parts, strict=True)))
