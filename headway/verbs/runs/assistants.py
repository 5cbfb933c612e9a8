"""`headway mcp`: recorded runs for coding assistants, over the Model Context Protocol on stdin and stdout.

Four tools, `runs`, `why`, `plan` and `compare`, return what the verbs of these names print with `--json`. They read
recorded runs of the folder in which the server was started, and `plan` writes the run's plan.json; none starts a
script. An assistant is told of the server as of any other: command `headway`, argument `mcp`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from headway import __version__
from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json
from headway.verbs.shared.source import recorded_runs

LONGEST_S = 600.0
"""How long a tool may take."""

ABOUT = (
    "headway records PyTorch training jobs and says where their device time goes. Ask `runs` for what is recorded, "
    "`why` for the ledger, causes and fixes of one, `plan` for predicted remedies, `compare` for two runs of a script."
)


def mcp() -> int:
    """Serve recorded runs to a coding assistant: the tools runs, why, plan and compare, over stdin and stdout.

    The stock `mcp` package speaks the Model Context Protocol: install the extra `mcp`. Nothing is trained or applied.

    Example: `claude mcp add headway -- headway mcp`
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise InputError("the package mcp (2.0 or later) is not there. Install headway's extra `mcp`.") from None
    server = MCPServer("headway", version=__version__, instructions=ABOUT, log_level="ERROR")

    def answer(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "headway.cli", *arguments, "--json"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST_S, check=False
            )
            printed: dict[str, object] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise ToolError(f"headway {arguments[0]} took longer than {LONGEST_S:.0f} s and was ended.") from None
        except json.JSONDecodeError:
            _, _, reason = done.stderr.strip().rpartition("headway: ")
            raise ToolError(reason or f"headway {arguments[0]} ended without an answer") from None
        except (OSError, ValueError) as cause:  # no argument of a command: too long, or with a null byte
            raise ToolError(f"headway {arguments[0]} could not be asked: {cause}") from None
        return printed

    @server.tool(structured_output=False)
    def runs() -> str:
        """List the recorded runs of this folder, the newest first: path and script of each."""
        return json.dumps({"schema": "headway.runs/1", "runs": [_row(run) for run in recorded_runs()]})

    @server.tool(structured_output=False)
    def why(run: str = "") -> str:
        """Explain where the device time of a run went: ledger, ranked causes with fixes. The newest run by default."""
        return json.dumps(answer("why", *_named(run)))

    @server.tool(structured_output=False)
    def plan(run: str = "", allow: str = "") -> str:
        """Predict what each remedy wins for a run. `allow`: result-equivalent, lossy; consents beyond equal results."""
        return json.dumps(answer("plan", *_named(run), *([f"--allow={allow}"] if allow else [])))

    @server.tool(structured_output=False)
    def compare(before: str, after: str) -> str:
        """Compare two runs of one script: speed, ledger, what changed."""
        return json.dumps(answer("compare", *_named(before), *_named(after)))

    server.run("stdio")
    return 0


def _row(run: Path) -> dict[str, str]:
    """Return `path` and `script` of a run; without its script where it is of several hosts, or damaged."""
    try:
        script = read_json(run / "run.json").get("script") or []
    except (HeadwayError, OSError, ValueError, AttributeError):
        script = []
    return {"path": str(run), "script": " ".join(map(str, script))}


def _named(run: str) -> list[str]:
    """Return a run as an argument: what begins with a dash is a file as well, not a flag."""
    return ["./" + run if run.startswith("-") else run] if run else []
