"""Faults from outside a program, one after another, and what the watch says: ``faults.py FAULT TRIALS FOLDER``.

Prints a line for each trial, and in how many the right rank and cause were found in 20 s, and nobody else was named.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from bench.emulated import emulated
from rankmesh.debug.slow import SlowReport

HERE = Path(__file__).parent
WITHIN, RANKS = 20.0, 16
# What is right to say of each fault.
CAUSES = {
    "healthy": (),
    "stop": ("computes", "pause"),
    "neighbour": ("computes",),
    "input": ("input",),
    "layers": ("computes", "imbalance"),
    "pause": ("pause",),
    "link": ("link",),
}


class Job:
    """A job, watched, with its processes by rank."""

    def __init__(self, folder, seconds, ranks=RANKS, **environment):
        self.folder, self.file, self.size = Path(folder), Path(folder) / "fault", ranks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = (self.folder / "log").open("w+")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH")}
        watch = {"RANKMESH": f"watch:dir={self.folder}/watch,slow=5", "OMP_NUM_THREADS": "1"}
        command = (str(HERE / "program.py"), str(seconds), str(self.file))
        self.processes = self._start(command, {**kept, **watch, **environment})

    def _start(self, command, environment):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.size))
        return [self._popen((*launcher, *command), environment)]

    def _popen(self, command, environment, **how):
        both = {"stdout": self.log, "stderr": subprocess.STDOUT}
        return subprocess.Popen((sys.executable, *command), env=environment, **both, **how)

    def ranks(self):
        """The process of each rank."""
        end = time.monotonic() + 200
        while time.monotonic() < end:
            found = re.findall(r"rank (\d+) is (\d+)", (self.folder / "log").read_text())
            if len(found) == self.size and self.report() is not None:
                return {int(rank): int(process) for rank, process in found}
            time.sleep(0.5)
        raise TimeoutError(self.folder)

    def report(self):
        """The last report, if there is one."""
        return SlowReport.read(self.folder / "watch")

    def close(self):
        """End the job."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        self.log.close()


class HostsJob(Job):
    """The job on four emulated hosts, each of which has files of its own; host ``n`` has the ranks from ``4 * n``."""

    def _start(self, command, environment):
        self.stack = ExitStack()
        self.cluster = self.stack.enter_context(emulated((("node1", "node2", "node3", "node4"),), ranks=4, link=10_000))
        os.environ |= environment | {"LARGE": "100000"}
        return [self._popen(command, None, preexec_fn=partial(self._enter, rank)) for rank in range(RANKS)]

    def _enter(self, rank):
        self.cluster.enter(rank)
        os.environ["TMPDIR"] = str(self.folder / f"host{rank // 4}")
        Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)

    def close(self):
        """End its ranks, and remove the hosts."""
        super().close()
        self.stack.close()


def stop(process, seconds, every):
    """Stop a process for so long, again and again; returns what ends that."""
    code = "while kill -STOP $0; do sleep $1; kill -CONT $0; sleep $2; done"
    return subprocess.Popen(("sh", "-c", code, *map(str, (process, seconds, every - seconds))))


@contextmanager
def fault(job, kind, rank, process):
    """A fault of a rank, while it lasts."""
    helper = None
    if kind in ("input", "layers"):
        job.file.write_text(f"{rank} {kind}")
    elif kind == "stop":
        helper = stop(process, 0.08, 0.29)
    elif kind == "link":
        job.cluster.set_link(f"node{rank // 4 + 1}", 60)
    elif kind == "pause":
        helper = stop(process, 1.9, 12.0)
    elif kind == "neighbour":
        helper = subprocess.Popen(("taskset", "-c", "1", sys.executable, "-c", "while True: pass"))
    try:
        yield
    finally:
        job.file.unlink(missing_ok=True)
        if kind == "link":
            job.cluster.set_link(f"node{rank // 4 + 1}", 10_000)
        if helper is not None:
            helper.kill()
            helper.wait()
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def trial(job, kind, rank, process, within=WITHIN):
    """Seconds until the rank was found for one of the right causes (None: never), and others that were named."""
    began, found, innocent = time.time(), None, set()
    with fault(job, kind, rank, process):
        while time.time() < began + within + 6 and found is None:
            report = job.report()
            for one in report.findings if report.time > began else ():
                at_fault = f"node{rank // 4 + 1}" in one.hosts if kind == "link" else one.ranks == (rank,)
                if at_fault and one.cause in CAUSES[kind]:
                    found = report.time - began
                else:
                    innocent.add((one.cause, one.ranks, one.hosts))
            time.sleep(0.2)
    end = time.time() + 60
    while time.time() < end and (job.report().findings or job.report().time < time.time() - 8):
        time.sleep(0.5)
    time.sleep(4)
    return found, innocent


def main():
    """Trials of one fault, or so many seconds without one."""
    kind, trials, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    burns, within = {"BURNS": "7"} if kind == "neighbour" else {}, 120 if kind == "pause" else WITHIN
    right = late = wrong = 0
    with closing(HostsJob(folder, 100_000) if kind == "link" else Job(folder, 100_000, **burns)) as job:
        processes = job.ranks()
        for rank, process in processes.items() if kind == "neighbour" else ():
            subprocess.run(
                ("taskset", "-acp", "1" if rank == 7 else "0", str(process)), check=True, capture_output=True
            )
        time.sleep(16)
        if kind == "healthy":
            end, named = time.time() + trials, set()
            while time.time() < end:
                named |= {(one.cause, one.ranks, round(one.share, 2)) for one in job.report().findings}
                time.sleep(1)
            print(f"healthy for {trials} s: {sorted(named) or 'nothing is named'}")  # noqa: T201
            return
        for number in range(trials):
            rank = 7 if kind == "neighbour" else random.randrange(RANKS)  # noqa: S311
            seconds, innocent = trial(job, kind, rank, processes[rank], within)
            ok = seconds is not None and seconds <= within
            right, late, wrong = right + (ok and not innocent), late + (not ok), wrong + bool(innocent)
            took = seconds and round(seconds, 1)
            print(f"{kind} {number}: rank {rank} {took} s {sorted(innocent)}", flush=True)  # noqa: T201
        print(f"{kind}: {right} of {trials} right; {late} not found in time, {wrong} with others named")  # noqa: T201


if __name__ == "__main__":
    main()
