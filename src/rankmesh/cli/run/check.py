"""``rankmesh check``: every group of a layout built and proved on real ranks.

Alone, the command starts the ranks on this machine; inside a job (torchrun, srun) each of
the job's ranks runs it, and rank 0 prints the table.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from rankmesh.cli import STARTED
from rankmesh.cli.columns import print_table
from rankmesh.cli.console import error, note, progress_bar, write, write_json
from rankmesh.cli.options import Backend, Json, Reading, Spec, Timeout, config_of, noted, source_of
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.errors import AgreementError, ConnectError, ProofError, RankmeshError, counted, extra, in_words
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import NO_LAUNCHER
from rankmesh.readers.source import Source

if TYPE_CHECKING:
    from rankmesh.debug.verification.results import CheckResult

__all__ = ["command", "source_in_job"]

_SHOWN = 8


def command(
    spec: Spec,
    backend: Backend = None,
    timeout: Timeout = 60.0,
    *,
    reading: Reading,
    json: Json = False,
) -> None:
    """Build every group on real processes and verify each one with collectives.

    $ rankmesh check megatron:world=16,tp=2,cp=2,pp=2,ep=2
    $ rankmesh check 'tp=2,dp=*,pp=2' --world-size 8
    $ torchrun --nproc-per-node 8 -m rankmesh check 'tp=2,dp=*'
    """
    if backend not in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl"):
        raise typer.BadParameter(f"--backend {backend!r} is unknown; use gloo, nccl or cpu:gloo,cuda:nccl")
    source, _ = source_in_job(spec, reading)
    plan = source.plan
    with progress_bar(f"proving {plan.world_size} ranks", "proofs") as (progress, stop):

        def show(result: CheckResult) -> None:
            stop()
            _show(result, config_of(source) if json else None)

        try:
            with extra("torch"):
                from rankmesh.debug.verification.check import check
            result = check(plan, backend=backend, timeout=timeout, since=STARTED, progress=progress, show=show)
        except (AgreementError, ConnectError) as problem:
            raise _failed(str(problem), ExitCode.LOST_RANKS) from problem
        except ProofError as problem:
            raise _failed(str(problem), ExitCode.UNPROVED) from problem
    if not result.ok:
        # The rank that reports has said why; all end with the same status.
        raise _failed("", ExitCode.LOST_RANKS if result.lost else ExitCode.UNPROVED)


def _failed(message: str, code: ExitCode) -> Failed:
    """Return the error of a failed check; end the process at once if a thread hangs, on which exiting would wait."""
    from rankmesh.debug.verification.check import is_stuck

    if is_stuck():
        if message:
            error(message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return Failed(message, code)


def source_in_job(spec: str, reading: Reading) -> tuple[Source, Launch]:
    """Return the plan that the user means, and what started this process: the job fills a size that SPEC leaves open.

    A process that starts all ranks on this machine itself asks no name server from now on.
    """
    launch = started_by()
    source = _filled(spec, reading, launch)
    if launch.rank == 0:
        noted(source)
    if launch.launcher == NO_LAUNCHER:
        from rankmesh.debug.verification.ranks import NO_NAME_SERVER

        os.environ.update(NO_NAME_SERVER)
        # torch, which is loaded later, warns of each name that it does not find.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return source, launch


def _filled(spec: str, reading: Reading, launch: Launch) -> Source:
    try:
        return source_of(spec, reading.world_size, reading.variables)
    except RankmeshError:
        if reading.world_size is not None or launch.launcher == NO_LAUNCHER:
            raise
        with suppress(RankmeshError):
            return source_of(spec, launch.world_size, reading.variables)
        raise


def _show(result: CheckResult, json: dict[str, object] | None) -> None:
    """Print the result; ``json`` is added to its data, None for a table."""
    if json is not None:
        write_json({"ok": result.ok, **asdict(result), **json})
    else:
        _print(result)
    sys.stdout.flush()
    if not result.ok:
        error(_outcome(result) + (f"; by the recordings: {result.verdict}" if result.verdict else ""))


def _print(result: CheckResult) -> None:
    kinds = result.kinds
    rows = [
        (
            kind.name,
            kind.size,
            f"{kind.proved} of {kind.groups}",
            f"{kind.ranks} of {kind.expected}",
            f"{kind.slowest * 1e3:.1f} ms",
            ", ".join(kind.operations) or "-",
        )
        for kind in kinds
    ]
    print_table(("group", ">size", ">proved", ">ranks", ">slowest", "by"), rows)
    groups, proved = counted(sum(kind.groups for kind in kinds), "group"), sum(kind.proved for kind in kinds)
    every, part = f"every group was proved: {groups} of {counted(len(kinds), 'kind')}", f"{proved} of {groups} proved"
    write(f"\n{every if result.ok else part} on {counted(result.world_size, 'rank')} ({result.backend})")
    note(f"connected in {result.connect:.2f} s, {result.seconds:.1f} s in all")
    for failure in result.failures[:_SHOWN]:
        at = f" at group {failure.group}" if failure.group else ""
        note(f"rank {failure.rank}{at}: {failure.kind}: {failure.message}")
    if len(result.failures) > _SHOWN:
        note(f"and {len(result.failures) - _SHOWN} more ranks; --json lists them")
    if result.followed:
        note(f"{counted(len(result.followed), 'rank')} failed because of that; --json lists what they saw")


def _outcome(result: CheckResult) -> str:
    ranks = [failure.rank for failure in result.failures]
    it, first = "the first" if len(ranks) > 1 else "it", result.failures[0]
    if result.lost:
        return f"lost {in_words(ranks)}: {it} {first.message}; look at the end of its log"
    return f"{in_words(ranks)} failed: {first.kind}: {first.message}"
