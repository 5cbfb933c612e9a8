"""`headway data serve` and `headway data status`: a data server by hand, and how the servers of this user are."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.files.private import runtime_directory
from headway.core.units import format_bytes, format_seconds, parse_bytes
from headway.core.wire.channel import ChannelClosed, connect
from headway.data.service.messages import FROM_SERVER, StatusReply, StatusRequest
from headway.data.service.stock import DataServer
from headway.report.paper import ScreenOptions, add_row, draw, headed
from headway.verbs.shared.output import AsJson, emit, imported
from headway.verbs.shared.run_options import GivenPath, Size

ANSWER_S = 5.0
"""A server that has not told how it is by then hangs."""


def serve(
    target: str,
    /,
    *,
    socket: GivenPath | None = None,
    cache: Size = "0",
    order: str = "auto",
    threads: int = 0,
    window: int = 4,
    idle: float | None = None,
) -> int:
    """Serve a dataset or pipeline to all jobs on this host, until it is told to end.

    The data is fetched and prepared once, also for jobs that read only a part
    of it, begin at different moments and run at different speeds. A job uses
    it with DataLoader(dataset, server=PATH), over the same dataset.

    Example: `headway data serve my_project.data:train_set --cache 8GiB`

    Args:
      target:
        MODULE:NAME of a map-style dataset, a headway.data.Pipeline, or a function without arguments that returns one.
      socket: Path of the server's socket; one in the runtime directory by default. It is printed.
      cache: Memory for examples, such as 8GiB, besides the batches under way.
      order: In which order jobs get their items: auto, independent, shared, dependent, opportunistic.
      threads: Threads that prepare; as many as there are cores by default.
      window: Batches made ahead per rank.
      idle: End after so many seconds without jobs; never by default.
    """
    options = DataServer(
        order=order, cache_bytes=parse_bytes(cache), threads=threads, window=window,
        idle_s=math.inf if idle is None else idle,
    )  # fmt: skip
    dataset = _imported(target)
    from headway.data.service import torch_start as serving  # it needs torch, which `--help` must not

    path = socket or serving.path_for(dataset)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    serving.run(path, dataset, options, ready=lambda: print(f"{path}", flush=True))
    return 0


def status(path: Path | None = None, /, *, json: AsJson = False) -> int:
    """Show the status of this user's data servers: jobs, hits, bytes; and which ones died and left their sockets.

    Example: `headway data status`

    Args:
      path: Socket of one server; all in the runtime directory by default.
    """
    paths = [path] if path is not None else sorted(runtime_directory().glob("data-*.sock"))
    servers = [facts for each in paths if (facts := _asked(each, must=path is not None)) is not None]
    answer = {"schema": "headway.data.status/1", "servers": servers}
    return emit(answer, lambda screen: _screen(servers, screen), as_json=json)


def _imported(target: str) -> Any:
    """Return what MODULE:NAME names. Raises `InputError` on what cannot be imported or served."""
    found = imported(target, "my_project.data:train_set")
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        found = found()
    if hasattr(found, "stages") and hasattr(found, "loader"):
        found = found.loader(workers="threads").dataset
    if not hasattr(found, "__len__"):
        raise InputError(f"{target} is a {type(found).__name__} without length. Name a map-style dataset or Pipeline.")
    return found


def _asked(path: Path, *, must: bool) -> dict[str, Any] | None:
    """Return what the server at `path` says of itself, or that it died; None when it ended and need not be there."""
    try:
        channel = connect(path, 0.0, types=FROM_SERVER)
        channel.send(StatusRequest())
        told, _ = channel.receive(ANSWER_S)
        channel.close()
    except TimeoutError:
        return {"path": str(path), "pid": channel.peer.pid, "answers": False, "dead": False}
    except ChannelClosed as error:
        if must:
            raise InputError(f"{error} See the servers that run: headway data status.") from error
        if not path.exists():  # it was just ending
            return None
        left = [each for each in (path, Path(f"{path}.lock"), path.with_suffix(".log")) if each.exists()]
        return {"path": str(path), "pid": None, "answers": False, "dead": True, "remove": [str(each) for each in left]}
    return {**told.facts, "answers": True, "dead": False} if isinstance(told, StatusReply) else None


def _screen(servers: list[dict[str, Any]], screen: ScreenOptions) -> str:
    if not servers:
        return "no data server runs"
    parts: list[Any] = []
    for facts in servers:
        parts += [*_server(facts), ""]
    return draw(parts, **screen)


def _server(facts: Mapping[str, Any]) -> list[Any]:
    if facts["dead"]:
        return [
            Text(f"  {facts['path']}", style="bold"),
            Text("  its server died; the next one for this dataset takes its place. To remove what it left:"),
            Text(f"    rm {shlex.join(facts['remove'])}"),
        ]
    head = Text(f"  {facts['path']}  (process {facts['pid']})", style="bold")
    if not facts["answers"]:
        return [head, Text("  does not answer")]
    cache = facts["cache"]
    used, room = (sum(cache[key].values()) for key in ("used_bytes", "capacity_bytes"))
    hits, prepared = sum(facts["hits"].values()), sum(facts["prepared"].values())
    asked = hits + prepared + facts["shared"]
    lines = [
        f"  {facts['fingerprint'].rsplit(' ', 1)[0]}, {facts['order']} order, {facts['threads']} threads, "
        f"up {format_seconds(facts['up_s'])}",
        f"  cache {format_bytes(used)} of {format_bytes(room)}, batches {format_bytes(facts['ring_bytes'])}",
        f"  {asked} examples: {prepared} prepared, {hits} from the cache, {facts['shared']} shared on their way",
        f"  storage: {facts['loads']} reads, {format_bytes(facts['read_bytes'])}",
        *(f"  note: {note}" for note in facts["notes"]),
    ]
    table = headed("job", "epoch", "batches", "examples/s", "ranks here")
    for name, job in facts["jobs"].items():
        here = f"{len(job['ranks'])} of {job['world_size']}"
        add_row(table, name, str(job["epoch"]), str(job["batches"]), f"{job['examples_per_s']:.4g}", here)
    return [head, *map(Text, lines), *([table] if facts["jobs"] else [])]
