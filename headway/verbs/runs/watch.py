"""`headway watch`: the report's page, live, while the run goes on.

`headway mcp`: recorded runs for coding assistants, over the Model Context Protocol on stdin and stdout.

Four tools, `runs`, `why`, `plan` and `compare`, return what the verbs of these names print with `--json`. They read
recorded runs of the folder in which the server was started, and `plan` writes the run's plan.json; none starts a
script. An assistant is told of the server as of any other: command `headway`, argument `mcp`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway import __version__
from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json
from headway.ledger.live_ledger import LiveSeries
from headway.ledger.live_mfu import LiveMfu
from headway.report.answers import created, facts_of
from headway.report.page.html import page
from headway.report.page.live import LiveView, live_charts, live_key, live_page, live_parts
from headway.runtime.run_folder.live_feed import LiveFeed
from headway.trace.recording.runs import Run, is_run, run_near
from headway.verbs.shared.output import serve_page
from headway.verbs.shared.run_options import NewestRun, newest_run, recorded, recorded_runs


def watch(
    run: NewestRun = None, *, port: int = 0, host: str = "127.0.0.1",
    allow_origin: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    wait: Annotated[bool, Parameter(negative=())] = False, json: bool = False,
) -> int:  # fmt: skip
    """Serve the page of a run while it goes on: steps, step times, ledger so far, every rank. Ctrl-C ends it.

    The run is only read, never touched. A run that has ended shows its report. The address that is printed ends in
    a token, new for each watch: without it nobody on this machine can read the page.

    Example: `headway watch headway-runs/train-1`

    Args:
      port: Port to serve on; 0 takes a free one.
      host: Address to serve on; only this machine can connect by default.
      allow_origin: Origin of another page that may read the events, as in http://dashboard:3000.
      wait: The run folder need not exist yet: wait until a run makes it.
      json: Print one JSON object with the address instead of text.
    """
    path = run or newest_run()
    if path.exists() and not path.is_dir():
        text = "Name the folder that headway run writes, or will write."
        raise InputError(f"{path} is a file; a run is a folder. {text}")
    if path == Path() and not is_run(path):
        raise InputError(f"the current folder is no run. Name the folder of one. {recorded()}")
    if not is_run(path) and not wait and (near := run_near(path)):
        raise InputError(f"{path} is no run. {near}")
    if not path.exists() and not wait:
        raise InputError(f"{path} does not exist. {recorded()} For one that a run will make, add --wait.")
    source = WatchedRun(path)
    try:
        serve_page(
            source,
            lambda url: (
                {"schema": "headway.watch/1", "run": str(path), "url": url, "state": source.state},
                f"{path} ({source.standing}): {url}",
            ),
            host=host, port=port, allow_origin=allow_origin, as_json=json,
        )  # fmt: skip
    finally:
        source.close()
    return 0


class WatchedRun:
    """A run folder as the live page shows it: followed while it goes on, its report once it is over."""

    def __init__(self, path: Path) -> None:
        """Watch the run in `path`."""
        self._path, self._feed, self._mfu = path, LiveFeed(path), LiveMfu(path)
        self._view = LiveView(str(path), "waiting")
        self._report: str | None = None
        self._reason = ""

    @property
    def state(self) -> str:
        """How the run stands: waiting, running, ended or lost."""
        return self._feed.state

    @property
    def standing(self) -> str:
        """The state in words: with what is damaged, or missing, of a run that is over and cannot be read."""
        if self.state in ("ended", "lost"):
            try:
                Run.open(self._path)
            except HeadwayError as reason:
                return f"{self.state}; {str(reason).rstrip('.')}"
        return self.state

    def poll(self) -> None:
        """Read what is new and look at it."""
        self._feed.poll()
        self._view = self._look()

    def key(self) -> str:
        """Return what the page's sections depend on."""
        return live_key(self._view)

    def page(self) -> str:
        """Return the page: live, or the report of a run that is over."""
        if self.state not in ("ended", "lost"):
            return live_page(self._view, self._series())
        if self._report is None:
            # The analysis is loaded when a run is over: following one takes little of the host it runs on.
            from headway.verbs.runs.report import report_data
            from headway.why.explanation import explain

            try:
                self._report = page(report_data(explain([self._path])))
            except HeadwayError as reason:  # nothing was recorded, or the folder was moved away
                self._reason = str(reason)
                self._view = self._look()
                return live_page(self._view)
        return self._report

    def parts(self) -> dict[str, str]:
        """Return id -> markup of what changes."""
        return live_parts(self._view)

    def charts(self) -> dict[str, object]:
        """Return what the pictures show."""
        series = self._series()
        return live_charts(series) if series else {}

    def close(self) -> None:
        """Let go of the run's files."""
        self._feed.close()

    def _series(self) -> LiveSeries | None:
        return self._feed.ledger.series() if self._feed.ledger is not None else None

    def _look(self) -> LiveView:
        """Return the run as it stands."""
        feed = self._feed
        figures = feed.figures()
        if figures is None:
            return LiveView(str(self._path), feed.state, reason=self._reason)
        return LiveView(
            str(self._path), feed.state, figures, self._mfu.of(figures), feed.doing(), facts_of(feed.meta, None),
            created(feed.facts), self._reason,
        )  # fmt: skip


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
