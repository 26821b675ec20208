"""The workflows run targets of the Makefile, on the versions that it names; make lint checks their schema."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
JOBS = {
    f"{path.stem} {name}": job
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
}


def test_every_target_exists():
    """Lint, tests, the kernel and the nightly are each a target, and each job ends by itself."""
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in JOBS.items()}
    targets = {name: re.findall(r"\bmake ([a-z-]+)", " ".join(runs)) for name, runs in commands.items()}
    assert {target for each in targets.values() for target in each} <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert {name: each for name, each in targets.items() if name.startswith("checks ")} == {
        "checks lint": ["lint"],
        "checks test": ["test"],
        "checks torch": ["test-kernel"],
        "checks nightly": ["test-nightly"],
    }
    assert all("timeout-minutes" in job for name, job in JOBS.items() if name.startswith("checks "))


def test_versions_are_those_of_the_project():
    """The oldest and the newest torch are the Makefile's; the Pythons are the oldest and another that are declared."""
    oldest, newest = (re.search(rf"^{name} .?= (\S+)", MAKEFILE, re.M)[1] for name in ("OLD_TORCH", "TORCH"))
    assert JOBS["checks torch"]["strategy"]["matrix"] == {"torch": [oldest, newest]}
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    first, last = JOBS["checks test"]["strategy"]["matrix"]["python"]
    assert first == declared[0]
    assert last in declared[1:]
