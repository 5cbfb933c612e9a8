"""A run folder, opened: its facts and its events.

Use `Run.open` on what `headway run` left behind, finished or not: when the
launcher was killed, the rings that are still there are read. Times are int64
ns on CLOCK_MONOTONIC of the host that recorded them. docs/run-folder.md lists
every file and key.

>>> is_run(Path("/nonexistent"))
False
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.core.errors import FormatError, InputError
from headway.core.files.bounded_json import read_json
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.recording.assemble import applied, json_object, loaders, trace_of_rings
from headway.trace.recording.deliveries import counts_of
from headway.trace.recording.run_facts import SCHEMA, RunFacts
from headway.trace.rings import spool
from headway.trace.rings.ring import UNRECORDED, UNRECORDED_SUFFIX
from headway.trace.rings.ring_folders import ring_folders
from headway.trace.sync.clocks import refined

_FACTS = ("world_size", "device_type", "start_ns", "end_ns", "cores", "host")
_EVENTS = re.compile(r"a(\d+)-r(\d+)\.parquet")


@dataclass(frozen=True)
class Run:
    """One run, or several hosts' parts of one after `merge`."""

    path: Path
    """The run folder."""

    meta: dict[str, Any]
    """What run.json says, as it is shown and written again: `facts` is for all that computes with it.

    `input`: what caches and orders of the last attempt counted; `incidents`: the failures.
    """

    parts: Parts
    """Events of the last attempt by rank; those in Parquet are not read yet."""

    clock_offset_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> what to add to its times to put them on the first host's clock; empty when all share one."""

    hosts: tuple[Run, ...] = ()
    """After `merge`: each host's part."""

    @functools.cached_property
    def facts(self) -> RunFacts:
        """What run.json says, typed."""
        return RunFacts.of(self.meta)

    @functools.cached_property
    def trace(self) -> Trace:
        """Events of the last attempt, all ranks, in memory."""
        return self.parts.whole()

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Read a run folder.

        Raises `FormatError` when it is none, or when no rank left any event.
        """
        path = Path(path)
        hosts = _facts(path)
        numbers = _attempts(path)
        if not numbers:
            raise FormatError(
                f"{path} holds no events: {_why_nothing(path, hosts)}. What it printed is in {path / 'logs'}."
            )
        parts = _load(path, numbers[-1])
        if len(hosts) == 1:
            # A launcher that was killed has not noted which attempt is the last.
            last = max(numbers[-1], int(hosts[0].get("attempt") or 0))
            facts = {**hosts[0], "attempt": last, **_counted(parts), "incidents": _incidents(path)}
            return cls(path, facts, _with_facts(parts, hosts[0]))
        own = [parts.select([row["rank"] for row in host["ranks"]]) for host in hosts]
        return merge([cls(path, host, _with_facts(part, host)) for host, part in zip(hosts, own, strict=True)])

    def attempts(self) -> list[Parts]:
        """Return the events of every attempt by rank, oldest first."""
        held = {folder: _attempts(folder)[:-1] for folder in self._folders()}
        parts = {
            number: [_load(folder, number) for folder, numbers in held.items() if number in numbers]
            for number in sorted(set().union(*held.values()))
        }
        return [*(_with_facts(Parts.joined(each), self.meta) for each in parts.values()), self.parts]

    def windows(self) -> list[Path]:
        """Return the Kineto files of the deep windows, packed or not yet, by rank and number."""
        files = (file for folder in self._folders() for file in (folder / "windows").glob("r*-w*.json*"))
        return sorted(
            (p for p in files if re.fullmatch(r"r\d+-w\d+\.json(\.gz)?", p.name)),
            key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)],
        )

    def _folders(self) -> list[Path]:
        """Return the folders that hold the run: one, or one per host."""
        return list(dict.fromkeys(host.path for host in self.hosts)) or [self.path]


def is_run(path: str | Path) -> bool:
    """Say whether `path` is a run folder, whole or cut short."""
    path = Path(path)
    return path.is_dir() and (
        (path / "run.json").is_file()
        or any(path.glob("run-host*.json"))
        or bool(ring_folders(path))
        or (path / "events").is_dir()
    )


def merge(runs: Sequence[Run]) -> Run:
    """Join the parts that several hosts recorded of one run; the first one's clock counts.

    Each host paired its monotonic clock with the realtime clock at the start;
    the offsets that follow are held to what matched collectives prove
    (`headway.trace.sync.clocks`). `clock_offset_ns` keeps them apart from the
    events, whose times stay raw.
    Raises `InputError` when there is no part or two parts record one rank.
    """
    if not runs:
        raise InputError("there is no run to merge. Name at least one run folder.")
    if len(runs) == 1:
        return runs[0]
    offsets: dict[int, int] = {}
    shifts = [_shift(runs[0], run) for run in runs]
    for run, shift in zip(runs, shifts, strict=True):
        for rank in _ranks_of(run):
            if rank in offsets:
                raise InputError(f"rank {rank} is in two of the folders. Name each host's part of one run once.")
            offsets[rank] = shift
    parts = Parts.joined([run.parts for run in runs])
    return replace(
        runs[0],
        meta={**_merged_facts(runs, shifts, offsets), **_counted(parts)},
        parts=parts,
        clock_offset_ns=offsets,
        hosts=tuple(runs),
    )


def _shift(first: Run, run: Run) -> int:
    """Return what to add to the times of `run` to put them on the clock of `first`."""
    if run is first:
        return 0
    return refined(run.facts.realtime_shift_ns - first.facts.realtime_shift_ns, first.trace, run.trace)


def _merged_facts(runs: Sequence[Run], shifts: Sequence[int], offsets: dict[int, int]) -> dict[str, Any]:
    """Return one run.json for all parts: sums, joined ranks, the worst exit first; times on the first clock."""
    shifted, facts = list(zip(runs, shifts, strict=True)), [run.facts for run in runs]
    starts = [run.facts.start_ns + shift for run, shift in shifted if run.facts.start_ns is not None]
    ends = [run.facts.end_ns + shift for run, shift in shifted if run.facts.end_ns]
    failed = [run for run in runs if run.facts.exit is not None and run.facts.exit.code]
    own = [run for run in failed if run.facts.exit is not None and run.facts.exit.cls != "infra"]
    rows = [_shifted(row, shift) for run, shift in shifted for row in run.meta.get("ranks") or ()]
    return {
        **runs[0].meta,
        **_tightest_memory(runs),
        **_busiest_load(runs),
        "hosts": [one.host for one in facts],
        "start_ns": min(starts, default=None),
        "end_ns": max(ends) if len(ends) == len(runs) else None,
        "nproc": sum(one.nproc or 0 for one in facts),
        "ranks": sorted(rows, key=lambda row: row["rank"]),
        "exit": (own or failed or runs)[0].meta.get("exit"),
        "dropped": sum(one.dropped for one in facts),
        "bad_losses": {rank: rows for run in runs for rank, rows in (run.meta.get("bad_losses") or {}).items()},
        "loaders": {key: value for run in reversed(runs) for key, value in (run.meta.get("loaders") or {}).items()},
        "clock_offset_ns": {str(rank): offset for rank, offset in offsets.items()},
    }


def _tightest_memory(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the memory facts of the host whose ranks left least of it free: limits are per host."""

    def headroom(facts: RunFacts) -> int:
        return (facts.memory_available_bytes or 0) - sum(
            row.peak_rss_bytes or 0 for row in facts.memory.values() if row
        )

    told = [run for run in runs if run.facts.memory_available_bytes is not None]
    meta = min(told, key=lambda run: headroom(run.facts)).meta if told else {}
    return {key: meta[key] for key in ("memory", "memory_available_bytes", "memory_total_bytes") if key in meta}


def _busiest_load(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the load of the host on which other processes left the fewest cores; nothing where no host tells."""
    loads = [(load.left_cores, run.meta["host_load"]) for run in runs if (load := run.facts.host_load)]
    return {"host_load": min(loads, key=lambda pair: pair[0])[1]} if loads else {}


def _shifted(row: dict[str, Any], shift: int) -> dict[str, Any]:
    """Return a rank's row with its moments on the first host's clock."""
    moments = {key: row[key] + shift for key in ("start_ns", "end_ns") if row.get(key) is not None}
    return {**row, **moments}


def _ranks_of(run: Run) -> list[int]:
    return sorted(set(run.parts.numbers) | {row.rank for row in run.facts.ranks})


def _facts(path: Path) -> list[dict[str, Any]]:
    """Return each host's run.json; a folder with rings only gets one made of what its events say."""
    files = [p for p in [path / "run.json", *sorted(path.glob("run-host*.json"))] if p.is_file()]
    parts = []
    for file in files:
        meta = read_json(file, fix="Copy the run folder again.")
        if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
            found = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
            raise FormatError(f"{file} has schema {found!r}; it must be {SCHEMA!r}. Record the run again.")
        RunFacts.read(meta, str(file))  # refused here, where the file is known
        parts.append(_fold_ranks(path, meta))
    if not parts:
        if not is_run(path):
            raise FormatError(
                f"{path} is not a run folder: it has no run.json, events or rings. Name what run --out made."
            )
        parts = [_facts_from_events(path)]
    # A launcher that was killed has noted neither the loaders nor what became of remedies; the ranks have.
    return [
        {**part, "loaders": part.get("loaders") or loaders(path), "applied": part.get("applied") or applied(path)}
        for part in parts
    ]


def _incidents(path: Path) -> list[dict[str, Any]]:
    """Return the failures that the supervisor of a run noted; [] where it had none."""
    file = path / "incidents.json"
    if not file.is_file():
        return []
    found = read_json(file, fix="Copy the run folder again.")
    rows = found.get("incidents") if isinstance(found, dict) else None
    return [row for row in rows or () if isinstance(row, dict) and "attempt" in row]


def _fold_ranks(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Add the rows that ranks under another launcher wrote themselves (RUN/ranks/r<rank>.json)."""
    rows = {row["rank"]: row for row in meta.get("ranks") or ()}
    for file in sorted((path / "ranks").glob("r*.json")):
        row = json_object(file)
        if "rank" in row and row.get("group_rank", 0) == meta.get("group_rank", 0):
            rows.setdefault(row["rank"], row)
    return {**meta, "ranks": [rows[rank] for rank in sorted(rows)]}


def _facts_from_events(path: Path) -> dict[str, Any]:
    """Return a run.json for a folder that lacks one: bounds from the events, everything else unknown."""
    numbers = _attempts(path)
    if not numbers:
        raise FormatError(f"{path} has neither run.json nor events. Name a folder that run --out made.")
    trace = _load(path, numbers[-1]).whole()
    start_ns, end_ns = trace.span_ns
    ranks = sorted(trace.ranks)
    clock = next((facts["clock"][0] for facts in trace.ranks.values() if facts.get("clock")), [start_ns, start_ns])
    return {
        "schema": SCHEMA,
        "run_id": path.name,
        "attempt": numbers[-1],
        "host": next((facts.get("host") for facts in trace.ranks.values()), None),
        "start_ns": start_ns,
        "end_ns": end_ns,
        "realtime_ns": start_ns + clock[1] - clock[0],
        "nproc": len(ranks),
        "world_size": len(ranks),
        "device_type": trace.meta.get("device_type", "cpu"),
        "ranks": [
            {"rank": rank, "local_rank": rank, "pid": None, "start_ns": start_ns, "end_ns": end_ns, "exit_code": None}
            for rank in ranks
        ],
        "dropped": trace.meta.get("dropped", 0),
    }


def _attempts(path: Path) -> list[int]:
    """Return the attempts that left events or rings."""
    found = {int(m[1]) for p in (path / "events").glob("*.parquet") if (m := _EVENTS.fullmatch(p.name))}
    return sorted(found | {spool.attempt_of(stem) for stem in spool.stems_of_run(path)})


def _why_nothing(path: Path, hosts: Sequence[dict[str, Any]]) -> str:
    """Return why no process of a run recorded anything."""
    for facts in map(RunFacts.of, hosts):
        if facts.env.get("HEADWAY", "").lower() in ("off", "0"):
            return "HEADWAY=off switched the recording off"
        command = facts.script
        script = next((place for place, word in enumerate(command[1:], 1) if word[:1] != "-"), len(command))
        flags = {"-E", "-I", "-S"} & set(command[1:script])
        if flags and "python" in Path(command[0]).name:
            return f"{command[0]} {min(flags)} does not load what begins the recording. Leave {min(flags)} out"
    for link in sorted(link for folder in ring_folders(path) for link in folder.glob(f"*{UNRECORDED_SUFFIX}")):
        return os.readlink(link)
    for log in sorted((path / "logs").glob("r*.err")):
        found = re.search(rf"^headway: ({UNRECORDED}.*)$", log.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return (
        "the script never imported torch, or ended before it did, or its Python was started with another PYTHONPATH "
        "than it was given"
    )


def _load(path: Path, attempt: int) -> Parts:
    """Return the events of one attempt: finalised ranks from Parquet, the others from their rings."""
    files = sorted(
        (path / "events").glob(f"a{attempt}-r*.parquet"),
        key=lambda p: int(_EVENTS.fullmatch(p.name)[2]),  # type: ignore[index]  # the glob admits only such names
    )
    found = [Parts.of_files([file]) for file in files]
    done = {rank for parts in found for rank in parts.ranks}
    found += [Parts.of(trace) for trace in trace_of_rings(path, attempt) if not done & set(trace.ranks)]
    if not found:
        raise FormatError(
            f"{path} holds no readable event of attempt {attempt}. Look at {path / 'logs'} for the reason."
        )
    joined = Parts.joined(found)
    totals = {
        "num_steps": max(parts.meta.get("num_steps", 0) for parts in found),
        "dropped": sum(parts.meta.get("dropped", 0) for parts in found),
    }
    return joined.with_meta({**joined.meta, **totals})


def _counted(parts: Parts) -> dict[str, Any]:
    """Return the entry `input` of the facts: what caches and orders counted, ranks summed; none when nobody counted."""
    counts = counts_of(parts.ranks.values())
    return {"input": counts} if counts else {}


def _with_facts(parts: Parts, meta: dict[str, Any]) -> Parts:
    """Return the same rows with the facts of their run."""
    kept: dict[str, Any] = {key: value for key, value in meta.items() if key in _FACTS}
    return parts.with_meta({**parts.meta, **kept})
