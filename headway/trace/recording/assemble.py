"""Turn what the processes of a run recorded into one trace per rank.

Rows get their names, columns, lanes, steps and depth here; loads get their
children; what was overwritten becomes `dropped` rows. Nothing is written:
`headway.runtime.run_folder.finalise` does that. Times in int64 ns on CLOCK_MONOTONIC.

>>> NAMES[CODE["input.next"]]
'input.next'

Which processes of a run are devices: one for each rank, and one for each child that trains by itself.

A rank is the process that the script spawned for it, else the one that made most updates. Children that train
without a process group (one `mp.Process` each, Hogwild) become ranks of their own, with role 'child': they take the
number of a parent that makes no update itself, and the free numbers behind.

>>> by_rank([])
{}
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import Nesting, inside
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import COLLECTIVES, KIND, SPANS
from headway.trace.recording import basis, gaps, rows
from headway.trace.recording import basis as evaluation
from headway.trace.recording.gaps import trimmed
from headway.trace.recording.loads import load_children, name_workers, place_made, thinned
from headway.trace.recording.rows import RecordedRows, lane_name, raw_rows, step_of
from headway.trace.rings import records as spool
from headway.trace.rings.rank_tables import RankTables, json_object
from headway.trace.rings.records import Recorded

UPDATE, BACKWARD, WORKER = (SPANS[name].code for name in ("optimizer.step", "segment.backward", "input.worker"))


def by_rank(stems: Sequence[Path], *, split: bool = True) -> dict[int, list[Recorded]]:
    """Read every process and group them by rank; `split` makes ranks of children that train."""
    groups: dict[int, list[Recorded]] = {}
    for stem in stems:
        found = spool.recorded(stem)
        if found is not None:
            groups.setdefault(found.header.rank, []).append(found)
    for rank in sorted(groups) if split else ():
        for child in _further_trainers(groups[rank]):
            # Its loader workers go with it; what else runs below the parent stays there.
            workers = {int(pid) for pid in child.records["d"][child.records["code"] == WORKER]}
            family = [child, *(process for process in groups[rank] if process.header.pid in workers)]
            groups[rank] = [process for process in groups[rank] if not any(process is one for one in family)]
            groups[max(groups) + 1] = family
    return dict(sorted(groups.items()))


def lead_of(processes: Sequence[Recorded]) -> Recorded:
    """Return the process that is the rank: one that the script spawned for it, else the one with most updates."""

    def weight(process: Recorded) -> tuple[bool, int, bool]:
        role = process.header.role
        return role == "spawned", updates_of(process), role == "main"

    return max(processes, key=weight)


def updates_of(process: Recorded) -> int:
    """Return the optimizer updates that a process made; where it made none, its backwards."""
    codes = process.records["code"]
    return int((codes == UPDATE).sum()) or int((codes == BACKWARD).sum())


def _further_trainers(processes: Sequence[Recorded]) -> list[Recorded]:
    """Return the children that are to be ranks of their own, in order of their start."""
    if any(process.header.role == "spawned" for process in processes):
        return []
    trainers = [process for process in processes if process.header.role == "child" and updates_of(process)]
    trainers.sort(key=lambda process: (process.header.clock_ns, process.header.pid))
    parent_trains = any(process.header.role == "main" and updates_of(process) for process in processes)
    return trainers if parent_trains else trainers[1:]


NAMES = tuple(SPANS)
"""The name table of every trace made here."""

CODE = {name: index for index, name in enumerate(NAMES)}
"""Name -> its index in `NAMES`."""


TOLD = (
    "optimizers", "parameters", "patches", "regions", "coverage", "timers", "script", "gradients", "waits", "loads",
    "python_loops", "collectives",
)  # fmt: skip
"""What a rank says of itself in RUN/tables that goes into `meta`."""

AROUND = [CODE[name] for name in ("forward", "optimizer.closure", "host.script")]
"""Names of stretches that hold others: what is inside keeps its depth."""


def trace_of_rings(run: Path, attempt: int) -> list[Trace]:
    """Return the traces of an attempt that was never finalised, without writing anything."""
    groups = by_rank(spool.stems_of_run(run, attempt=attempt))
    return [build(processes, rank=rank, attempt=attempt, run=run) for rank, processes in groups.items()]


def build(
    processes: Sequence[Recorded],
    *,
    rank: int,
    attempt: int,
    run: Path,
    row: Mapping[str, Any] | None = None,
) -> Trace:
    """Return the trace of one rank from everything its processes recorded."""
    lead = lead_of(processes)
    lanes: list[str] = ["main"]
    parts = [thinned(place_made(raw_rows(process, lanes, leads=process is lead), lanes)) for process in processes]
    name_workers(parts, parts[processes.index(lead)])
    columns = RecordedRows.concat([*parts, *(load_children(part) for part in parts)])
    columns = trimmed(columns, (columns.lane == 0) & (columns.process == lead.header.pid))
    training = np.flatnonzero((columns.lane == 0) & (columns.process == lead.header.pid))
    main = columns.where(training)
    tables = _tables(run, rank, lead)
    known = RankTables.of(tables)
    found = basis.basis_of(main, known.loops)
    gradients = basis.gradients_of(main)
    evaluation.mark_learning(main, gradients, found)
    columns.seq[training] = main.seq
    acts = known.compute is not None and any(model.acts for model in known.compute.models)
    evaluations = evaluation.evaluations(main, gradients, acts=acts)
    bounds = _bounds(main, found, evaluations)
    marks = [
        _process_row(lead, main, row),
        _step_rows(bounds),
        evaluations,
        gaps.gaps(main, bounds, evaluations, gradients, found),
        *(_dropped_rows(p, lanes, p is lead) for p in processes),
    ]
    kept = columns.where(~np.isin(columns.name, [CODE["input.parts"], rows.FORWARD, rows.BACKWARD]))
    everything = RecordedRows.concat([kept, rows.with_forwards(main), *marks])
    everything.step[:] = step_of(everything.start_ns, bounds)
    rows.place(everything, bounds)
    _set_depth(everything)
    order = np.lexsort((everything.depth, everything.lane, everything.start_ns))
    return Trace.from_columns(
        everything.columns(order, rank=rank),
        names=NAMES,
        lanes=lanes,
        groups=known.groups,
        ranks={rank: {**_rank_facts(lead, row, marks[0]), **_told(tables)}},
        meta={
            "source": "headway",
            "attempt": attempt,
            "num_steps": max(len(bounds) - 1, 0),
            "step_basis": found.name,
            "dropped": sum(process.dropped for process in processes),
            "device_type": known.device_type,
            "collectives": list(COLLECTIVES),
            **{key: tables[key] for key in TOLD if key in tables},
        },
    )


def _bounds(main: RecordedRows, found: basis.Basis, evaluations: RecordedRows) -> NDArray[np.int64]:
    """Return [steps + 1]: the start of step 0, then the end of each; empty without any.

    Step 0 begins with the first batch that is no evaluation's, or the first forward that learns, or the first event
    that steps are counted by.
    """
    if not len(found.ends_ns):
        return np.empty(0, np.int64)
    of_input = np.isin(main.name, [CODE["input.iter"], CODE["input.next"]])
    learns = (main.name == evaluation.FORWARD) & (main.seq & evaluation.LEARNS > 0)
    spans = evaluations.start_ns, evaluations.start_ns + evaluations.duration_ns
    started = main.start_ns[(of_input | learns) & ~inside(main.start_ns, spans)]
    return np.concatenate([[min(found.first_ns, started.min(initial=found.first_ns))], found.ends_ns]).astype(np.int64)


def _tables(run: Path, rank: int, lead: Recorded) -> dict[str, Any]:
    """Return what the process that leads has said of itself; a child that trains has a file of its own."""
    own = json_object(run / "tables" / f"p{lead.header.pid}.json") if lead.header.role == "child" else {}
    return own or json_object(run / "tables" / f"r{rank}.json")


def _step_rows(bounds: NDArray[np.int64]) -> RecordedRows:
    n = max(len(bounds) - 1, 0)
    return RecordedRows.of(CODE["step"], bounds[:n], np.diff(bounds) if n else bounds[:0], kind=KIND["MARK"])


def _process_row(lead: Recorded, main: RecordedRows, row: Mapping[str, Any] | None) -> RecordedRows:
    """Return the life of the rank: from the kernel's start time (10 ms steps), not before the launcher's fork."""
    header = lead.header
    ends = main.start_ns + main.duration_ns
    seen = (int(main.start_ns.min()), int(ends.max())) if len(main) else (header.clock_ns, header.clock_ns)
    start = header.process_start_ns or seen[0]
    end = header.end_ns or seen[1]
    if row is not None and row.get("pid") == header.pid:
        start = max(start, int(row["start_ns"]))
        end = int(row["end_ns"] or end)
    start = min(start, seen[0])
    return RecordedRows.of(CODE["process"], np.array([start]), np.array([max(end, seen[1]) - start]), kind=KIND["MARK"])


def _dropped_rows(process: Recorded, lanes: list[str], leads: bool) -> RecordedRows:
    """Return one row per gap in the record numbers: between the neighbours that are still there."""
    records = process.records
    number = np.concatenate([[0], records["number"].astype(np.int64)])
    missing = np.diff(number) - 1
    gaps = np.flatnonzero(missing)
    end = records["start_ns"] + records["duration_ns"]
    start = np.where(gaps > 0, end[gaps - 1], process.header.clock_ns) if len(gaps) else np.empty(0, np.int64)
    until = np.maximum(records["start_ns"][gaps], start)
    rows = RecordedRows.of(CODE["dropped"], start, until - start, kind=KIND["MARK"], bytes=missing[gaps])
    if not leads and len(rows):
        rows.lane[:] = lane_index(lanes, lane_name(process.header, 0, leads=False))
    return rows


def lane_index(lanes: list[str], name: str) -> int:
    """Return the index of lane `name`, adding it when it is new."""
    if name not in lanes:
        lanes.append(name)
    return lanes.index(name)


def _set_depth(rows: RecordedRows) -> None:
    """Nest the rows of each process's lane; bookkeeping and what holds other rows neither nest nor are nested in."""
    real = np.flatnonzero((rows.kind != KIND["MARK"]) & ~np.isin(rows.name, AROUND))
    # Loader workers of different iterators may share a lane while they overlap: each process nests on its own.
    _, key = np.unique(
        np.stack([rows.lane[real].astype(np.int64), rows.process[real]], axis=1), axis=0, return_inverse=True
    )
    rows.depth[real] = Nesting.of(key.reshape(-1), rows.start_ns[real], rows.duration_ns[real]).depth


def _rank_facts(lead: Recorded, row: Mapping[str, Any] | None, life: RecordedRows) -> dict[str, Any]:
    """Return what is known of the rank; `life` is its process row."""
    header = lead.header
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": header.pid,
        "role": header.role,
        "local_rank": header.local_rank,
        "start_ns": int(life.start_ns[0]),
        "end_ns": int(life.start_ns[0] + life.duration_ns[0]),
        "clock": [[header.clock_ns, header.realtime_ns]],
    }
    if row is not None:
        facts["exit_code"] = row.get("exit_code")
    return facts


def _told(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rank itself said: of its input audit facts, counts, kinds of workers; lines of its gaps."""
    names = ("deliveries", "input", "workers", "timers", "pipeline", "script", "gradients", "waits", "loads",
             "python_loops", "collectives")  # fmt: skip
    return {key: tables[key] for key in names if key in tables}


def applied(run: Path) -> list[Any]:
    """Return what the ranks applied or refused: the entries of the lowest rank that wrote any."""
    for path in sorted((run / "applied").glob("r*.json"), key=lambda p: int(p.stem[1:])):
        if found := json_object(path):
            return list(found.get("remedies", []))
    return []


def loaders(run: Path) -> dict[str, dict[str, object]]:
    """Return the facts of each loader, of the lowest rank that has them; what any process saw drawn counts."""
    found: dict[str, dict[str, Any]] = {}
    # In this order a rank's own file comes before those of its loader workers, which know of draws only.
    # A child that trains has a file under its process id: it speaks where no rank does.
    own = sorted((run / "loaders").glob("r*.json"), reverse=True)
    for path in own or sorted((run / "loaders").glob("p*.json"), reverse=True):
        for group, told in json_object(path).items():
            if not isinstance(told, dict):
                continue
            known = found.get(group, {})
            drawn = {
                key: sorted({*(known.get(key) or ()), *(told.get(key) or ())})
                for key in ("draws", "collate_draws")
                if known.get(key) is not None or told.get(key) is not None
            }
            found[group] = {**known, **told, **drawn}
    return found
