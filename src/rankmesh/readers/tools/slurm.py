r"""The ``#SBATCH`` lines of a job: the counts that Slurm gives to the job as variables.

>>> counts("#SBATCH -N 2 --ntasks-per-node=4\n")["SLURM_NTASKS"]
(8, 1)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankmesh.launch.table import SBATCH

__all__ = ["counts", "job_variables"]

_OPTION = re.compile(r"\s(-\w(?=[\s=\d])|--[\w-]+(?=[\s=]))[=\s]?\s*([^\s-]\S*)")
_COUNT = re.compile(r"(?:.*:)?(\d+)")
_GPUS = re.compile(r"gpu[^,]*$")
_SHORT = {"-N": "--nodes", "-n": "--ntasks"}
# Of the batch script itself, which is on the first node.
_FIRST = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def counts(text: str) -> dict[str, tuple[int, int]]:
    """Return each variable with its value and the line that gives it; the last of two lines counts."""
    found: dict[str, tuple[int, int]] = {}
    for name, value, line in _directives(text):
        count = _COUNT.fullmatch(value) if name != "--gres" or _GPUS.match(value) else None
        for variable in SBATCH.get(_SHORT.get(name, name), ()) if count is not None else ():
            found[variable] = (int(count[1]) if count else 0, line)
    nodes, each = found.get("SLURM_NNODES"), found.get("SLURM_NTASKS_PER_NODE")
    if nodes is not None and each is not None:
        found.setdefault("SLURM_NTASKS", (nodes[0] * each[0], nodes[1]))
    return found


def job_variables(text: str) -> dict[str, str]:
    """Return the variables of a job's environment, none for a script without ``#SBATCH`` lines."""
    found = counts(text)
    return {**_FIRST, **{name: str(value) for name, (value, _) in found.items()}} if "#SBATCH" in text else {}


def _directives(text: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(text.splitlines() if "#SBATCH" in text else (), 1):
        if line.startswith("#SBATCH"):
            for found in _OPTION.finditer(line):
                yield found[1], found[2], number
