"""`headway mcp` answers a client of the stock package with what the verbs print."""

import asyncio
import json
import shutil
import sys

import pytest

from tests.launching import headway_here
from tests.paths import ROOT

mcp = pytest.importorskip("mcp", reason="the extra `mcp` is not installed")


def asked(folder, *calls):
    """Return the tools that a server started in `folder` has, and what it answers to each (tool, arguments)."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def talk():
        server = StdioServerParameters(command=sys.executable, args=["-m", "headway.cli", "mcp"], cwd=folder)
        async with stdio_client(server) as (reads, writes), mcp.ClientSession(reads, writes) as session:
            await session.initialize()
            tools = {tool.name for tool in (await session.list_tools()).tools}
            return tools, [await session.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(asyncio.wait_for(talk(), 100))


def test_an_assistant_gets_the_answers_of_the_verbs_and_their_errors(tmp_path):
    runs = ROOT / "tests" / "golden" / "runs"
    shutil.copytree(runs, tmp_path / "headway-runs")
    calls = [
        ("runs", {}),
        ("why", {"run": "headway-runs/before"}),
        ("compare", {"before": "headway-runs/before", "after": "headway-runs/after"}),
        ("why", {"run": "nothing-there"}),
    ]
    tools, answers = asked(tmp_path, *calls)
    listed, why, compared, refused = (answer.content[0].text for answer in answers)

    assert tools == {"runs", "why", "plan", "compare"}
    assert {row["path"] for row in json.loads(listed)["runs"]} >= {"headway-runs/before", "headway-runs/after"}
    assert json.loads(why) == json.loads(headway_here("why", "headway-runs/before", "--json", folder=tmp_path).stdout)
    assert json.loads(compared)["schema"] == "headway.compare/1"
    assert [answer.is_error for answer in answers] == [False, False, False, True]
    assert "nothing-there does not exist" in refused
