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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def setting(environment: Mapping[str, str], ignored: list[str] | None = None) -> Setting | None:
    """Return the setting of the environment, None if there is none; ``ConnectError`` for a value that cannot be read.

    With ``ignored``, that gets the options that cannot be read, and they keep their defaults.
    """
    text, recorded = environment.get(SWITCH, ""), environment.get("RANKMESH_RECORD", "")
    if not text:
        return Setting(Path(recorded)) if recorded else None
    word, _, listed = text.partition(":")
    options, wrong = dict[str, Any](), list[str]()
    for option in filter(None, listed.split(",")):
        name, _, value = option.partition("=")
        try:
            options[name] = _OPTIONS[name](value)
        except (KeyError, ValueError):
            wrong.append(option)
    if word != "watch" or (wrong and ignored is None):
        raise ConnectError(
            f"{SWITCH}={quoted(text)} cannot be read; set {SWITCH}=watch, or "
            f"{SWITCH}=watch:dir=FOLDER,after=SECONDS,then=log|abort|exit,slow=SECONDS,guard=STEPS",
        )
    if ignored is not None:
        ignored += wrong
    return Setting(Path(options.pop("dir", "") or recorded or f"rankmesh-watch/{_job(environment)}"), **options)


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < 10**9:
        raise ValueError
    return seconds


def _after(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise ValueError
    return seconds


def _then(text: str) -> str:
    if text not in _THEN:
        raise ValueError
    return text


def _steps(text: str) -> int | None:
    if not (text.isdecimal() and len(text) < 10):
        raise ValueError
    return int(text) or None


# What reads the value of each option, and raises ValueError for one that it cannot read.
_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "dir": str,
    "after": _after,
    "then": _then,
    "slow": _seconds,
    "guard": _steps,
}


def _job(environment: Mapping[str, str]) -> str:
    named = (environment.get(name, "") for name in _JOBS)
    return next((name.replace("/", "-") for name in named if name not in ("", "none")), "job")
