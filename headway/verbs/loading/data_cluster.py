"""`headway data cluster`: write a table with the rows of each session side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.units import format_bytes
from headway.data.features.sessions import BATCH, cluster_parquet
from headway.report.paper import ScreenOptions, add_row, draw, grid
from headway.verbs.shared.output import emit


def cluster(
    source: Path,
    target: Path,
    /,
    *,
    by: str = "session",
    time: str | None = None,
    shuffle: int | None = None,
    batch_size: int = BATCH,
    json: bool = False,
) -> int:
    """Write a Parquet table with the rows of each session side by side, in time order inside.

    Rows of one session repeat most of each other's id lists. Side by side
    they compress, and a batch stores each different list once
    (headway.data.features.jagged). Clustered rows are not independent: shuffle whole
    sessions when reading them (headway.data.session_order).

    Example: `headway data cluster log.parquet clustered.parquet --by session --time timestamp`

    Parameters
    ----------
    source
        The Parquet file to read.
    target
        The Parquet file to write; it appears whole or not at all.
    by
        Column that names the session of each row.
    time
        Column that orders the rows of a session; the order they have by default.
    shuffle
        Seed of a random order of the sessions; that of their first rows by default.
    batch_size
        Rows of the batches that sessions per batch are reported for.
    json
        Print one JSON object instead of text.
    """
    done = cluster_parquet(source, target, by=by, time=time, shuffle=shuffle, batch_size=batch_size)
    answer = {"schema": "headway.data.cluster/1", "target": str(target), **done.to_json()}
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Return the figures before and after."""
    table = grid("left", "right", "right")
    add_row(table, "", "before", "after", style="dim")
    add_row(table, "file", format_bytes(answer["bytes_before"]), format_bytes(answer["bytes_after"]))
    mixed = [f"{answer[f'sessions_per_batch_{when}']:.4g}" for when in ("before", "after")]
    add_row(table, f"sessions per batch of {answer['batch_size']}", *mixed)
    rows = f"{answer['num_rows']} rows of {answer['num_sessions']} sessions, {answer['rows_per_session']:.1f} each"
    return draw(
        [Text(f"  {rows}", style="bold"), table, Text(f"  Written to {answer['target']}", style="dim")], **screen
    )
