"""``python -m tests.launchers.chain FOLDER COMMANDS``: several commands on each rank, in one start of a launcher.

```
rank: loads torch once ── fork: rankmesh where ── fork: rankmesh check ── fork: the four lines ── ... ── FOLDER/3.json
```

Each command has a process of its own, as if the launcher had started it; its status, words and data are written down.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from rankmesh.launch.started import started_by

# Loaded before the forks, which then start at once.
LOADED = (
    "torch.distributed",
    "rankmesh.cli.app",
    "rankmesh.debug.verification.check",
    "rankmesh.debug.verification.measure",
)
LIMIT = 60.0


def _command(arguments):
    """In a fork: the command, or the Python file that it names."""
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from rankmesh.cli import main

    sys.argv = ["rankmesh", *arguments]
    main()


def _in_a_fork(arguments, out, err):
    pid = os.fork()
    if pid:
        return pid
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    status = 1
    try:
        _command(arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001  - told to the test
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(pid):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run(arguments, folder, rank):
    out, err = (folder / f"{rank}.{name}" for name in ("out", "err"))
    status = _ended(_in_a_fork(arguments, out, err))
    return {"status": status, "out": out.read_text(encoding="utf-8"), "err": err.read_text(encoding="utf-8")}


def main():
    """Run the commands, and write what came of them."""
    folder, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name in LOADED:
        __import__(name)
    rank = started_by().rank
    found = {name: _run(arguments, folder, rank) for name, arguments in commands.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
