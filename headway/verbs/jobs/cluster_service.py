"""`headway cluster serve|submit|queue|cancel|explain`: share devices among training scripts, and ask how that goes.

`headway cluster watch`: the jobs of a service as a live page.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.text import Text

from headway.cluster.model import Cluster
from headway.cluster.policies import SERVED
from headway.cluster.service.server import (
    EXECUTORS,
    Answer,
    AskQueue,
    CancelJob,
    ExplainAnswer,
    ExplainJob,
    JobAnswer,
    Question,
    QueueAnswer,
    ServiceServer,
    SharingOptions,
    SubmitJob,
    called,
    folder_of,
    log_of,
    socket_of,
)
from headway.cluster.service.state import ENDED, QueueRow, ServiceState
from headway.cluster.service.store import EventLog
from headway.core.errors import HeadwayError, InputError
from headway.core.files.private import private_folder
from headway.core.tables import pick
from headway.core.units import plural
from headway.core.wire.channel import ChannelClosed
from headway.report.page.html import Live, ReportData, head_part, page
from headway.report.page.sections import section, text
from headway.report.paper import ScreenOptions, add_row, draw, grid, next_of, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit, serve_page
from headway.verbs.shared.run_options import GivenScript, whole_number

FOLDER = Path("headway-cluster")
"""Where a service is, unless another folder is named."""

ServiceFolder = Annotated[Path, Parameter(help="Folder of the service.")]
"""The option --dir of these verbs."""

ANSWER_S = 30.0
"""A server that has not answered by then hangs."""

Reply = TypeVar("Reply", bound=Answer)


def serve(
    *, slots: str = "", executor: str = "local", policy: str = "las", dir: Path = FOLDER, round_s: float = 360.0,
    port: Annotated[int | None, Parameter(converter=whole_number)] = None,
) -> int:  # fmt: skip
    """Share devices among submitted scripts, by rounds of a policy, until it is told to end.

    A script that saves with a headway.Checkpointer is moved: it saves, leaves, and is restored later, on other slots.
    One that has never saved keeps its slots to its end. Jobs go on when the server ends or is killed; started again on
    the same folder, it goes on where it was.

    Example: `headway cluster serve --slots 2`

    Args:
      slots: Slots of this host or of the cluster: a number, or type=count, separated by commas; by default its GPUs.
      executor:
        local: processes of this host; ray: actors of a Ray cluster; slurm: batch jobs; kueue: Jobs of Kubernetes.
      policy: Who gets how much time; a wrong name lists them all.
      dir: Folder of the service: its log, its socket, and all that jobs print.
      round_s: Seconds of a round: how long a job keeps its slots at least.
      port: Listen to other hosts that see the folder, too: it holds the token that they prove. 0 takes a free port.
    """
    make, _ = pick(EXECUTORS, executor, "executor"), pick(SERVED, policy, "policy of a service")
    if not 0 < round_s < 1e9:
        raise InputError(f"--round-s is {round_s:g}; pass seconds above 0, such as 360.")
    pools = _pools(slots)
    try:
        private_folder(folder_of(dir))
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise InputError(f"--dir {dir} cannot be made ({reason}). Name a folder that you can write.") from None
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    options = SharingOptions(pools, policy, round_s, executor, port)
    with ServiceServer(dir, options, make(dir.resolve(), pools)) as server:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: server.stop())
        print(f"{socket_of(dir)}", flush=True)
        print(f"headway: hand a script in: {_command('submit', dir)} --scale 1 -- train.py", file=sys.stderr)
        server.run()
    return 0


def submit(
    *, dir: ServiceFolder = FOLDER, name: str = "", scale: int = 1, fewest: int = 0, json: AsJson = False,
    script: GivenScript = None,
) -> int:  # fmt: skip
    """Hand a training script to the server; it runs under `headway run`, in this folder.

    Example: `headway cluster submit --scale 2 -- train.py --lr 1e-3`

    Args:
      name: What to call the job; the script's name and a number by default.
      scale: Slots that it needs at once, all of one type: ranks of the script.
      fewest:
        Slots that it can still train on where devices have left and no type has --scale of them: it is restored on as
        many as there are, and on --scale once they are back. 0: it needs exactly --scale.
    """
    if not script:
        raise InputError("no script was given. Put it behind --, as in: headway cluster submit -- train.py --lr 1e-3")
    if not Path(script[0]).is_file():
        raise InputError(f"the script {script[0]!r} does not exist in {Path.cwd()}. Name a file of Python.")
    result = _asked(dir, SubmitJob(name, scale, script, os.getcwd(), fewest), JobAnswer)
    return _emit_job("headway.cluster-submit/1", result.job, as_json=json, command=_command("queue", dir))


def queue(*, dir: ServiceFolder = FOLDER, json: AsJson = False) -> int:
    """Show all jobs of a service: what each is given, where it runs, what it did.

    Without a server the log says how things were when it ended.

    Example: `headway cluster queue`
    """
    result, serves = queue_of(dir)
    if not serves:
        print("headway: no server runs; this is how it was left. Go on with: headway cluster serve", file=sys.stderr)
    reply = {"schema": "headway.cluster-queue/1", "round": result.round, "jobs": result.jobs}
    ended = any(job["state"] == "finished" for job in result.jobs) and all(job["state"] in ENDED for job in result.jobs)
    command = shlex.join(["headway", "cluster", "compare", "--log", str(dir)]) if ended else ""
    return emit(reply, lambda screen: _queue_screen(result, command, screen), as_json=json)


def queue_of(folder: Path) -> tuple[QueueAnswer, bool]:
    """Return how everything is, and whether a server said so, or the log of one that has ended."""
    try:
        return _asked(folder, AskQueue(), QueueAnswer), True
    except ChannelClosed:
        with EventLog(log_of(folder), write=False) as log:
            state = ServiceState.replay(log.read())
        return QueueAnswer(state.round, state.rows()), False


def cancel(job: str, /, *, dir: ServiceFolder = FOLDER, json: AsJson = False) -> int:
    """End a job, whether it waits or runs.

    Example: `headway cluster cancel job3`

    Args:
      job: Its id or name.
    """
    return _emit_job("headway.cluster-cancel/1", _asked(dir, CancelJob(job), JobAnswer).job, as_json=json)


def explain(job: str, /, *, dir: ServiceFolder = FOLDER, json: AsJson = False) -> int:
    """Explain why a job runs or waits: its share, what it is owed, what limits it, and what one more device would give.

    Example: `headway cluster explain job3`

    Args:
      job: Its id or name.
    """
    result = _asked(dir, ExplainJob(job), ExplainAnswer).job
    answer, head = {"schema": "headway.cluster-explain/1", **result}, Text(f"  {result['id']} ({result['name']})")
    return emit(answer, lambda screen: draw([head, paragraph(result["words"])], **screen), as_json=json)


def _pools(slots: str) -> Mapping[str, int]:
    """Read --slots; raises `InputError`."""
    if not slots:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if not gpus:
            raise InputError("this host has no GPU that would be a slot. Pass --slots 2, or --slots v100=4,k80=4.")
        return {"slot": gpus}
    cluster = Cluster.parse(f"slot={slots}" if slots.strip().isdecimal() else slots)
    return dict(zip(cluster.names, cluster.count.tolist(), strict=True))


def _asked(folder: Path, question: Question, expected: type[Reply]) -> Reply:
    """Return what the server of a folder answers; raises `InputError` with the reason where it refuses."""
    try:
        channel = called(folder)
    except ChannelClosed as error:
        if isinstance(question, AskQueue):
            raise
        raise InputError(f"{error} Type: headway cluster serve --slots 2 --dir {folder}") from None
    try:
        channel.send(question)
        result, _ = channel.receive(ANSWER_S)
    except ChannelClosed as error:
        raise InputError(str(error).removeprefix("the other end closed the channel: ")) from None
    finally:
        channel.close()
    assert isinstance(result, expected), "the server of one release answers what it is asked"
    return result


def _command(verb: str, folder: Path) -> str:
    """Return a command about the service of a folder."""
    return shlex.join(["headway", "cluster", verb, *([] if folder == FOLDER else ["--dir", str(folder)])])


def _emit_job(schema: str, row: QueueRow, *, as_json: bool, command: str = "") -> int:
    """Print one job, and the command that says how it goes."""
    text = f"{row['id']} ({row['name']}): {row['state']}"
    text += f", {row['reason']}" if row["reason"] not in ("", row["state"]) else ""
    parts = [Text(f"  {text}"), *next_of(command)]
    return emit({"schema": schema, **row}, lambda screen: draw(parts, **screen), as_json=as_json)


def _queue_screen(result: QueueAnswer, command: str, screen: ScreenOptions) -> str:
    rows = grid("left", "left", "left", "right", "right", "left", "right", "right", "left")
    add_row(rows, "id", "name", "state", "scale", "share", "slots", "steps", "restarts", "", style="dim")
    for row in result.jobs:
        add_row(rows, *_cells(row, " ".join(f"{value:.0%}" for value in row["allocation"].values())))
    head = Text(f"  round {result.round}, {len(result.jobs)} jobs")
    return draw([head, "", uncut(rows), *next_of(command)], **screen)


COLUMNS = ("Job", "Name", "State", "Scale", "Share", "Slots", "Steps", "Restarts", "Why")


def watch(
    *, dir: ServiceFolder = FOLDER, port: int = 0, host: str = "127.0.0.1",
    allow_origin: Annotated[tuple[str, ...], Parameter(negative=())] = (), json: bool = False,
) -> int:  # fmt: skip
    """Serve the jobs of a service as a page that follows them: shares, slots, steps, and why. Ctrl-C ends it.

    The service is only asked. Without a server the page shows how things were left. The address that is printed ends in
    a token, new for each watch: without it nobody on this machine can read the page.

    Example: `headway cluster watch`

    Args:
      port: Port to serve on; 0 takes a free one.
      host: Address to serve on; only this machine can connect by default.
      allow_origin: Origin of another page that may read the events, as in http://dashboard:3000.
      json: Print one JSON object with the address instead of text.
    """
    if not log_of(dir).is_file():
        raise InputError(f"{dir} holds no service. Start one: headway cluster serve --slots 2 --dir {dir}")
    return serve_page(
        ServicePage(dir),
        lambda url: ({"schema": "headway.cluster-watch/1", "dir": str(dir), "url": url}, f"{dir}: {url}"),
        host=host, port=port, allow_origin=allow_origin, as_json=json,
    )  # fmt: skip


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
        rows = ""
        for job in self._queue.jobs:
            share = ", ".join(f"{name} {value:.0%}" for name, value in job["allocation"].items())
            rows += f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in _cells(job, share))}</tr>"
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        return section("jobs", "Jobs", "", body)


def _cells(job: QueueRow, share: str) -> list[str]:
    """Return the cells of a job's row, in the order of `COLUMNS`."""
    return [
        job["id"], job["name"], job["state"], f"{job['scale']}", share, " ".join(job["placement"]),
        f"{job['steps_done']:,}", f"{job['restarts']}", job["reason"],
    ]  # fmt: skip
