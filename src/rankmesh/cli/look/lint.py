"""``rankmesh lint``: layouts in scripts and configs that cannot run, as findings with file, line and fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Literal

import typer

from rankmesh import __version__
from rankmesh.cli.console import json_text, note, write
from rankmesh.cli.options import Json
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.errors import PlanError
from rankmesh.readers.tools.finding import CODES, Finding
from rankmesh.readers.tools.lint import lint_files

__all__ = ["Format", "command", "shown"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


Format = Literal["text", "json", "github", "sarif"]


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files and folders.")],
    format: Annotated[  # noqa: A002  - the name of the option
        Format, typer.Option(help="github: workflow commands, which annotate a pull request; sarif: SARIF 2.1.0.")
    ] = "text",
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print on stderr why each layout without a finding is valid.")
    ] = False,
    json: Json = False,
) -> None:
    """Find layouts that cannot run in scripts, training configs and containers. Runs no code.

        Prints file:line, a code, the problem and a fix; exits with 1 if there is a finding. The
        comment # rankmesh: ignore[CODE] ignores a code on its line, or alone on a line in the file.
    A file without a layout is skipped. A layout that only a run decides is a note on stderr.

    $ rankmesh lint scripts configs
    $ rankmesh lint train.sh --json
    $ rankmesh lint . --format sarif > lint.sarif
    """
    try:
        found = lint_files(paths)
    except PlanError as error:
        raise Failed(str(error), ExitCode.USAGE) from error
    for line in found.notes:
        note(f"note: {line}")
    for line in found.valid if explain else ():
        note(line)
    if text := shown(found.findings, "json" if json else format):
        write(text)
    if found.findings:
        raise typer.Exit(ExitCode.DIFFERENT)


def shown(findings: Sequence[Finding], form: Format) -> str:
    """Return findings in a format."""
    if form == "json":
        return json_text([finding.to_dict() for finding in findings])
    if form == "sarif":
        return json_text(_sarif(findings))
    return "\n".join(map(_workflow_command if form == "github" else str, findings))


def _workflow_command(finding: Finding) -> str:
    """Return the command that annotates a line on GitHub.

    >>> _workflow_command(Finding("a,b.sh", 3, "sizes", "50% of 8", "ep=4"))
    '::error file=a%2Cb.sh,line=3,title=rankmesh sizes::50%25 of 8; fix: ep=4'
    """
    message = _escaped(finding.text)
    file = _escaped(finding.file).replace(":", "%3A").replace(",", "%2C")
    return f"::error file={file},line={finding.line or 1},title=rankmesh {finding.code}::{message}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _sarif(findings: Sequence[Finding]) -> dict[str, object]:
    rules = [{"id": code, "shortDescription": {"text": text}} for code, text in CODES.items()]
    results = [
        {
            "ruleId": finding.code,
            "level": "error",
            "message": {"text": finding.text},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": PurePath(finding.file).as_posix()},
                        "region": {"startLine": finding.line or 1},
                    }
                }
            ],
        }
        for finding in findings
    ]
    driver = {"name": "rankmesh", "version": __version__, "rules": rules}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
