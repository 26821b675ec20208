"""Reading a launcher's variables: numbers that are checked, and the evidence of what was read.

>>> read = Variables({"RANK": "3", "EMPTY": ""})
>>> read.number("RANK", most=7), read.number("EMPTY", 0), read.evidence
(3, 0, {'RANK': '3'})
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankmesh.core.host_names import task_counts
from rankmesh.errors import ClusterError, ConnectError, quoted

__all__ = ["Variables"]

_MOST = 2**31


class Variables:
    """An environment, which of its variables were read until now, and what each was read for (``about``)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.evidence: dict[str, str] = {}
        self.facts: dict[str, list[str]] = {}
        self.about = "launcher"

    def __contains__(self, name: str) -> bool:
        """Return whether the variable is set to something; asking leaves no evidence."""
        return bool(self._environment.get(name, "").strip())

    def holds(self, name: str, text: str) -> bool:
        """Return whether a variable is set to this; asking leaves no evidence."""
        return self._environment.get(name, "").strip() == text

    def text(self, name: str) -> str | None:
        """Return a variable without the spaces around it, None where it is not set, or set to nothing."""
        if name not in self:
            return None
        self.evidence[name] = self._environment[name]
        known = self.facts.setdefault(self.about, [])
        if name not in known:
            known.append(name)
        return self._environment[name].strip()

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
        """Return a whole number; the default where there is none. ``ConnectError`` for anything else."""
        text = self.text(name)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
            received = self._environment.get(name, "")
            raise ConnectError(
                f"{name}={quoted(received.strip())} in the environment is no whole number from {least} to {most}; "
                "start the ranks with torchrun or srun, which set it, or unset it",
                variable=name,
                received=received,
            )
        return int(text)

    def optional(self, name: str, *, least: int = 0, most: int = _MOST) -> int | None:
        """Return a whole number, None where the variable is not set."""
        return self.number(name, least=least, most=most) if name in self else None

    def counts(self, name: str) -> tuple[int, ...] | None:
        """Return the tasks of each host, as Slurm counts them: ``4(x2),2`` is (4, 4, 2)."""
        text = self.text(name)
        try:
            return task_counts(text) if text else None
        except ClusterError as error:
            raise ConnectError(
                f"{name}={quoted(text)} in the environment is no list of tasks per node, which Slurm writes as 4 or "
                "4(x2),2; start the ranks with srun, or unset it",
                variable=name,
                received=text,
            ) from error
