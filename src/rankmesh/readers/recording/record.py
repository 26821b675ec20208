"""Run a launch script as bash does, with stand-ins for its launchers, and note what it would start.

```
STAND_INS   note their words and end. In a sandbox they are mounted over the programs that they replace, so that a login
            shell, a script that sets PATH and an absolute path find them; without one they are first in PATH, and
            exported as bash functions
the rest    runs: commands of the script are real, and the answers of this machine (nproc, hostname) are this machine's
sandbox     namespaces of our own, or bubblewrap: no network, no socket or device of the host; what is written goes to
            memory, or is refused
the end     a limit of seconds and of bytes written; every process that the script started is killed
```
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rankmesh.core.documents import read_text, refused_as
from rankmesh.errors import PlanError, cut, quoted, quoted_path
from rankmesh.readers.recording import sandbox as sandbox_program
from rankmesh.readers.recording import standin as standin_program
from rankmesh.readers.tools.slurm import job_variables

__all__ = ["SANDBOXES", "SECONDS", "STAND_INS", "Launch", "Recording", "chosen_sandbox", "record", "sandbox_kind"]

SANDBOXES = ("namespaces", "bubblewrap", "none")

STAND_INS = (
    "torchrun", "srun", "mpirun", "mpiexec", "deepspeed", "accelerate", "python", "python3",
    *(f"python3.{minor}" for minor in range(8, 16)), "msrun", "ray", "uv", "sbatch", "megatron", "swift", "axolotl",
    "llamafactory-cli", "vllm", "sglang", "colossalai",
)  # fmt: skip
# Where shells look for programs, whatever this process's PATH is.
_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
SECONDS = 30.0
_GRACE, _WRITTEN, _JOBS = 1.0, 16 << 20, 20
# What bash prints of a line that failed: it is a note, since a size may come from that line.
_FAILED = re.compile(r"^\S+: line (\d+): (.+)$", re.MULTILINE)
_NOTES = 20


@dataclass(frozen=True)
class Launch:
    """One call of a stand-in: the words of the launchers around it, its words, and its environment.

    ``captured``: the script took its output. ``idle``: it started a shell, which started none.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    captured: bool = False
    idle: bool = False

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Recording:
    """The launches of one script in their order, and what bash said of lines that failed.

    ``status`` is the exit status, None where the script was stopped at its limit of time.
    """

    launches: tuple[Launch, ...]
    failed: tuple[tuple[int, str], ...]
    status: int | None
    error: str


def sandbox_kind() -> str:
    """Return the strongest sandbox that this machine allows: ``namespaces``, ``bubblewrap`` or ``none``."""
    return next(filter(_works, SANDBOXES))


@cache
def _works(kind: str) -> bool:
    if kind == "none":
        return True
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    with _workplace(kind) as place, suppress(OSError, subprocess.SubprocessError):
        command = _confined(["true"], kind, place, [])
        return subprocess.run(command, cwd=place, capture_output=True, timeout=10, check=False).returncode == 0  # noqa: S603
    return False


def chosen_sandbox(name: str | None) -> str:
    """Return the sandbox of this name, or the strongest. Raises ``PlanError`` where this machine does not allow it."""
    if name is not None and name not in SANDBOXES:
        raise PlanError(f"sandbox {quoted(name)} is not known; choose {', '.join(SANDBOXES)}", received=name)
    best = sandbox_kind()
    if name is None and best == "none":
        raise PlanError("this machine allows no sandbox, so the script would run for real; name sandbox none to run it")
    if name is not None and not _works(name):
        raise PlanError(f"this machine does not allow the sandbox {name}; choose {best}", received=name)
    return name or best


def record(
    path: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    kind: str = "none",
    seconds: float = SECONDS,
) -> Recording:
    """Run a script with these arguments and variables, and the jobs that it submits after it.

    Raises ``PlanError`` where the script cannot be run.
    """
    if shutil.which("bash") is None:
        raise PlanError("this machine has no bash, which runs the script; give the layout in another form")
    text = _text(path)
    until = time.monotonic() + seconds
    with _workplace(kind) as place:
        recorder = _Recorder(place, kind, until, str(path.resolve().parent))
        environment = {**os.environ, **job_variables(text), **(variables or {})}
        recorder.run([str(path), *arguments], environment, str(Path.cwd()))
        recorder.run_jobs()
        return recorder.recording()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"the script {quoted_path(path)} cannot be read: {error.strerror}; give its path") from error


@contextmanager
def _workplace(kind: str) -> Iterator[Path]:
    """Make a folder with the stand-ins, and delete it when the recording has been read."""
    place = Path(tempfile.mkdtemp(prefix="rankmesh-"))
    try:
        for name in ("calls", "programs", "jobs", "tmp", "originals"):
            (place / name).mkdir()
        replaced = () if kind == "none" else enumerate(_replaced())
        originals = {file: place / "originals" / str(number) / Path(file).name for number, file in replaced}
        for kept in originals.values():
            kept.parent.mkdir()
            kept.touch()
        (place / "originals.json").write_text(json.dumps({file: str(kept) for file, kept in originals.items()}))
        python = originals.get(str(Path(sys.executable).resolve()), Path(sys.executable))
        words = shlex.join([sys.executable, str(python), "-I", "-S", standin_program.__file__, str(place)])
        program = place / "standin"
        # Bash alone gives a program another name, by which Python finds its own files; -p: without the user's settings.
        program.write_text(f'#!{shutil.which("bash")} -p\nexec -a {words} "$0" "$@"\n', encoding="utf-8")
        program.chmod(0o700)
        for name in STAND_INS:
            (place / "programs" / name).symlink_to(program)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _replaced() -> list[str]:
    """Return the files of this machine that stand-ins replace."""
    given = (folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder.startswith("/"))
    folders = dict.fromkeys((*given, *_FOLDERS, f"{sys.prefix}/bin", f"{sys.base_prefix}/bin"))
    named = (Path(folder, name) for folder in folders for name in STAND_INS)
    return list(dict.fromkeys(str(file.resolve()) for file in named if file.is_file()))


def _confined(command: Sequence[str], kind: str, place: Path, writable: Sequence[str]) -> list[str]:
    """Return a command inside the sandbox of this kind."""
    visible = _visible()
    program = [sys.executable, "-I", "-S", sandbox_program.__file__, kind, str(place), str(_GRACE), str(_WRITTEN)]
    words = [*program, *writable, "--", *visible, "--", *command]
    if kind != "bubblewrap":
        return words
    options = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--remount-ro", "/proc"]
    for hidden in (path for path in sandbox_program.HIDDEN if Path(path).is_dir() and not Path(path).is_symlink()):
        inside = [path for path in (*writable, *visible) if f"{path}/".startswith(f"{hidden}/") and Path(path).is_dir()]
        tmpfs = [] if hidden in inside else ["--tmpfs", hidden]
        options += [*tmpfs, *(word for path in sorted(inside, key=len) for word in ("--ro-bind", path, path))]
    options += ["--bind", str(place), str(place)]
    kept: dict[str, str] = json.loads((place / "originals.json").read_text(encoding="utf-8"))
    python = kept.get(str(Path(sys.executable).resolve()), sys.executable)
    words = ["bash", "-p", "-c", 'exec -a "$0" "$@"', sys.executable, python, *words[1:]]
    options += [word for pair in kept.items() for word in ("--ro-bind", *pair)]
    options += [word for file in kept for word in ("--ro-bind", str(place / "standin"), file)]
    ends = ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--new-session"]
    return [shutil.which("bwrap") or "bwrap", *options, *ends, *words]


def _visible() -> list[str]:
    """Return the folders that a sandbox does not hide: Python's, this package's, and the folders of PATH."""
    python = (sys.prefix, sys.base_prefix, str(Path(__file__).parent))
    folders = (path for path in os.environ.get("PATH", "").split(os.pathsep) if path.startswith("/"))
    return [path for path in dict.fromkeys((*python, *folders)) if path not in sandbox_program.HIDDEN]


@dataclass
class _Recorder:
    """Runs scripts one after the other in one folder of recordings."""

    place: Path
    kind: str
    until: float
    script_folder: str
    status: int | None = 0
    output: str = ""

    def run(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Run bash on a script until it ends or the time is over."""
        log = self.place / "output"
        with log.open("ab") as output:
            full = self.environment(environment)
            # An inner overlay comes after the outer one, which would hide it.
            writable = sorted({folder, self.script_folder}, key=len)
            process = subprocess.Popen(  # noqa: S603  - the script that the user asked to run
                _confined(["bash", *words], self.kind, self.place, writable),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=full,
                cwd=folder,
                start_new_session=True,
            )
            try:
                self.status = process.wait(max(0.1, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.status = None
            finally:
                self.kill(process)
        with log.open("rb") as file:
            self.output = file.read(_WRITTEN).decode(errors="replace")

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        programs = self.place / "programs"
        kept = {name: value for name, value in given.items() if not name.startswith("RANKMESH_")}
        return {
            **kept,
            **standin_program.functions(programs),
            "PATH": f"{programs}{os.pathsep}{given.get('PATH', os.defpath)}",
            "TMPDIR": str(self.place / "tmp"),
            "RANKMESH_RECORD": str(self.place / "calls"),
        }

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End every process that the script started, those too that left its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        mark = f"RANKMESH_RECORD={self.place / 'calls'}".encode()
        for _ in range(50):
            left = list(_having(mark))
            for number in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
            if not left:
                return
            time.sleep(0.01)

    def calls(self) -> list[dict[str, Any]]:
        """Return the notes of the stand-ins, in the order of time; those without an end are left out."""
        files = sorted(file for file in (self.place / "calls").iterdir() if not file.name.startswith("."))
        with refused_as(
            PlanError, "a note of what the script starts", "remove what the script writes to $RANKMESH_RECORD"
        ):
            return [{"number": file.name, **json.loads(read_text(file, _WRITTEN))} for file in files]

    def run_jobs(self) -> None:
        """Run the jobs that were submitted, and those that they submit."""
        done: set[str] = set()
        while waiting := [call for call in self.calls() if call["job"] is not None and call["number"] not in done]:
            for call in waiting:
                done.add(call["number"])
                if len(done) > _JOBS:
                    raise PlanError(f"the script submits more than {_JOBS} jobs; run one of them")
                job = self.place / "jobs" / str(len(done))
                job.write_text(call["job"]["text"], encoding="utf-8")
                options = shlex.join(call["job"]["options"])
                environment = {**call["environment"], **job_variables(f"{call['job']['text']}\n#SBATCH {options}")}
                self.run([str(job), *call["job"]["arguments"]], environment, call["folder"])

    def recording(self) -> Recording:
        calls = self.calls()
        if len(calls) >= standin_program.MOST:
            raise PlanError(f"the script starts {standin_program.MOST} launchers or more; give a script with one run")
        numbers = {call["number"]: call for call in calls}
        around = {call["within"] for call in calls}
        launches = []
        for call in calls:
            if call["number"] in around or call["job"] is not None:
                continue
            words, outer = list(call["words"]), numbers.get(call["within"])
            while outer is not None:
                words, outer = [*_launcher_words(outer["words"]), *words], numbers.get(outer["within"])
            idle = bool(call["inner"])
            launches.append(Launch(tuple(words), call["environment"], call["folder"], call["captured"], idle))
        failed = dict.fromkeys((int(line), cut(text)) for line, text in _FAILED.findall(self.output))
        last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
        return Recording(tuple(launches), tuple(failed)[:_NOTES], self.status, cut(last))


def _launcher_words(words: Sequence[str]) -> list[str]:
    """Return the words of a launcher before the shell that it starts."""
    for number, word in enumerate(words):
        if word.rpartition("/")[2] in ("bash", "sh", "zsh", "dash") or word.endswith(".sh"):
            return list(words[:number])
    return list(words)


def _having(mark: bytes) -> Iterator[int]:
    """Yield the processes of this machine whose environment has a text."""
    for folder in Path("/proc").glob("[1-9]*"):
        if int(folder.name) != os.getpid():
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
