"""``rankmesh mcp``: the package's own client calls each tool, and without the package the error names the extra."""

import asyncio
import json
import sys

import pytest
from tests.docs.pages import ROOT

from rankmesh.cli.look.mcp import made_server
from rankmesh.errors import MissingExtra


def call(tool, **arguments):
    """The result of one tool, as the client of the package receives it: an error or data."""
    mcp = pytest.importorskip("mcp")

    async def run():
        async with mcp.Client(made_server()) as client:
            return await client.call_tool(tool, arguments)

    result = asyncio.run(run())
    text = result.content[0].text
    return text if result.is_error else json.loads(text)


def test_tools(tmp_path):
    """Each tool answers with data; a spec that is refused is an error with the message of the command."""
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/bash\nvllm serve Qwen/Qwen3-8B -tp 3\n")
    assert call("show", spec="tp=2,dp=*", world_size=8)["world_size"] == 8
    assert "tp" in call("show", spec="tp=0")
    assert call("diff", left="tp=2,dp=4", right="dp=4,tp=2")["different"] is True
    (found,) = call("lint", paths=[str(script)])["findings"]
    assert (found["code"], found["line"], found["fix"]) == ("heads", 2, "tp=2")
    recordings = ROOT / "tests" / "hangs" / "recordings" / "another_dtype"
    assert call("doctor", paths=[str(recordings)])["causes"]


def test_the_extra_is_named(monkeypatch):
    """Without the package the error says what to install."""
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingExtra) as error:
        made_server()
    assert error.value.values["extra"] == "mcp"
