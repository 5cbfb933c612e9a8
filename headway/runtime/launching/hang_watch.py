"""Notices that ranks make no progress, finds out what each is doing, and says so.

Use it in the launcher: it lives on what the drain reads anyway, the records
of the rings and their progress pages, and asks nothing of a rank before it
suspects a hang. A rank is late when `now - last progress > max(floor,
5 x p99 of the section's recent durations)`; sections are set-up, step and
checkpoint, each with a floor of its own. While any rank is in set-up or in a
checkpoint and not late there, nobody is, and that while does not count for
those that wait; nor is anybody late when all are suspended alike.
On suspicion each rank's state is read, its Python stacks and its Flight
Recorder's entries are asked for with a deadline, and RUN/hang/<n>.json is
written. Times in ns on CLOCK_MONOTONIC.

Where ranks train on devices the host runs ahead: the ranks that block first
in Python are the innocent ones as often as not. There nobody is blamed from
where the hosts stand; what each rank's queue holds tells (`flight_answers`).

>>> limit_s("step", [0.1, 0.2]), limit_s("step", [20.0]), limit_s("setup", [])
(30.0, 100.0, 600.0)
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError
from headway.core.units import format_seconds
from headway.ledger.hang import WaitOrigin, localise
from headway.ledger.hang_reports import of_dumps
from headway.runtime.host import process_probe
from headway.runtime.launching.supervision import LOOK_S, LOOKS, proven
from headway.runtime.recorder import flight_answers
from headway.runtime.run_folder.recording import write_json
from headway.runtime.script.hang_place import add_places
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import IN_BACKGROUND, SPAN_OF_CODE, SPANS
from headway.trace.rings.rank_tables import rank_tables
from headway.trace.rings.records import Page, RecordRingReader, RingHeader

SCHEMA = "headway.hang-watch/1"

FLOORS_S: dict[str, float] = {"setup": 600.0, "step": 30.0, "evaluation": 600.0, "checkpoint": 300.0}
"""Section -> seconds without progress below which nobody is suspected. Conservative: an evaluation that records
nothing, or a large save over a slow network, is no hang, whatever timeout was given for steps."""

FACTOR = 5.0
"""So many times the usual (p99) duration of a section is too long; nvidia-resiliency-ext uses the same number."""

SETTLED = 3
"""Updates after which steps are steps: the first ones compile, allocate and connect, and count as set-up."""

RECENT = 256
"""Durations of each section that are remembered."""

PAUSE_NS = 5_000_000_000
"""A gap between two looks (0.2 s apart) longer than this: the launcher itself was suspended, and the ranks with it."""

PROBE_S = 2.0
"""Deadline of everything that is asked of a suspect, all ranks at once."""

QUICK_S = 0.1
"""Deadline of what blames nobody, where a job is about to be ended."""

STOPPED = frozenset("TtZX")
"""States of a process that runs no code: stopped, traced, zombie, gone."""

PHASES = ("setup", "evaluation", "input", "forward", "backward", "update", "checkpoint")
"""What a rank is doing, in the order of a step."""

_STEP, _NEXT, _BACKWARD = (SPANS[name].code for name in ("optimizer.step", "input.next", "segment.backward"))
_FORWARD, _MODE = SPANS["forward"].code, SPANS["mode"].code
_SAVES = [SPANS[f"checkpoint.{name}"].code for name in ("save", "snapshot", "wait")]
_HOST = [f"host.{name}" for name in ("gc", "logging", "cpu", "spins", "recording")]
_MARKS = [SPANS[name].code for name in (*_HOST, "region", "eval.mark", "epoch", *IN_BACKGROUND)]


def limit_s(section: str, durations_s: Sequence[float], floors_s: Mapping[str, float] = FLOORS_S) -> float:
    """Return after how many seconds without progress a rank is late, given the section's recent durations."""
    usual = float(np.percentile(durations_s, 99)) if len(durations_s) else 0.0
    return max(floors_s[section], FACTOR * usual)


@dataclass(slots=True)
class WatchedRank:
    """One rank process as the watch knows it."""

    header: RingHeader
    """Who it is."""
    stacks: Path = Path("/dev/null")
    """The file beside its ring that its stacks go to."""
    pipe: Path = Path("/dev/null")
    """The pipe beside its ring by which it is asked for its Flight Recorder."""
    page: Page | None = None
    """Its progress page at the last look."""
    lane: int = 0
    """Lane of its training thread."""
    record_ns: int = 0
    """End of its newest record on that lane."""
    code: int = 0
    """Name of that record, collections and log lines left out."""
    has_loader: bool = False
    """Whether it ever waited in `next(loader)`."""
    update_ns: int = 0
    """End of its last update, by the records."""
    evaluates: bool = False
    """Whether the newest thing known of its model is that it was set to evaluation, or computed without gradients."""
    durations_s: dict[str, deque[float]] = field(
        default_factory=lambda: {section: deque(maxlen=RECENT) for section in FLOORS_S}
    )
    """Section -> its recent durations."""

    def add(self, records: NDArray[np.void]) -> None:
        """Take in what was drained of it."""
        ends = records["start_ns"] + np.maximum(records["duration_ns"], 0)
        updates = records["code"] == _STEP
        if updates.any():
            self.lane = int(records["lane"][updates][-1])
            moments = np.concatenate([[self.update_ns], ends[updates]]) if self.update_ns else ends[updates]
            self.durations_s["step"].extend((np.diff(moments) / 1e9).tolist())
            self.update_ns = int(moments[-1])
        own = records["lane"] == self.lane
        modes = np.flatnonzero(own & np.isin(records["code"], (_STEP, _FORWARD, _MODE)))
        if len(modes):
            newest = records[modes[-1]]  # b: 1 = with gradients, of a forward; training, of a mode
            self.evaluates = bool(newest["code"] != _STEP and not newest["b"] & 1)
        saves = own & np.isin(records["code"], _SAVES)
        self.durations_s["checkpoint"].extend((records["duration_ns"][saves] / 1e9).tolist())
        self.has_loader |= bool((own & (records["code"] == _NEXT)).any())
        if own.any():
            self.record_ns = max(self.record_ns, int(ends[own].max()))
        telling = np.flatnonzero(own & ~np.isin(records["code"], _MARKS))
        if len(telling):
            self.code = int(records["code"][telling[-1]])

    @property
    def op(self) -> str | None:
        """The operation that its page says is open."""
        return SPAN_OF_CODE.get(self.page.op) if self.page is not None else None

    @property
    def section(self) -> str:
        """What its limit goes by; the end of the process goes by that of its set-up."""
        op = self.op or ""
        if op.startswith("checkpoint."):
            return "checkpoint"
        settled = self.page is not None and self.page.step >= SETTLED and not self.header.end_ns
        if settled and self.evaluates:
            return "evaluation"
        return "step" if settled and op not in ("host.compile", "comm.init") else "setup"

    @property
    def phase(self) -> str:
        """What it is doing, one of `PHASES`; between a backward's end and the update's nothing tells where."""
        if self.section != "step":
            return self.section
        if self.op == "segment.backward" or self.op == "comm.wait":
            return "backward"
        if self.code == _STEP:
            return "input" if self.has_loader else "forward"
        return "update" if self.code == _BACKWARD else "forward"

    @property
    def progress_ns(self) -> int:
        """When it was last seen to get on: a record, an update, or an operation that it entered."""
        page = self.page
        known = [self.record_ns, self.header.process_start_ns or self.header.clock_ns]
        if page is not None:
            known += [page.progress_ns, page.since_ns]
        return max(known)

    @property
    def position(self) -> tuple[int, int]:
        """How far it has come: updates, then the phase."""
        return (self.page.step if self.page is not None else 0), PHASES.index(self.phase)


class HangWatch:
    """Watches the ranks of one host through the drain; `add` and `look` run in its thread."""

    def __init__(
        self,
        run: Path,
        *,
        world_size: int,
        say: Callable[[str], None],
        timeout_s: float | None = None,
        floors_s: Mapping[str, float] = FLOORS_S,
        acts_on_proof: bool = False,
    ) -> None:
        """`say` prints one line. After `timeout_s` seconds without progress `expired` becomes true; None = never.

        It does so without a timeout, too, where it `acts_on_proof` and `supervision` finds one.
        """
        self.run, self.world_size, self._say, self.timeout_s = run, world_size, say, timeout_s
        self._floors_s = {**FLOORS_S, **floors_s}
        self._acts_on_proof = acts_on_proof
        self.report: Path | None = None
        """The report of the last suspicion."""
        if timeout_s is not None:
            self._floors_s["step"] = min(self._floors_s["step"], timeout_s)
        self.expired = False
        """Whether the run is to be ended: no progress for the time that was asked for, and what was found is saved."""
        self.blamed: int | None = None
        """The silent rank of the last suspicion, None when there was not exactly one."""
        self.failure: Exception | None = None
        """What stopped the watch."""
        self._ranks: dict[int, WatchedRank] = {}
        self.forgotten: set[int] = set()
        """Processes that are gone, and that the others do without."""
        self._looked_ns = self._resumed_ns = self._patient_ns = 0
        self._told: tuple[int, ...] | None = None
        self._collector: threading.Thread | None = None

    def begin(self) -> None:
        """Forget the ranks of an earlier attempt."""
        self.finish()
        self._ranks.clear()
        self.expired, self._told, self.report = False, None, None
        self._looked_ns = self._resumed_ns = self._patient_ns = 0

    def finish(self) -> None:
        """Wait until what is being collected is written."""
        if self._collector is not None:
            self._collector.join(2 * PROBE_S)

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Take in what was drained from one process; only ranks count."""
        if header.role in ("main", "spawned"):
            self._ranks.setdefault(header.pid, WatchedRank(header)).add(records)

    def look(self, readers: Sequence[RecordRingReader]) -> None:
        """Read the pages, and see whether somebody is late; a failure ends the watch, never the drain."""
        if self.failure is None:
            try:
                self.look_at(readers, time.perf_counter_ns())
            except Exception as cause:
                self.failure = cause
                self._say(f"hangs are not watched for any more: {type(cause).__name__}: {cause}")

    def look_at(self, readers: Sequence[RecordRingReader], now_ns: int) -> None:
        """Read the pages as of `now_ns`, and see whether somebody is late."""
        if self._looked_ns and now_ns - self._looked_ns > PAUSE_NS:
            self._resumed_ns = now_ns
        self._looked_ns = now_ns
        for reader in readers:
            header = reader.header
            if header.role in ("main", "spawned"):
                followed = self._ranks.setdefault(header.pid, WatchedRank(header))
                followed.header, followed.page = header, reader.page
                followed.stacks = reader.path.with_suffix(".stacks")
                followed.pipe = flight_answers.pipe_of(reader.path)
        self._judge(now_ns)

    def ranks(self) -> dict[int, WatchedRank]:
        """Return the process that stands for each rank: one that the script spawned for it before the main one."""
        watched = [followed for pid, followed in self._ranks.items() if pid not in self.forgotten]
        order = sorted(watched, key=lambda followed: followed.header.role == "spawned")
        return {followed.header.rank: followed for followed in order}

    def _judge(self, now_ns: int) -> None:
        if self.expired:  # the ranks are being ended: what is seen of them now explains nothing
            return
        ranks = self.ranks()
        states = {rank: process_probe.state(followed.header.pid) for rank, followed in ranks.items()}
        alive = {rank: followed for rank, followed in ranks.items() if states[rank] not in ("X", "Z")}
        if not alive or all(states[rank] in "Tt" for rank in alive):
            return
        silent_s = {rank: self._silent_s(followed, now_ns) for rank, followed in alive.items()}
        limits_s = {rank: self._limit_s(followed) for rank, followed in alive.items()}
        late = [rank for rank in alive if silent_s[rank] > limits_s[rank]]
        patient = [r for r, followed in alive.items() if followed.section != "step" and r not in late]
        if patient:
            self._patient_ns = now_ns
        if patient or not late:
            if not late:
                self._relax(alive)
            return
        self._suspect(alive, ranks, states, now_ns, max(silent_s[rank] for rank in late))
        collecting = self._collector is not None and self._collector.is_alive()
        if self.timeout_s is not None and not collecting:
            self.expired = any(silent_s[rank] > max(self.timeout_s, self._floor_s(alive[rank])) for rank in late)

    def _silent_s(self, followed: WatchedRank, now_ns: int) -> float:
        waited_ns = self._patient_ns if followed.section == "step" else 0  # until then it may have waited for others
        return (now_ns - max(followed.progress_ns, self._resumed_ns, waited_ns)) / 1e9

    def _floor_s(self, followed: WatchedRank) -> float:
        return 0.0 if followed.section == "step" else self._floors_s[followed.section]

    def _limit_s(self, followed: WatchedRank) -> float:
        """Return the limit of a rank; a script alone that never trains is nobody's hang."""
        section = followed.section
        if section == "setup" and self.world_size == 1 and followed.op is None:
            return float("inf")
        limit = limit_s(section, followed.durations_s[section], self._floors_s)
        return min(limit, self.timeout_s) if self.timeout_s is not None and section == "step" else limit

    def _relax(self, alive: Mapping[int, WatchedRank]) -> None:
        """Say that a suspicion was unfounded, or is over."""
        if self._told is not None:
            self._told = None
            self._say(f"all {len(alive)} ranks make progress again")

    def _suspect(
        self,
        alive: Mapping[int, WatchedRank],
        ranks: Mapping[int, WatchedRank],
        states: Mapping[int, str],
        now_ns: int,
        silent_s: float,
    ) -> None:
        """Collect what the ranks are doing, once per standstill, in a thread: the drain goes on."""
        stamp = tuple(followed.progress_ns for _, followed in sorted(alive.items()))
        if stamp == self._told or (self._collector is not None and self._collector.is_alive()):
            return
        self._told = stamp
        tables = rank_tables(self.run).values()
        ahead = len(ranks) > 1 and any(table.device_type != "cpu" for table in tables)
        rows = rows_of(ranks, states, ahead=ahead)
        facts = {
            "schema": SCHEMA,
            "attempt": next(iter(alive.values())).header.attempt,
            "world_size": self.world_size,
            "found_ns": now_ns,
            "silent_s": round(silent_s, 3),
            "floors_s": self._floors_s,
            "ahead": ahead,
            "groups": {key: group for table in tables for key, group in table.groups.items()},
        }
        suspects = [row["rank"] for row in rows if row["silent"]]
        self.blamed = suspects[0] if len(suspects) == 1 else None
        self._collector = threading.Thread(
            target=self._collect, args=(facts, rows, dict(ranks)), name="headway-hang", daemon=True
        )
        self._collector.start()

    def _collect(self, facts: Mapping[str, Any], rows: list[dict[str, Any]], ranks: Mapping[int, WatchedRank]) -> None:
        """Ask every rank, write the report, print the line; what fails is said in place of an answer."""
        self._ask(rows, ranks)
        self._place(rows, ranks)
        folder = self.run / "hang"
        number = sum(1 for file in folder.glob("*.json") if file.stem.isdecimal())
        path = folder / f"{number}.json"
        sentence = ""
        try:
            folder.mkdir(exist_ok=True)
            brief = self.timeout_s is not None and not facts["ahead"]
            dumps = self._dumps(path.with_suffix(""), ranks, deadline_s=QUICK_S if brief else PROBE_S)
            if facts["ahead"]:
                sentence = self._blame(dumps, rows)
            write_json(path, {**facts, "ranks": rows})
            self.report = path
            where = f"See: headway hang {shlex.quote(str(self.run))}"
        except OSError as cause:
            where = f"{path} could not be written: {cause}"
        self._say(f"{summary(rows, facts['silent_s'])}{sentence}. {where}")
        if self._acts_on_proof and self.timeout_s is None:
            self._prove(rows, ranks, ahead=facts["ahead"])

    def _ask(self, rows: list[dict[str, Any]], ranks: Mapping[int, WatchedRank]) -> None:
        """Add to each row what its process answers."""
        found = process_probe.ask(
            {rank: followed.header.pid for rank, followed in ranks.items()},
            {rank: followed.page.stack_signal if followed.page else 0 for rank, followed in ranks.items()},
            {rank: followed.stacks for rank, followed in ranks.items()},
            deadline_s=PROBE_S,
        )
        for row in rows:
            row.update(found.get(row["rank"], {}))

    def _place(self, rows: list[dict[str, Any]], ranks: Mapping[int, WatchedRank]) -> None:
        """Add to each row where in its script the rank is, as far as its stack tells."""
        signals = {rank: followed.page.stack_signal if followed.page else 0 for rank, followed in ranks.items()}
        with contextlib.suppress(Exception):  # what it reads is a script's: the report is written without it
            add_places(rows, signals, {rank: followed.stacks for rank, followed in ranks.items()})

    def _prove(self, rows: list[dict[str, Any]], ranks: Mapping[int, WatchedRank], *, ahead: bool) -> None:
        """Look again, and have the job ended where all looks agree on who is to blame."""
        looks = [rows]
        while len(looks) < LOOKS:
            time.sleep(LOOK_S)
            states = {rank: process_probe.state(followed.header.pid) for rank, followed in ranks.items()}
            again = rows_of(ranks, states, ahead=ahead)
            self._ask(again, ranks)
            looks.append(again)
        blamed = proven(looks)
        if blamed:
            self.blamed = blamed[0] if len(blamed) == 1 else None
            self.expired = True

    def _dumps(self, folder: Path, ranks: Mapping[int, WatchedRank], *, deadline_s: float) -> dict[int, Path]:
        """Collect the Flight Recorder's entries of the ranks of this host into `folder`."""
        folder.mkdir(exist_ok=True)
        pipes = {rank: followed.pipe for rank, followed in ranks.items()}
        found = flight_answers.collect(pipes, folder, deadline_s=deadline_s)
        if not found:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return found

    def _blame(self, dumps: Mapping[int, Path], rows: Sequence[dict[str, Any]]) -> str:
        """Mark the ranks that block others by what their queues hold, and return that in words.

        A rank that gave no dump is not marked: it may be one of another host, or slow to answer.
        """
        origins: Sequence[WaitOrigin] = ()
        with contextlib.suppress(HeadwayError):  # dumps that contradict each other are there for a person to read
            reports = of_dumps(Trace.open([path for _, path in sorted(dumps.items())])) if dumps else None
            origins = () if reports is None else localise(*reports[:2], groups=reports.groups).origins
        known = [one for one in origins if one.reason in ("absent", "differs") and one.ranks[0] in dumps]
        blocking = [one for one in known if one.num_waiting]
        for row in rows:
            row["silent"] = row["silent"] or any(row["rank"] in origin.ranks for origin in blocking)
        suspects = [row["rank"] for row in rows if row["silent"]]
        self.blamed = suspects[0] if len(suspects) == 1 else None
        if len(blocking) != 1:
            return ""
        return f"; {blocking[0].num_waiting} wait for rank {blocking[0].ranks[0]} in {blocking[0].awaited}"


def rows_of(
    ranks: Mapping[int, WatchedRank], states: Mapping[int, str], *, ahead: bool = False
) -> list[dict[str, Any]]:
    """Return one row per rank: the keys that `ledger.jobs.hang_reports.of_watch` reads, and what a person wants.

    Silent is a rank that runs no code, or that is in no recorded operation and has come least far; where all ranks
    stand alike, or may be `ahead` of their devices, none is for that.
    """
    free = {
        rank: followed.position
        for rank, followed in ranks.items()
        if states[rank] not in STOPPED and followed.op in (None, "segment.backward")
    }
    rear = min(free.values(), default=None)
    alike = ahead or (len(free) == len(ranks) > 1 and len(set(free.values())) == 1)
    rows = []
    for rank, followed in sorted(ranks.items()):
        page, op = followed.page, followed.op
        told = page if page is not None and (op or "").startswith("comm.") else None
        rows.append(
            {
                "rank": rank,
                "silent": states[rank] in STOPPED or (rank in free and free[rank] == rear and not alike),
                "phase": followed.phase,
                "op": op,
                "group": told.group if told else -1,
                "seq": told.seq if told else -1,
                "peer": told.peer if told else -1,
                "since_ns": page.since_ns if page is not None and op is not None else followed.progress_ns,
                "state": states[rank],
                "step": page.step if page is not None else 0,
                "attempt": followed.header.attempt,
                "pid": followed.header.pid,
            }
        )
    return rows


def summary(rows: Sequence[Mapping[str, Any]], silent_s: float) -> str:
    """Return one sentence: who is silent, and what the others wait in.

    >>> rows = [{"rank": 0, "silent": False, "op": "comm.wait", "step": 7, "phase": "backward", "state": "S"},
    ...         {"rank": 1, "silent": True, "op": None, "step": 7, "phase": "forward", "state": "S"}]
    >>> summary(rows, 31.0)
    'no progress for 31 s: rank 1 is silent (forward of step 7); rank 0 is in comm.wait'
    """
    silent = [row for row in rows if row["silent"]]
    rest: dict[str, list[int]] = {}
    for row in rows:
        if not row["silent"]:
            rest.setdefault(row.get("place") or row["op"] or row["phase"], []).append(row["rank"])
    parts = [f"rank {row['rank']} is silent ({_where(row)})" for row in silent[:4]] + (
        [f"and {len(silent) - 4} more"] if len(silent) > 4 else []
    )
    parts += [f"{_ranks(members)} in {op}" for op, members in rest.items()]
    return f"no progress for {format_seconds(silent_s)}: " + ("; ".join(parts) if parts else "no rank is left")


def _where(row: Mapping[str, Any]) -> str:
    stopped = {"T": ", stopped", "t": ", traced", "Z": ", a zombie", "X": ", gone"}.get(row["state"], "")
    place = f"{row['phase']} of step {row['step']}" if row["phase"] != "setup" else "set-up"
    return f"{row.get('place', place)}{stopped}"


def _ranks(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]} is"
    listed = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"ranks {listed} are"
