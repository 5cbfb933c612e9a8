"""Write the events of a run: one Parquet file per rank and attempt, made of what its rings and spools hold.

Use `finalise_attempt` when the ranks are gone, `finalise` for a whole run
folder: one whose launcher died, or a run without a launcher. `facts` is what
run.json says of the ranks' doings. Times in int64 ns on CLOCK_MONOTONIC.

>>> finalise(Path("/nonexistent"))
[]
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from headway.core.files.whole_file import whole_file
from headway.runtime.recorder.rehearsals import settle
from headway.trace.events import parquet
from headway.trace.recording.assemble import applied, build, json_object, loaders
from headway.trace.recording.devices import by_rank
from headway.trace.rings import spool
from headway.trace.rings.ring_folders import ring_folders


def finalise(run: Path) -> list[Path]:
    """Write the events of every attempt whose rings are still there; returns the files written."""
    attempts = sorted({spool.attempt_of(stem) for stem in spool.stems_of_run(run)})
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
    every = spool.stems_of_run(run, attempt=attempt) if rings is None else spool.stems(rings, attempt=attempt)
    stems = every if rings is None else spool.stems(rings, attempt=attempt, ranks=ranks)
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
        spool.remove(stem)
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


def facts(run: Path, *, ranks: set[int] | None = None) -> dict[str, Any]:
    """Return what run.json says of the ranks' doings: applied, loaders, memory, losses, device, sizes, spawned.

    `ranks` are those of this host, None = all; ranks that a script spawned itself are always found and returned as
    rows under `spawned`.
    """
    import pyarrow.parquet as pq

    steps, dropped, size, device = 0, 0, 0, "cpu"
    spawned: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "events").glob("a*-r*.parquet")):
        tables = json.loads((pq.read_metadata(path).metadata or {}).get(parquet.TABLES_KEY, b"{}"))
        meta, known = tables.get("meta", {}), tables.get("ranks", {})
        for rank, row in _spawned_here(known, meta).items():
            spawned[rank] = row
        if ranks is not None and not {int(rank) for rank in known} & (ranks | set(spawned)):
            continue
        steps += int(meta.get("num_steps", 0))
        dropped += int(meta.get("dropped", 0))
        size += path.stat().st_size
        device = meta.get("device_type", device)
    tables_of = {path.stem[1:]: json_object(path) for path in sorted((run / "tables").glob("r*.json"))}
    memory = {rank: table.get("memory") for rank, table in tables_of.items()}
    settle(run)
    return {
        "applied": applied(run),
        "loaders": loaders(run),
        "memory": {rank: known for rank, known in sorted(memory.items()) if known},
        "bad_losses": {rank: table["bad_losses"] for rank, table in tables_of.items() if table.get("bad_losses")},
        "device_type": device,
        "dropped": dropped,
        "bytes_per_step": round(size / steps, 1) if steps else None,
        "spawned": list(spawned.values()),
    }


def _spawned_here(known: Mapping[str, Mapping[str, Any]], meta: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return rows of the ranks that a script started itself on this host; how they ended only their parent knows."""
    return {
        int(rank): {
            "rank": int(rank),
            "local_rank": int(rank),
            "pid": facts["pid"],
            "start_ns": facts.get("start_ns"),
            "end_ns": facts.get("end_ns"),
            "exit_code": None,
            "attempt": int(meta.get("attempt", 0)),
        }
        for rank, facts in known.items()
        if facts.get("role") in ("spawned", "child") and facts.get("host") == socket.gethostname()
    }
