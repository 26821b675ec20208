"""``python -m bench``: live groups, large worlds and getters against the peers, side by side, in the same run.

A comparison is told on stderr as it is done; tables go to stdout, and the figures to files where asked.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import json_text, note, out, write
from rankmesh.cli.options import Debug
from rankmesh.cli.shell import ExitCode, Failed, outcome
from rankmesh.errors import PlanError

if TYPE_CHECKING:
    from bench.results import Comparison, Results
    from bench.suite import Settings

__all__ = ["EXAMPLES", "bench", "command", "run"]

EXAMPLES = """\
$ python -m bench --quick
$ python -m bench --ranks 8,32 --only live,dry
$ python -m bench --rounds 5 --json results.json --markdown benchmarks.md
$ python -m bench --from results.json --markdown benchmarks.md
"""

_SMALLEST = 8


def bench(settings: Settings, report: Callable[[Comparison], None]) -> Results:
    """Run the suite with these settings; ``tell`` hears of each comparison as it is done."""
    from bench.suite import measure

    return measure(settings, report)


def command(
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", "-n", metavar="N,...", help="Live worlds, multiples of 8; default 8,16,32,64."),
    ] = None,
    worlds: Annotated[
        str | None,
        typer.Option("--worlds", metavar="N,...", help="Dry worlds; default 1024,4096,32768,131072."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", "-r", min=1, metavar="N", help="Runs of each side; default 5.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAME,...", help="Sections: live, dry, planning, getters."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option("--limit", min=1.0, metavar="SECONDS", help="How long one run may take; default 120."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="8 ranks, small worlds, one round: seconds, not figures.")] = (
        False
    ),
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - is stdout, alone.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as a Markdown document.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show the figures of an earlier --json; measure nothing."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure rankmesh against megatron-core, DeviceMesh and HyperCommGrid, side by side."""
    results = _read(source) if source else bench(_settings(ranks, worlds, rounds, only, limit, quick), _report)
    if json == "-":
        write(json_text(results.to_dict()))
    else:
        _print(results)
    if json not in (None, "-"):
        _save(Path(str(json)), json_text(results.to_dict()) + "\n")
    if markdown:
        from bench.markdown import markdown as document
        from bench.markdown import recorded_transfers

        _save(markdown, document(results, recorded_transfers()))
    _comparison(results)


def _settings(
    ranks: str | None, worlds: str | None, rounds: int | None, only: str | None, limit: float | None, quick: bool
) -> Settings:
    from bench.suite import QUICK, SECTIONS, Settings

    settings = QUICK if quick else Settings()
    if ranks:
        settings = replace(settings, ranks=_sizes("--ranks", ranks, _SMALLEST))
    if worlds:
        settings = replace(settings, worlds=tuple(_world(size) for size in _sizes("--worlds", worlds, _SMALLEST)))
    if only:
        settings = replace(settings, sections=tuple(_section(name, SECTIONS) for name in only.split(",")))
    return replace(settings, rounds=rounds or settings.rounds, limit=limit or settings.limit)


def _sizes(option: str, text: str, unit: int) -> tuple[int, ...]:
    sizes = text.split(",")
    for size in sizes:
        if not size.strip().isdecimal() or int(size) < unit or int(size) % unit:
            raise typer.BadParameter(f"received {size!r} in {option}; sizes are multiples of {unit}, as in {unit},32")
    return tuple(map(int, sizes))


def _world(size: int) -> int:
    if size >= 1024 and size % 1024:
        raise typer.BadParameter(f"received {size} in --worlds; from 1024 on, sizes are multiples of 1024")
    return size


def _section(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise typer.BadParameter(f"received {name!r} in --only; the sections are {', '.join(known)}")
    return name


def _report(comparison: Comparison) -> None:
    parts = [f"{name} {stat.median:.3g} times faster" for name, stat in comparison.both.ratios.items()]
    shown = [part for part in parts if part.split()[0] in ("built", "used", "planned", "call")]
    shown += [f"{side}: {why}" for side, why in comparison.failures.items()]
    note(
        f"{comparison.section}, {comparison.ranks:,} ranks, {comparison.what} ({comparison.peer}): "
        f"{', '.join(shown) or 'done'}"
    )


def _print(results: Results) -> None:
    from bench.tables import tables

    for table in tables(results):
        write(f"{table.title}\n")
        cells = zip(*table.rows, strict=True)
        print_columns(out(), [Column(head, list(column)) for head, column in zip(table.head, cells, strict=True)])
        write("")
        sys.stdout.flush()


def _comparison(results: Results) -> None:
    """A peer that fails is a result; rankmesh failing is a failure of the command."""
    failed = [item for item in results.comparisons if "ours" in item.failures]
    if failed:
        first = failed[0]
        raise Failed(
            f"received no figures of rankmesh for {first.what} on {first.ranks} ranks: {first.failures['ours']}; "
            "rankmesh check shows more",
            ExitCode.UNPROVED,
        )


def _save(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed(f"received {path}, which cannot be written: {error.strerror}", ExitCode.USAGE) from error


def _read(path: Path) -> Results:
    from bench.results import results_from

    try:
        data = json_module.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"received {path}, which is no readable JSON ({error}); give a file of --json") from error
    return results_from(data)


def run(message: Sequence[str]) -> int:
    """The exit status of the benchmarks with these words: one of ``rankmesh.cli.shell``."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(context_settings=settings, epilog=f"[bold]Examples[/]\n{EXAMPLES.rstrip()}")(command)
    return outcome(lambda: app(list(message), prog_name="python -m bench", standalone_mode=False))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
