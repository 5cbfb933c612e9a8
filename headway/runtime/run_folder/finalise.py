"""Write the events of a run: one Parquet file per rank and attempt, made of what its rings and spools hold.

Use `finalise_attempt` when the ranks are gone, `finalise` for a whole run
folder: one whose launcher died, or a run without a launcher. `doings` is what
run.json says of the ranks' doings. Times in int64 ns on CLOCK_MONOTONIC.

>>> finalise(Path("/nonexistent"))
[]
"""

from __future__ import annotations

import gzip
import socket
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from headway.core.files.safe_files import decode_json, whole_file
from headway.runtime.recorder.rehearsals import settle
from headway.runtime.run_folder.recording import RankDoings
from headway.trace.events import parquet
from headway.trace.recording.assemble import applied, build, by_rank, loaders
from headway.trace.rings import records
from headway.trace.rings.rank_tables import counted_calls, rank_tables
from headway.trace.rings.ring_folders import ring_folders


def finalise(run: Path) -> list[Path]:
    """Write the events of every attempt whose rings are still there; returns the files written."""
    attempts = sorted({records.attempt_of(stem) for stem in records.stems_of_run(run)})
    written = [path for attempt in attempts for path in finalise_attempt(run, attempt)]
    pack_windows(run / "windows")
    return written


def finalise_attempt(
    run: Path,
    attempt: int,
    *,
    rows: Mapping[int, Mapping[str, Any]] | None = None,
    rings: Path | None = None,
    ranks: Set[int] | None = None,
) -> list[Path]:
    """Write one Parquet file per rank of `attempt`, then remove its rings; returns the files written.

    `rows` are the launcher's facts of each rank (start_ns, end_ns); `rings` restricts it to one host's rings, `ranks`
    to those that their processes opened.
    """
    every = records.stems_of_run(run, attempt=attempt) if rings is None else records.stems(rings, attempt=attempt)
    stems = every if rings is None else records.stems(rings, attempt=attempt, ranks=ranks)
    # Children that train get free numbers: none is free while only some of the ranks are at hand.
    split = len(stems) == len(every) and (rings is None or ring_folders(run) == [rings])
    written = []
    for number, processes in by_rank(stems, split=split).items():
        trace = build(processes, rank=number, attempt=attempt, run=run, row=(rows or {}).get(number))
        path = run / "events" / f"a{attempt}-r{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write(trace, path)
        written.append(path)
    for stem in stems:
        records.remove(stem)
    return written


def windows_of(windows: Path, ranks: Set[int] | None = None) -> list[Path]:
    """Return the files of the deep windows of `ranks`, None = all; packed or not."""
    patterns = ["r*-w*.json*"] if ranks is None else [f"r{rank}-w*.json*" for rank in sorted(ranks)]
    return sorted(path for pattern in patterns for path in windows.glob(pattern))


def pack_windows(windows: Path, ranks: Set[int] | None = None) -> None:
    """Compress the profiler's JSON of the deep windows (of `ranks`, None = all): it shrinks to about a twentieth."""
    for path in windows_of(windows, ranks):
        if path.suffix != ".json":
            continue
        with whole_file(path.with_name(f"{path.name}.gz")) as draft, gzip.open(draft, "wb", compresslevel=3) as packed:
            packed.write(path.read_bytes())
        path.unlink()


class _RankFacts(msgspec.Struct, frozen=True):
    """A rank in a file of events."""

    pid: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    role: str = ""
    host: str = ""


class _FileMeta(msgspec.Struct, frozen=True):
    """A file of events."""

    num_steps: int = 0
    dropped: int = 0
    attempt: int = 0
    device_type: str | None = None


class _FileTables(msgspec.Struct, frozen=True):
    """What a file of events says beside its rows."""

    meta: _FileMeta = _FileMeta()
    ranks: dict[int, _RankFacts] = {}


def doings(run: Path, *, ranks: set[int] | None = None) -> RankDoings:
    """Return what run.json says of `ranks`, those of this host, None = all; those that the script spawned count."""
    import pyarrow.parquet as pq

    steps, dropped, size, device = 0, 0, 0, "cpu"
    spawned: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "events").glob("a*-r*.parquet")):
        text = (pq.read_metadata(path).metadata or {}).get(parquet.TABLES_KEY, b"{}")
        tables = decode_json(text, str(path), _FileTables)
        meta, known = tables.meta, tables.ranks
        for rank, row in known.items():
            if row.role in ("spawned", "child") and row.host == socket.gethostname():
                moments = {"start_ns": row.start_ns, "end_ns": row.end_ns, "exit_code": None, "attempt": meta.attempt}
                spawned[rank] = {"rank": rank, "local_rank": rank, "pid": row.pid, **moments}
        if ranks is not None and not known.keys() & (ranks | spawned.keys()):
            continue
        steps, dropped, size = steps + meta.num_steps, dropped + meta.dropped, size + path.stat().st_size
        device = meta.device_type or device
    tables_of = rank_tables(run)
    settle(run)
    compute = next((table.compute for _, table in sorted(tables_of.items()) if table.compute), None)
    return RankDoings(
        applied=applied(run),
        loaders=loaders(run),
        memory={rank: table.memory for rank, table in tables_of.items() if table.memory},
        bad_losses={rank: table.bad_losses for rank, table in tables_of.items() if table.bad_losses},
        threads={rank: table.threads for rank, table in tables_of.items() if table.threads},
        compute=compute and msgspec.structs.replace(compute, calls=counted_calls(run)),
        device_type=device,
        dropped=dropped,
        bytes_per_step=round(size / steps, 1) if steps else None,
        spawned=spawned,
    )
