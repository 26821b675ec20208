"""Runs of the program that is compared: on one process, under each layout, and with repairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from rankmesh.errors import UnknownAxis, UnknownGroup
from rankmesh.runtime.live import LiveGroups
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.noise import PermutedReductions, Scale
from rankmesh.sim.comparison.session import Reference, Session, Stopped
from rankmesh.sim.comparison.stacks import forward_passes_recorded
from rankmesh.sim.failures import RanksFailed
from rankmesh.sim.run import quiet_torch, run

__all__ = ["Runner"]

Program = Callable[[LiveGroups], object]


@dataclass
class Runner:
    """Runs one program; ``dtype`` is the default dtype of torch in it, ``options`` go to ``sim.run``."""

    program: Program
    reference: Layout
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, session: Session, *, permuted: bool = False) -> None:
        """Run the program in a session; ``RanksFailed`` names the layout under which ranks failed."""

        def program(groups: LiveGroups) -> None:
            with PermutedReductions() if permuted else nullcontext():  # type: ignore[no-untyped-call]  # its base is
                self.program(groups)

        try:
            with self._settings(), forward_passes_recorded() if session.looks_at_lines else nullcontext():
                run(program, session.layout.plan, observer=session, **self.options)
        except RanksFailed as failed:
            if not any(isinstance(error, Stopped) for error in failed.failures.values()):
                failed.message = f"under {session.layout.name}: {failed.message}{_unnamed(failed, session.layout)}"
            raise
        session.finish()

    def tried(self, session: Session) -> str:
        """Run with a repair: ``"ended"``, ``"stopped"`` because a value still differs, or ``"failed"``."""
        try:
            self.run(session)
        except RanksFailed as failed:
            for error in failed.failures.values():
                error.__traceback__ = None  # whose frames keep the ranks' tensors, in a cycle
            return "stopped" if any(isinstance(error, Stopped) for error in failed.failures.values()) else "failed"
        return "ended"

    def reference_values(self, tolerance: float) -> Reference:
        """Return the values that the program sees on one process, twice: once with its sums in another order."""
        first = Session(self.reference, None)
        self.run(first)
        second = Session(self.reference, None)
        self.run(second, permuted=True)
        scales = {key: Scale.of(value, second.values.get(key)) for key, value in first.values.items()}
        return Reference(first.values, scales, tolerance)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with quiet_torch():
                yield
        finally:
            torch.set_default_dtype(before)


def _unnamed(failed: RanksFailed, layout: Layout) -> str:
    """Return a hint for an axis that the program uses and no layout has; empty if that is not the error."""
    bare = all(set(kind.split("_")) <= set(layout.mesh.axes) for kind in layout.plan.kinds)  # no recipe's
    for error in failed.failures.values():
        if isinstance(error, UnknownAxis | UnknownGroup) and bare and str(error.name).isalnum():
            return f"\n  an axis that no layout of the comparison names has to be in one of them: {error.name}=1"
    return ""
