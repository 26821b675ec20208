"""A failed test is run again, alone, once: ``pytest -p tests.again``.

If it passes then, it is *unstable*: it is listed, and does not fail the run. More than two unstable tests fail the
run; where several runs of pytest are one check, the file that RANKMESH_UNSTABLE names counts those of all of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWED = 2
TRIED = 10  # more failures than that are not chance
LIMIT = 4000  # seconds; a test's own limit comes before


@pytest.hookimpl(trylast=True)  # when xdist's workers have ended
def pytest_sessionfinish(session, exitstatus):
    """Run what failed again; a run without other failures than unstable tests has passed."""
    if hasattr(session.config, "workerinput"):  # a worker, whose failures the session that started it has
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = terminal.stats
    failed = [report for kind in ("failed", "error") for report in stats.get(kind, ())]
    names = list(dict.fromkeys(report.nodeid for report in failed))
    if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or not 0 < len(names) <= TRIED:
        return
    unstable = {name for name in names if _passes(session.config, terminal, name)}
    for kind in ("failed", "error"):
        stats[kind] = [report for report in stats.get(kind, ()) if report.nodeid not in unstable]
    stats["unstable"] = [report for report in failed if report.nodeid in unstable]
    if unstable == set(names) and _counted(sorted(unstable)) <= ALLOWED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter):
    """List the unstable tests, each with its first failure."""
    reports = terminalreporter.stats.get("unstable", ())
    if not reports:
        return
    terminalreporter.section("unstable: failed, and passed when run again alone", yellow=True)
    for report in reports:
        terminalreporter.line(f"UNSTABLE {report.nodeid} ({report.when})")
        terminalreporter.line(report.longreprtext)


def _passes(config, terminal, name):
    """Whether a test passes in a process of its own, with nothing beside it."""
    again = ("-n", "0", "-p", "no:cacheprovider", "-q", "--rootdir", config.rootpath, name)
    settings = ("-c", config.inipath) if config.inipath else ()
    command = [sys.executable, "-m", "pytest", *map(str, (*settings, *again))]
    terminal.write_line(f"\n\nagain, alone: {name}", flush=True)
    try:
        return subprocess.run(command, cwd=config.rootpath, timeout=LIMIT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _counted(names):
    """Return the number of unstable tests of this check, these included."""
    path = os.environ.get("RANKMESH_UNSTABLE")
    if path is None:
        return len(names)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in names)
    return len(Path(path).read_text(encoding="utf-8").splitlines())
