"""``python -m tests.check.phases PHASE RANK SIGNAL ...``: ``rankmesh check`` in which one rank sends itself a signal.

The rest of the command line is the command's own; alone it starts its ranks, under a launcher each rank runs this file.
``many`` runs it in forks of one process that has loaded torch, one at a time or a few.
"""

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.sockets import free_port

from rankmesh.cli import main
from rankmesh.debug.verification.work import Work
from rankmesh.launch.started import started_by
from rankmesh.launch.table import torchrun_variables

# The function of which file, called for the nth time, begins a phase.
PHASES = {
    "start": ("enter", "runtime/init.py", 1),
    "decide": ("decide", "runtime/devices.py", 1),
    "agree": ("agree", "runtime/agreement.py", 1),
    "create": ("create", "backend/members.py", 1),
    "complete": ("complete", "runtime/agreement.py", 1),
    "use": ("verify_group", "debug/verification/verify.py", 2),
    "close": ("close", "runtime/live.py", 1),
}
MARK = "RANKMESH_TEST_MARK"


def _at(phase, number):
    name, file, times = PHASES[phase]
    seen = []

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_name == name and file in frame.f_code.co_filename:
            seen.append(name)
            if len(seen) == times:
                if MARK in os.environ:
                    Path(os.environ[MARK]).write_text(str(time.monotonic()), encoding="ascii")
                os.kill(os.getpid(), number)

    return look


def _with_a_victim(check, phase, victim, number):
    def run(work):
        if started_by().rank == victim:
            sys.setprofile(_at(phase, number))
        check(work)

    return run


def sabotage(phase, victim, number):
    """From now on a check in this process has its victim."""
    Work.run = _with_a_victim(Work.run, phase, int(victim), getattr(signal, number))


def sabotaged(phase, victim, number, *arguments):
    """The command with its victim; ends this process."""
    sabotage(phase, victim, number)
    sys.argv = ["rankmesh", "check", *arguments]
    main()


def _fork(folder, name, case, arguments, environment):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(environment, **{MARK: str(folder / f"{name.partition('-')[0]}.mark")})
    status = 1
    try:
        sabotaged(*case, *arguments)
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status or 0))


def _ranks(size):
    """The variables of each rank of a job that nobody but this process starts."""
    port = free_port()
    return [torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port) for rank in range(size)]


def _start(folder, number, case, arguments, size):
    """The processes of one case, by pid: the command alone, or one for each rank of a job."""
    places = [{}] if size is None else _ranks(size)
    return {_fork(folder, f"{number}-{rank}", case, arguments, place): rank for rank, place in enumerate(places)}


def many(cases, arguments, size=None, at_once=1, limit=60):
    """Each case's statuses, words of stderr, and seconds from the signal to the end of the last process, by case."""
    folder = Path(tempfile.mkdtemp(prefix="rankmesh-phases-"))
    todo, running, done = list(enumerate(cases)), {}, {}
    while todo or running:
        while todo and len(running) < at_once:
            number, case = todo.pop(0)
            processes = _start(folder, number, case, arguments, size)
            running[number] = {"case": case, "left": processes, "status": {}, "begun": time.monotonic()}
        time.sleep(0.02)
        for number, one in list(running.items()):
            _collect(one, size)
            late = time.monotonic() - one["begun"] > limit
            if late or set(one["left"].values()) <= ({int(one["case"][1])} if size else set()):
                done[number] = _ended(folder, number, running.pop(number), late)
    return [done[number] for number in sorted(done)]


def _collect(one, size):
    for pid in list(one["left"]):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            one["status"][one["left"].pop(pid)] = os.waitstatus_to_exitcode(status)


def _ended(folder, number, one, late):
    at = time.monotonic()
    for pid in one["left"]:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    mark = folder / f"{number}.mark"
    seconds = at - float(mark.read_text(encoding="ascii")) if mark.exists() else None
    message = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob(f"{number}-*.err"))]
    status = {rank: code for rank, code in one["status"].items() if len(one["status"]) == 1 or code != -signal.SIGKILL}
    return {"case": one["case"], "late": late, "seconds": seconds, "status": status, "words": message}


if __name__ == "__main__":
    if sys.argv[1] == "many":
        requested = json.loads(sys.argv[2])
        sys.stdout.write(json.dumps(many(**requested)))
    else:
        sabotaged(*sys.argv[1:])
