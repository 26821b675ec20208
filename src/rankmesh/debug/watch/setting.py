"""The switch: ``RANKMESH=watch`` in the environment of a job that was not written for rankmesh.

```
RANKMESH=watch                                          look, and log the diagnosis; recordings in rankmesh-watch/JOB
RANKMESH=watch:dir=/shared/hangs,after=120,then=exit    another folder; calls may take 120 s; then end the process
RANKMESH=watch:slow=300                                 at most a line every 300 s on what makes the job slow; 0: none
RANKMESH=watch:guard=100                                compare replicas of what is trained every 100 steps, too
```

>>> setting({"RANKMESH": "watch:after=120,then=abort", "SLURM_JOB_ID": "71"})
Setting(folder=PosixPath('rankmesh-watch/71'), after=120.0, then='abort', slow=60.0, guard=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankmesh.errors import ConnectError, quoted

__all__ = ["SWITCH", "Setting", "setting"]

SWITCH = "RANKMESH"
_THEN = ("log", "abort", "exit")
# What launchers name a job by, which is the same on all its ranks; torchrun says "none" where nobody gave a name.
_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID", "PBS_JOBID", "LSB_JOBID", "MASTER_PORT")


@dataclass(frozen=True)
class Setting:
    """The options of the variable: where recordings go, seconds that a call may take (None: half of its timeout).

    ``then`` is what happens after a diagnosis of a hang, or a difference: log, abort (blocked calls return with an
    error), or exit. ``slow`` is how many seconds lie between two lines on what makes the job slow, 0 for none.
    ``guard``: optimizer steps between two comparisons of replicas, None for no comparison.
    """

    folder: Path
    after: float | None = None
    then: str = "log"
    slow: float = 60.0
    guard: int | None = None


def setting(environment: Mapping[str, str]) -> Setting | None:
    """Return what the environment asks for, None for nothing; ``ConnectError`` for a value that cannot be read."""
    text, recorded = environment.get(SWITCH, ""), environment.get("RANKMESH_RECORD", "")
    if not text:
        return Setting(Path(recorded)) if recorded else None
    word, _, listed = text.partition(":")
    options = dict(part.partition("=")[::2] for part in filter(None, listed.split(",")))
    folder = options.pop("dir", "") or recorded or f"rankmesh-watch/{_job(environment)}"
    after, then, pause = options.pop("after", ""), options.pop("then", "log"), options.pop("slow", "60")
    guard = options.pop("guard", "0")
    seconds, slow = _seconds(after) if after else None, _seconds(pause)
    invalid = seconds == 0 or (slow == 0 and pause.strip("0.") != "") or not (guard.isdecimal() and len(guard) < 10)
    if word != "watch" or options or then not in _THEN or invalid:
        raise ConnectError(
            f"{SWITCH}={quoted(text)} cannot be read; set {SWITCH}=watch, or "
            f"{SWITCH}=watch:dir=FOLDER,after=SECONDS,then=log|abort|exit,slow=SECONDS,guard=STEPS",
        )
    return Setting(Path(folder), seconds, then, slow, int(guard) or None)


def _seconds(text: str) -> float:
    """Return a number of seconds, 0 for anything else."""
    try:
        return max(float(text), 0.0) if float(text) < 10**9 else 0.0
    except ValueError:
        return 0.0


def _job(environment: Mapping[str, str]) -> str:
    named = (environment.get(name, "") for name in _JOBS)
    return next((name.replace("/", "-") for name in named if name not in ("", "none")), "job")
