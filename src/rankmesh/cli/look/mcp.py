"""``rankmesh mcp``: layouts, findings and diagnoses as tools of the Model Context Protocol, over stdin and stdout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from rankmesh import __version__
from rankmesh.errors import RankmeshError, extra

__all__ = ["command", "made_server"]


def show(spec: str, world_size: int | None = None) -> dict[str, Any]:
    """Describe a parallel layout: axes, strides, groups, communicators.

    spec: axes (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2,ep=4), a preset, or the path of a launch script or
    training config, which is parsed and not run. world_size: ranks, for a spec that leaves them open.
    """
    from rankmesh.readers.source import read
    from rankmesh.viz.overview import overview

    return overview(read(spec, world_size=world_size)).to_dict()


def diff(left: str, right: str, world_size: int | None = None) -> dict[str, Any]:
    """Compare two parallel layouts rank by rank: axes, kinds of groups, members. Each is a spec, as for show."""
    from rankmesh.core.difference import difference
    from rankmesh.core.source import read_plan

    found = difference(read_plan(left, world_size=world_size), read_plan(right, world_size=world_size))
    return {"different": found.different, **asdict(found)}


def lint(paths: list[str]) -> dict[str, Any]:
    """Find layouts that cannot run in launch scripts, training configs, Dockerfiles and manifests; runs none of them.

    paths: files, and folders of them. Returns findings with file, line, code, message and fix.
    """
    from rankmesh.readers.tools.lint import lint_files

    found = lint_files(paths)
    return {"findings": [finding.to_dict() for finding in found.findings], "notes": list(found.notes)}


def doctor(paths: list[str], layout: str | None = None, world_size: int | None = None) -> dict[str, Any]:
    """Find the rank, group and call that make a distributed job hang.

    paths: recordings of torch's flight recorder, reports of ncclras, logs of torch's watchdog or of NCCL, stacks of
    py-spy, pystack or faulthandler, errors of torchrun, and folders of them. layout: a spec, as for show, by which
    groups are named.
    """
    from rankmesh.core.source import read_plan
    from rankmesh.debug.doctor import doctor as diagnosed

    plan = None if layout is None else read_plan(layout, world_size=world_size)
    return diagnosed([Path(path) for path in paths], plan).to_dict()


def made_server() -> Any:
    """Return the server with its tools. Raises ``MissingExtra`` without the package ``mcp``."""
    with extra("mcp"):
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError

    def answering(tool: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(tool)
        def answer(*given: Any, **named: Any) -> Any:
            try:
                return tool(*given, **named)
            except RankmeshError as error:
                raise ToolError(str(error)) from error

        return answer

    server = MCPServer("rankmesh", version=__version__)
    for tool in (show, diff, lint, doctor):
        server.tool()(answering(tool))
    return server


def command() -> None:
    """Serve show, diff, lint and doctor to an agent, by the Model Context Protocol.

    The server reads the files that it is given and runs none of them. An agent starts it
    and connects to it over stdin and stdout. Needs the extra mcp.

    $ rankmesh mcp
    """
    made_server().run()
