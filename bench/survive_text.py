"""The section of docs/benchmarks.md on jobs that lose ranks: what ``bench/survive.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["survive_section"]

_HOW = {
    "survive": "rm.survive, a spare takes over",
    "restart": "torchrun restarts all ranks from the last step's checkpoint",
    "torchft": "torchft, 16 replicas of a smaller data-parallel model, one fewer goes on",
}


def survive_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    yield from ("", "## Losing ranks", "")
    machine = found["commit"]["machine"]
    yield (
        "`examples/train_gpt` on 16 gloo ranks (tp=2, pp=2, dp=4) and five spares: four are killed, one is stopped. "
        "Seconds from the death to the end of the first step after it, on the last rank. Medians, with the lowest and "
        f"the highest, of runs one after the other on {machine['cores']} cores, load {found['load']} after. "
        "`python -m bench.survive`"
    )
    yield from ("", "| after | method | losses | seconds | steps done again |", "| --- | --- | --- | --- | --- |")
    for name, losses in found["losses"].items():
        for how in sorted({one["how"] for one in losses}):
            some = [one for one in losses if one["how"] == how]
            steps = max(one["steps"] for one in some)
            seconds = _cell([one["seconds"] for one in some], 2)
            yield f"| {how} | {_HOW[name]} | {len(some)} | {seconds} | {steps} |"
    killed = [one["phases"] for one in found["losses"]["survive"] if one["how"] == "SIGKILL"]
    yield from (
        "",
        "Where the time goes after a SIGKILL, in milliseconds, each phase until the last rank is through:",
        "",
    )
    names = list(killed[0])
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"
    yield f"| {' | '.join(_cell([1e3 * one[name] for one in killed if name in one], 0) for name in names)} |"
    yield from commit_lines(found["commit"])


def commit_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What a commit costs."""
    seconds, processor, state = found["seconds"], found["processor"], found["state"]
    step = seconds["without"]
    yield from ("", "What `job.commit` costs:", "")
    yield (
        f"Two ranks, {state / 2**20:.0f} MiB a rank, {found['rounds']} steps of each kind in turn; load "
        f"{found['load']} on {found['machine']['cores']} cores."
    )
    yield from ("", "| | ms | of a step | processor ms | of a step | snapshots and copies |")
    yield "| --- | --- | --- | --- | --- | --- |"
    yield f"| a step without commit | {step * 1e3:.0f} | | {processor['without'] * 1e3:.0f} | | |"
    yield (
        f"| the commit by itself | {seconds['commit alone'] * 1e3:.0f} | {seconds['commit alone'] / step:.1%} | "
        f"{processor['commit alone'] * 1e3:.0f} | {processor['commit alone'] / processor['without']:.1%} | |"
    )
    for name, what in (("commit", "a step with commit"), ("copies", "a step with commit, redundancy=1")):
        memory = f"{found['memory'][name] / state:.1f} times the state"
        yield (
            f"| {what} | {seconds[name] * 1e3:.0f} | {seconds[name] / step - 1:+.1%} | {processor[name] * 1e3:.0f} | "
            f"{processor[name] / processor['without'] - 1:+.1%} | {memory} |"
        )


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"
