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
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import converted, read_json
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.recording.assemble import applied, loaders, trace_of_rings
from headway.trace.recording.incident import read_incidents
from headway.trace.recording.loads import counts_of
from headway.trace.recording.run_facts import CUT, SCHEMA, RankRow, RunFacts
from headway.trace.rings import records
from headway.trace.rings.rank_tables import json_object
from headway.trace.rings.ring import UNRECORDED, UNRECORDED_SUFFIX
from headway.trace.rings.ring_folders import ring_folders
from headway.trace.sync.clocks import refined

_EVENTS = re.compile(r"a(\d+)-r(\d+)\.parquet")


@dataclass(frozen=True)
class Run:
    """One run, or several hosts' parts of one after `merge`."""

    path: Path
    """The run folder."""

    meta: dict[str, Any]
    """What run.json says, of several hosts' the first one's, as it is shown: `facts` is for all that computes."""

    facts: RunFacts
    """The same, typed and completed by what ranks wrote themselves; of all hosts after `merge`."""

    parts: Parts
    """Events of the last attempt by rank; those in Parquet are not read yet."""

    hosts: tuple[Run, ...] = ()
    """After `merge`: each host's part."""

    @property
    def clock_offset_ns(self) -> dict[int, int]:
        """Rank -> what to add to its times to put them on the first host's clock; empty when all share one."""
        return self.facts.clock_offset_ns

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
        hosts = _hosts(path)
        numbers = _attempts(path)
        if not numbers:
            reason = _why_nothing(path, [facts for _, facts in hosts])
            raise FormatError(f"{path} holds no events: {reason}. What it printed is in {path / 'logs'}.")
        parts = _load(path, numbers[-1])
        if len(hosts) == 1:
            ((meta, facts),) = hosts
            # A launcher that was killed has not noted which attempt is the last.
            failures = tuple(row for row in read_incidents(path) if row.ended_attempt)
            more = {"attempt": max(numbers[-1], facts.attempt), "incidents": failures}
            facts = structs.replace(facts, **more, input=counts_of(parts.ranks.values()))
            return cls(path, meta, facts, _with_facts(parts, facts))
        own = [parts.select([row.rank for row in facts.ranks]) for _, facts in hosts]
        return merge([cls(path, *host, _with_facts(part, host[1])) for host, part in zip(hosts, own, strict=True)])

    def attempts(self) -> list[Parts]:
        """Return the events of every attempt by rank, oldest first."""
        held = {folder: _attempts(folder)[:-1] for folder in self._folders()}
        parts = {
            number: [_load(folder, number) for folder, numbers in held.items() if number in numbers]
            for number in sorted(set().union(*held.values()))
        }
        return [*(_with_facts(Parts.joined(each), self.facts) for each in parts.values()), self.parts]

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
    return path.is_dir() and (is_described(path) or bool(ring_folders(path)) or (path / "events").is_dir())


def run_near(path: str | Path) -> str:
    """Return a sentence on the run that `path`, itself no run, is a file of, or on the runs in it; '' without any.

    >>> run_near("/nonexistent")
    ''
    """
    path = Path(path)
    if path.is_file() and is_run(path.parent):
        return f"It is a file of the run {path.parent}: name that folder."
    runs = sorted(str(folder) for folder in path.iterdir() if is_run(folder)) if path.is_dir() else []
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f"It holds the run{'s' if len(runs) > 1 else ''} {', '.join(runs[:3])}{more}: name one." if runs else ""


def is_described(path: Path) -> bool:
    """Say whether a run folder has what its launcher writes: run.json, or one of each host."""
    return (path / "run.json").is_file() or any(path.glob("run-host*.json"))


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
        for rank in sorted(set(run.parts.numbers) | {row.rank for row in run.facts.ranks}):
            if rank in offsets:
                raise InputError(f"rank {rank} is in two of the folders. Name each host's part of one run once.")
            offsets[rank] = shift
    parts = Parts.joined([run.parts for run in runs])
    facts = structs.replace(_merged_facts(runs, shifts, offsets), input=counts_of(parts.ranks.values()))
    meta = {**runs[0].meta, "exit": _worst(runs).meta.get("exit"), "dropped": facts.dropped}
    meta["loaders"] = {key: row for run in reversed(runs) for key, row in (run.meta["loaders"] or {}).items()}
    return Run(runs[0].path, meta, facts, parts, tuple(runs))


def _shift(first: Run, run: Run) -> int:
    """Return what to add to the times of `run` to put them on the clock of `first`."""
    if run is first:
        return 0
    return refined(run.facts.realtime_shift_ns - first.facts.realtime_shift_ns, first.trace, run.trace)


def _worst(runs: Sequence[Run]) -> Run:
    """Return the host whose exit is that of the run: one that failed by a fault of its own before one that followed."""
    failed = [run for run in runs if run.facts.exit is not None and run.facts.exit.code]
    own = [run for run in failed if run.facts.exit is not None and run.facts.exit.cls != "infra"]
    return (own or failed or runs)[0]


def _merged_facts(runs: Sequence[Run], shifts: Sequence[int], offsets: dict[int, int]) -> RunFacts:
    """Return the facts of all parts: sums, joined ranks, the worst exit first; times on the first clock.

    Limits of memory are per host, so it is that of the host whose ranks left least of it free; the load is that of the
    host on which other processes left the fewest cores.
    """
    facts = [run.facts for run in runs]
    shifted = list(zip(facts, shifts, strict=True))
    starts = [one.start_ns + shift for one, shift in shifted if one.start_ns is not None]
    ends = [one.end_ns + shift for one, shift in shifted if one.end_ns]
    rows = [row.moved(shift) for one, shift in shifted for row in one.ranks]
    known = [one for one in facts if one.memory_available_bytes is not None]
    fullest = min(known, key=_headroom_bytes, default=facts[0])
    loads = [load for one in facts if (load := one.host_load)]
    return structs.replace(
        facts[0],
        memory=fullest.memory,
        memory_available_bytes=fullest.memory_available_bytes,
        host_load=min(loads, key=lambda load: load.left_cores, default=None),
        hosts=tuple(one.host for one in facts),
        start_ns=min(starts, default=None),
        end_ns=max(ends) if len(ends) == len(runs) else None,
        nproc=sum(one.nproc or 0 for one in facts),
        ranks=tuple(sorted(rows, key=lambda row: row.rank)),
        exit=_worst(runs).facts.exit,
        dropped=sum(one.dropped for one in facts),
        bad_losses={rank: found for one in facts for rank, found in one.bad_losses.items()},
        threads={rank: count for host in facts for rank, count in host.threads.items()},
        loaders={key: loader for one in reversed(facts) for key, loader in one.loaders.items()},
        clock_offset_ns=offsets,
    )


def _headroom_bytes(facts: RunFacts) -> int:
    """Return the memory of the host that its ranks left free."""
    return (facts.memory_available_bytes or 0) - sum(row.peak_rss_bytes or 0 for row in facts.memory.values() if row)


def _hosts(path: Path) -> list[tuple[dict[str, Any], RunFacts]]:
    """Return each host's run.json, and what it says; of a folder with rings only one made of what its events say."""
    found = []
    for file in [p for p in [path / "run.json", *sorted(path.glob("run-host*.json"))] if p.is_file()]:
        meta = read_json(file, fix="Copy the run folder again.")
        schema = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        if schema != SCHEMA:
            raise FormatError(f"{file} has schema {schema!r}; it must be {SCHEMA!r}. Record the run again.")
        meta = _completed(path, meta)
        found.append((meta, _with_rows(path, RunFacts.read(meta, str(file)))))
    if not found and not is_run(path):
        raise FormatError(f"{path} is not a run folder: it has no run.json, events or rings. Name what run --out made.")
    if not found:
        meta = _completed(path, _facts_from_events(path))
        found = [(meta, RunFacts.of(meta))]
    return found


def _completed(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Add what a launcher that was killed has noted no more: the loaders, what became of remedies, and its end."""
    given = {"loaders": meta.get("loaders") or loaders(path), "applied": meta.get("applied") or applied(path)}
    return {**meta, **given, **({"exit": {"code": 137, "class": CUT}} if _is_cut_off(path, meta) else {})}


def _is_cut_off(path: Path, meta: dict[str, Any]) -> bool:
    """Whether a run of this host has no end although none of its processes lives."""
    if meta.get("exit") or meta.get("end_ns", 0) is not None or meta.get("host") != socket.gethostname():
        return False
    pids = [
        pid[1] for folder in ring_folders(path) for file in folder.glob("*.ring") if (pid := _PID.search(file.name))
    ]
    return bool(pids) and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


_PID = re.compile(r"-p(\d+)")


def _with_rows(path: Path, facts: RunFacts) -> RunFacts:
    """Add the rows that ranks under another launcher wrote themselves (RUN/ranks/r<rank>.json)."""
    written = (json_object(file) for file in sorted((path / "ranks").glob("r*.json")))
    own = [converted(row, RankRow)[0] for row in written if isinstance(row.get("rank"), int)]
    rows = {row.rank: row for row in own if row.group_rank == facts.group_rank} | {row.rank: row for row in facts.ranks}
    return structs.replace(facts, ranks=tuple(rows[rank] for rank in sorted(rows)))


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
    return sorted(found | {records.attempt_of(stem) for stem in records.stems_of_run(path)})


def _why_nothing(path: Path, hosts: Sequence[RunFacts]) -> str:
    """Return why no process of a run recorded anything."""
    for facts in hosts:
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
    if any((path / "tables").glob("r*.json")):  # a process of torch was recorded
        return f"what was recorded is gone from {path / 'events'} and {path / 'rings'}"
    if any(facts.start_ns and facts.end_ns is None for facts in hosts):
        return "headway run was killed, or still runs, and nothing was recorded by then"
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


def _with_facts(parts: Parts, facts: RunFacts) -> Parts:
    """Return the same rows with the facts of their run."""
    names = ("world_size", "device_type", "start_ns", "end_ns", "cores", "host")
    return parts.with_meta({**parts.meta, **{name: getattr(facts, name) for name in names}})
