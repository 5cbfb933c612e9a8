"""`headway cluster watch`: the jobs of a service as a live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cluster.service.server import QueueAnswer, log_of
from headway.cluster.service.state import QueueRow
from headway.core.errors import HeadwayError, InputError
from headway.core.units import plural
from headway.report.page.html import Live, ReportData, head_part, page
from headway.report.page.sections import section, text
from headway.verbs.jobs.cluster_service import FOLDER, queue_of
from headway.verbs.shared.live_pages import serve_page

COLUMNS = ("Job", "Name", "State", "Scale", "Share", "Slots", "Steps", "Restarts", "Why")


def watch(
    *, dir: Path = FOLDER, port: int = 0, host: str = "127.0.0.1",
    allow_origin: Annotated[tuple[str, ...], Parameter(negative=())] = (), json: bool = False,
) -> int:  # fmt: skip
    """Serve the jobs of a service as a page that follows them: shares, slots, steps, and why. Ctrl-C ends it.

    The service is only asked. Without a server the page shows how things were left. The address that is printed ends in
    a token, new for each watch: without it nobody on this machine can read the page.

    Example: `headway cluster watch`

    Parameters
    ----------
    dir
        Folder of the service.
    port
        Port to serve on; 0 takes a free one.
    host
        Address to serve on; only this machine can connect by default.
    allow_origin
        Origin of another page that may read the events, as in http://dashboard:3000.
    json
        Print one JSON object with the address instead of text.
    """
    if not log_of(dir).is_file():
        raise InputError(f"{dir} holds no service. Start one: headway cluster serve --slots 2 --dir {dir}")
    serve_page(
        ServicePage(dir),
        lambda url: ({"schema": "headway.cluster-watch/1", "dir": str(dir), "url": url}, f"{dir}: {url}"),
        host=host, port=port, allow_origin=allow_origin, as_json=json,
    )  # fmt: skip
    return 0


class ServicePage:
    """The jobs of a folder's service as `report.page.live_server.LiveSource`."""

    def __init__(self, folder: Path) -> None:
        """Show the service of `folder`; `poll` asks it."""
        self._data = ReportData(str(folder), {"devices": 0, "steps": 0, "wall_s": 0.0})
        self._folder, self._queue, self._serves, self._trouble = folder, QueueAnswer(0, []), False, ""

    def poll(self) -> None:
        """Ask the server, or read the log where none runs."""
        try:
            self._queue, self._serves = queue_of(self._folder)
            self._trouble = ""
        except (HeadwayError, TimeoutError) as reason:  # it hangs, or its log is away: the next look tries again
            self._trouble = str(reason)

    def key(self) -> str:
        """Return the same always: the page has one table, which is a part."""
        return "service"

    def page(self) -> str:
        """Return the page."""
        head = '<p class="live"><span id="live-link" data-link="new">connecting</span></p>'
        markup = page(self._data, Live(head, self._table(), self.key(), self._headline()))
        # The key figures of a run, which a service is not.
        return markup.replace(head_part(self._data, self._headline()), self._head())

    def parts(self) -> dict[str, str]:
        """Return the headline and the table."""
        return {"head": self._head(), "jobs": self._table()}

    def charts(self) -> dict[str, object]:
        """Return nothing: there is no picture."""
        return {}

    def _head(self) -> str:
        return f'<div id="head"><h1>{text(self._headline())}</h1></div>'

    def _headline(self) -> str:
        """Say how the service stands in one sentence."""
        if self._trouble:
            return self._trouble
        jobs = self._queue.jobs
        runs, waits = (sum(job["state"] == state for job in jobs) for state in ("running", "waiting"))
        stands = f"round {self._queue.round}: {plural(runs, 'job')} of {len(jobs)} run, {waits} wait."
        return f"In {stands}" if self._serves else f"No server runs; it was left in {stands}"

    def _table(self) -> str:
        rows = "".join(
            f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in _cells(job))}</tr>" for job in self._queue.jobs
        )
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        return section("jobs", "Jobs", "", body)


def _cells(job: QueueRow) -> list[str]:
    """Return the cells of a job's row, in the order of `COLUMNS`."""
    share = ", ".join(f"{name} {value:.0%}" for name, value in job["allocation"].items())
    return [
        job["id"], job["name"], job["state"], f"{job['scale']}", share, " ".join(job["placement"]),
        f"{job['steps_done']:,}", f"{job['restarts']}", job["reason"],
    ]  # fmt: skip
