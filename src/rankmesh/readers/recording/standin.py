"""The stand-in for a launcher: it notes how it was called, and ends. A program of its own; the standard library alone.

```
standin.py NAME WORDS...     one JSON file in $RANKMESH_RECORD: words, environment, folder, what it ran within
srun ... bash -c TEXT        noted, and then TEXT runs here once, as the first task
sbatch job.sh                noted with the text of the job, which runs afterwards
python -c CODE, python -     not noted: Python itself runs what a script computes with
```
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MOST = 200
_SHELLS = ("bash", "sh", "zsh", "dash")
_ENDS = ("-", "-c", "-m", "-V", "--version")
# Launchers that start any command, and what tells the first task that it is the first.
_STARTS_ANY = {
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK",),
    "ray": (),
    "uv": (),
}


def main() -> int:
    """Note the call; the exit status of a launcher that did its work."""
    name, *words = sys.argv[1:]
    if name.startswith("python") and _computes(words):
        return _python(name, words)
    job = _job(words) if name == "sbatch" else None
    number = _noted([name, *words], job)
    if job is not None:
        sys.stdout.write("Submitted batch job 1\n")
    inner = _inner(words) if name in _STARTS_ANY else []
    if inner:
        sys.stdout.flush()
        os.environ.update(dict.fromkeys(_STARTS_ANY[name], "0"), RANKMESH_WITHIN=number)
        os.execvp(inner[0], inner)  # noqa: S606  - the script's own text, as its launcher would start it
    return 0


def _computes(words: list[str]) -> bool:
    """Return whether the call is of a text, of standard input, or of the version: no program of a file."""
    first = next((word for word in words if not word.startswith("-") or word in _ENDS), "-")
    return first in _ENDS and first != "-m"


def _python(name: str, words: list[str]) -> int:
    """Python itself, found behind the stand-ins."""
    here = os.environ["RANKMESH_STANDINS"]
    behind = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != here]
    for program in (Path(folder) / name for folder in behind):
        if os.access(program, os.X_OK) and program.is_file():
            os.execv(program, [name, *words])  # noqa: S606  - what the script computes with
    sys.stderr.write(f"{name}: command not found\n")
    return 127


def _job(words: list[str]) -> dict[str, object]:
    """Return the batch script that is submitted: a file, ``--wrap``, or standard input."""
    for number, word in enumerate(words):
        if word.startswith("--wrap"):
            text = word.partition("=")[2] or "".join(words[number + 1 : number + 2])
            return {"text": f"#!/bin/sh\n{text}\n", "arguments": [], "options": words[:number]}
        if Path(word).is_file():
            text = Path(word).read_text(encoding="utf-8", errors="replace")
            return {"text": text, "arguments": words[number + 1 :], "options": words[:number]}
    return {"text": sys.stdin.read(1 << 20), "arguments": [], "options": words}


def _inner(words: list[str]) -> list[str]:
    """Return the shell or shell script that a launcher would start, with its words."""
    for number, word in enumerate(words):
        if word.rpartition("/")[2] in _SHELLS:
            return words[number:]
        if word.endswith(".sh") and Path(word).is_file():
            return ["bash", *words[number:]]
    return []


def _noted(words: list[str], job: dict[str, object] | None) -> str:
    folder = Path(os.environ["RANKMESH_RECORD"])
    if len(list(folder.iterdir())) >= MOST:
        sys.exit(1)
    found = os.fstat(1)
    number = f"{time.monotonic_ns():020d}-{os.getpid()}"
    call = {
        "words": words,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "within": os.environ.get("RANKMESH_WITHIN", ""),
        "captured": f"{found.st_dev}:{found.st_ino}" != os.environ.get("RANKMESH_OUTPUT", ""),
        "job": job,
    }
    unfinished = folder / f".{number}"
    unfinished.write_text(json.dumps(call), encoding="utf-8")
    unfinished.rename(folder / number)
    return number


if __name__ == "__main__":
    sys.exit(main())
