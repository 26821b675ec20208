"""The stand-in for a launcher: it notes how it was called, and ends. A program of its own; the standard library alone.

```
standin.py PLACE FILE WORDS...   one JSON file in PLACE/calls: words, environment, folder, what it ran within
srun ... bash -c TEXT            noted, and then TEXT runs here once, as the first task
sbatch job.sh                    noted with the text of the job, which runs afterwards
python -c CODE, python -         not noted: Python itself runs what a script computes with, and tools written in it
```

Where it is mounted over the program that it replaces, PLACE/originals.json says where that is kept.
"""

from __future__ import annotations

import json
import os
import shlex
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
    place, file, *words = sys.argv[1:]
    name = os.path.basename(file)  # noqa: PTH119  - pathlib doubles the time of a stand-in
    if name.startswith("python") and (_computes(words) or _is_tool(Path(place), file, words)):
        return _python(Path(place), file, words)
    job = _job(words) if name == "sbatch" else None
    inner = _inner(words) if name in _STARTS_ANY else []
    number = _noted(Path(place), [name, *words], job, inner)
    if job is not None:
        sys.stdout.write("Submitted batch job 1\n")
    if inner:
        sys.stdout.flush()
        os.environ.update(dict.fromkeys(_STARTS_ANY[name], "0"), RANKMESH_WITHIN=number)
        # A shell between the script and here may have dropped them: their names are none of sh.
        os.environ.update(functions(Path(place, "programs")))
        os.execvp(inner[0], inner)  # noqa: S606  - the script's own text, as its launcher would start it
    return 0


def functions(programs: Path) -> dict[str, str]:
    """Return the variables by which bash has a function for each stand-in, whatever PATH a script or a login sets."""
    names = sorted(os.listdir(programs))  # noqa: PTH208
    return {f"BASH_FUNC_{name}%%": f'() {{ {shlex.quote(str(programs / name))} "$@"; }}' for name in names}


def _computes(words: list[str]) -> bool:
    """Return whether the call is of a text, of standard input, or of the version: no program of a file."""
    first = next((word for word in words if not word.startswith("-") or word in _ENDS), "-")
    return first in _ENDS and first != "-m"


def _is_tool(place: Path, file: str, words: list[str]) -> bool:
    """Return whether a command of this machine is written in Python: its first line names the interpreter."""
    first = next((word for word in words if not word.startswith("-")), "")
    if "/" not in first or first.endswith(".py") or file.startswith(f"{place}/"):
        return False
    folder, _, name = first.rpartition("/")
    return name not in os.listdir(place / "programs") and folder in (  # noqa: PTH208
        *os.environ.get("PATH", "").split(os.pathsep),
        *os.defpath.split(os.pathsep),
    )


def _python(place: Path, file: str, words: list[str]) -> int:
    """Python itself: the program that was asked for, or the one behind the stand-ins in PATH."""
    name, programs = os.path.basename(file), str(place / "programs")  # noqa: PTH119
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != programs]
    found = [file] if not file.startswith(f"{place}/") else [f"{folder}/{name}" for folder in folders]
    originals = json.loads((place / "originals.json").read_text(encoding="utf-8"))
    for program in found:
        if os.access(program, os.X_OK) and Path(program).is_file():
            kept = originals.get(str(Path(program).resolve()), program)
            os.execv(kept, [program, *words])  # noqa: S606  - what the script computes with
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


def _noted(place: Path, words: list[str], job: dict[str, object] | None, inner: list[str]) -> str:
    folder = place / "calls"
    if len(list(folder.iterdir())) >= MOST:
        sys.exit(1)
    number = f"{time.monotonic_ns():020d}-{os.getpid()}"
    call = {
        "words": words,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "within": os.environ.get("RANKMESH_WITHIN", ""),
        "captured": not os.path.samestat(os.fstat(1), os.stat(place / "output")),  # noqa: PTH116
        "job": job,
        "inner": inner,
    }
    unfinished = folder / f".{number}"
    unfinished.write_text(json.dumps(call), encoding="utf-8")
    unfinished.rename(folder / number)
    return number


if __name__ == "__main__":
    sys.exit(main())
