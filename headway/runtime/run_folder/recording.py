"""The run folder while a launcher owns it: made, described in run.json, drained, finalised.

Use it around the ranks of one host: make it before they start, `begin` once
they run (heavy imports wait until then), `end` when they are gone. Times in
ns on CLOCK_MONOTONIC. docs/run-folder.md lists every file and key.

>>> import tempfile
>>> folder = next_folder(Path(tempfile.mkdtemp()), "train.py")
>>> folder.name
'train-1'
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway import __version__
from headway.core.errors import InputError
from headway.core.files.private import PRIVATE, file_mode, private_folder
from headway.core.files.safe_files import read_json, whole_file
from headway.core.machine.host import host_cores
from headway.runtime.host.device import host_has_devices
from headway.runtime.host.host_memory import host_memory
from headway.runtime.run_folder import redact
from headway.runtime.run_folder.problems import Problems
from headway.trace.rings import ring_folders
from headway.trace.rings.rank_tables import ComputeFacts

if TYPE_CHECKING:
    from headway.runtime.host.device_watch import DeviceWatch
    from headway.runtime.host.load_watch import LoadWatch
    from headway.runtime.run_folder.drain import Drainer

RUNS = Path("headway-runs")
"""Default parent of run folders, in the working directory."""

SCHEMA = "headway.run-folder/1"
DEFAULT_MAX_RUN_BYTES = 512_000_000


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """One rank of this host in run.json."""

    rank: int
    local_rank: int
    pid: int
    start_ns: int
    end_ns: int | None
    exit_code: int | None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """How the run ended."""

    code: int
    cls: str
    """One of `headway.runtime.run_folder.exit_class.CLASSES`."""
    first_rank: int | None = None
    traceback: str | None = None

    def json(self) -> dict[str, object]:
        """Return the entry of run.json; what looks like a secret in the traceback is replaced."""
        return {
            "code": self.code,
            "class": self.cls,
            "first_rank": self.first_rank,
            "traceback": self.traceback and redact.text(self.traceback),
        }


@dataclass(frozen=True, slots=True)
class RankDoings:
    """What run.json says of the ranks' doings; they are found by `headway.runtime.run_folder.finalise.doings`."""

    applied: list[Any] = field(default_factory=list)
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[int, dict[str, Any]] = field(default_factory=dict)
    bad_losses: dict[int, list[Any]] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)
    compute: ComputeFacts | None = None
    device_type: str = "cpu"
    dropped: int = 0
    bytes_per_step: float | None = None
    spawned: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The rows of ranks that a script started itself on this host; how they ended only their parent knows."""


def next_folder(base: Path, script: str, mode: int = PRIVATE) -> Path:
    """Make and return `base/<script>-<n>` with the first free n >= 1, and this mode."""
    stem = re.sub(r"[^\w.-]+", "_", Path(script).stem or "run")[:64]
    if not base.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        if base == RUNS:  # recorded runs are no part of the repository that the script lies in
            (base / ".gitignore").write_text("*\n")
    taken = [int(m[1]) for p in base.iterdir() if (m := re.fullmatch(re.escape(stem) + r"-(\d+)", p.name))]
    number = max(taken, default=0) + 1
    while True:
        try:
            folder = base / f"{stem}-{number}"
            folder.mkdir(mode & PRIVATE)
            folder.chmod(mode)
            return folder
        except FileExistsError:
            number += 1


def claim_folder(out: Path, *, shared: bool = False, mode: int = PRIVATE) -> Path:
    """Make `out`, with this mode; one that holds another run is refused, unless ranks or hosts share it.

    An empty folder keeps the mode that it has.

    Raises `InputError`.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; a run is a folder. Name a folder that does not exist yet.")
    if not shared and out.is_dir() and any(out.iterdir()):
        raise InputError(f"--out {out} is not empty; a run needs a folder of its own. Name another one, or remove it.")
    try:
        private_folder(out, mode)
    except OSError as cause:
        raise InputError(f"--out {out} cannot be made: {cause}. Name a folder that you may write.") from cause
    return out


@dataclass(slots=True)
class RunRecording:
    """A run folder and the facts that go into its run.json."""

    path: Path
    script: Sequence[str]
    start_ns: int
    """Launcher start."""
    group_rank: int = 0
    """Index of this host: host 0 writes run.json, host k run-host<k>.json."""
    world_size: int = 1
    nproc: int = 1
    attempt: int = 0
    plan: Path | None = None
    baseline: str | None = None
    max_run_bytes: int = DEFAULT_MAX_RUN_BYTES
    shared: bool = False
    """Whether other launchers write into this folder as well: of other hosts, or one for each rank."""
    leads: bool = True
    """Whether this launcher writes the host's run.json: always, but for ranks above local rank 0 with `--no-launch`."""
    joins: bool = False
    """Whether it stands in another's launch line for one rank (`--no-launch`): others of this host have theirs."""
    rows: list[LaunchedRank] = field(default_factory=list)
    realtime_ns: int = 0
    """Realtime clock at `start_ns`."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    memory: dict[str, int | None] = field(default_factory=host_memory)
    """Memory of this host before the ranks started."""
    rings: Path = field(init=False)
    """Folder of this host's rings."""
    live: Path = field(init=False)
    """Where they are mapped: that folder, or a private one of this host."""
    drainer: Drainer | None = None
    load_watch: LoadWatch | None = None
    """Follows what other processes take of the cores, from the first attempt on."""
    device_watch: DeviceWatch | None = None
    """Follows what the devices of this host do in an attempt; in the launcher that writes its run.json."""
    _ranks: Set[int] = frozenset()
    problems: Problems = field(default_factory=Problems)
    """What went wrong with the recording, for the launcher to say."""

    def open(self) -> None:
        """Pair the clocks and write the first run.json: a run whose launcher is killed stays readable.

        A later attempt under another launcher goes on with the run that attempt 0 began.
        Raises `InputError` when the folder holds another run.
        """
        self.realtime_ns = time.time_ns() - (time.perf_counter_ns() - self.start_ns)
        if self.leads and self.file.exists():
            if not self.attempt:
                raise InputError(f"{self.path} holds a run already. Name another folder with --out, or remove it.")
            before = read_json(self.file)
            self.run_id, self.start_ns, self.realtime_ns = (before[k] for k in ("run_id", "start_ns", "realtime_ns"))
            self.rows = [LaunchedRank(**row) for row in before["ranks"]]
        private_folder(self.path)
        for part in ("events", "logs"):
            private_folder(self.path / part, self.path.stat().st_mode & 0o777)
        self.rings = ring_folders.make(self.path, self.group_rank if self.shared else None)
        self.live = ring_folders.live_folder(self.rings)
        if self.plan is not None:
            target = self.path / "plan.json"
            if self.plan.resolve() != target.resolve():
                shutil.copyfile(self.plan, target)
        self.write()

    @property
    def _own_rings(self) -> Set[int] | None:
        """The ranks whose rings in this host's folder are this launcher's; None = all."""
        return self._ranks if self.joins else None

    @property
    def _own_windows(self) -> Set[int] | None:
        """The ranks whose windows are this launcher's to pack and to remove: all hosts' lie in one folder."""
        return self._ranks if self.shared else None

    @property
    def file(self) -> Path:
        """The run.json of this host."""
        return self.path / ("run.json" if self.group_rank == 0 else f"run-host{self.group_rank}.json")

    def begin(self, attempt: int, ranks: Set[int]) -> Drainer:
        """Start to drain the rings of `attempt`, of the launched `ranks`; call it once they run."""
        from headway.runtime.host.load_watch import LoadWatch
        from headway.runtime.run_folder.drain import Drainer, prune_windows

        self.attempt = attempt
        kept = 0
        with self.problems.kept("the size of earlier attempts"):
            kept = sum(file.stat().st_size for file in (self.path / "events").glob("*.parquet"))
        budget = max(self.max_run_bytes // 4 - kept // 2, self.max_run_bytes // 32)
        self._ranks = ranks
        self.drainer = Drainer(
            self.rings,
            self.problems,
            attempt=attempt,
            budget_bytes=budget,
            ranks=self._own_rings,
            earlier=self.drainer,
        )
        self.drainer.chores.append(lambda: prune_windows(self.path / "windows", budget, self._own_windows))
        # Ranks that joined another launcher's line are its children, as are the ranks beside them.
        self.load_watch = LoadWatch(os.getppid() if self.joins and self.nproc > 1 else os.getpid())
        self.drainer.listeners.append(self.load_watch.add)
        self.drainer.lookers.append(self.load_watch.look)
        if self.leads and host_has_devices():
            from headway.runtime.host.device_watch import DeviceWatch

            self.device_watch = DeviceWatch(self.problems.add)
        self.drainer.start()
        return self.drainer

    def _host_load(self) -> dict[str, Any] | None:
        """Return the load beside the training part of the last attempt, as far as it was followed."""
        return self.load_watch.to_builtins() if self.load_watch is not None else None

    def close_attempt(self, rows: Sequence[LaunchedRank]) -> Callable[[], None]:
        """Stop draining an attempt that ended; returns what writes its events, which may run later, in any thread.

        A failure (a full disk) is kept in `problems`, and the rings stay: it must not hide how the job itself ended.
        """
        attempt, own_ranks = self.attempt, self._own_rings
        own_windows = self._own_windows
        self.rows = [row for row in self.rows if row.attempt != attempt] + list(rows)
        if self.drainer is not None:
            self.drainer.stop()
        if self.device_watch is not None:
            self.device_watch.stop()

        def write() -> None:
            from headway.runtime.run_folder.finalise import finalise_attempt, pack_windows

            with self.problems.kept(f"events of attempt {attempt}"):
                of_rank = {row.rank: asdict(row) for row in rows}
                finalise_attempt(self.path, attempt, rows=of_rank, rings=self.rings, ranks=own_ranks)
                pack_windows(self.path / "windows", own_windows)

        return write

    def end(self, exit_: Exit) -> None:
        """Write the final run.json; a failure is kept in `problems`."""
        with self.problems.kept("run.json"):
            ring_folders.leave(self.rings)
            self.write(exit_=exit_, end_ns=time.perf_counter_ns())

    def _own_ranks(self) -> set[int]:
        """Return the ranks of this host: those launched here, and those that wrote their own row."""
        others = (read_json(file) for file in (self.path / "ranks").glob("r*.json"))
        joined = {row["rank"] for row in others if row.get("group_rank", 0) == self.group_rank}
        return joined | {row.rank for row in self.rows}

    def write(self, *, exit_: Exit | None = None, end_ns: int | None = None) -> None:
        """Write run.json, whole or not at all."""
        if not self.leads:
            return
        seen = RankDoings()
        if exit_ is not None:
            from headway.runtime.run_folder.finalise import doings

            seen = doings(self.path, ranks=self._own_ranks())
        rows = [asdict(row) for row in self.rows]
        launched = {row.rank for row in self.rows}
        rows += [row for row in seen.spawned.values() if row["rank"] not in launched]
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "headway_version": __version__,
            "attempt": self.attempt,
            "host": socket.gethostname(),
            "group_rank": self.group_rank,
            "script": redact.arguments(self.script),
            "env": redact.environment(os.environ),
            "start_ns": self.start_ns,
            "end_ns": end_ns,
            "realtime_ns": self.realtime_ns,
            "nproc": self.nproc,
            "world_size": max(self.world_size, len({row["rank"] for row in rows})),
            "device_type": seen.device_type,
            "cores": host_cores(),
            "host_load": self._host_load(),
            "host_series": self.load_watch.series() if self.load_watch is not None else None,
            "device_series": msgspec.to_builtins(self.device_watch and self.device_watch.series()),
            **self.memory,
            "memory": seen.memory,
            "bad_losses": seen.bad_losses,
            "threads": seen.threads,
            "compute": msgspec.to_builtins(seen.compute),
            "ranks": rows,
            "exit": exit_.json() if exit_ is not None else None,
            "baseline": self.baseline,
            "plan": "plan.json" if self.plan is not None else None,
            "applied": seen.applied,
            "loaders": seen.loaders,
            "bytes_per_step": seen.bytes_per_step,
            "dropped": seen.dropped,
            "max_run_bytes": self.max_run_bytes,
        }
        write_json(self.file, facts)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` by way of a draft beside it; who may not list the folder may not read it."""
    with whole_file(path) as draft:
        draft.touch(file_mode(draft.parent))
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        try:
            draft.write_text(text, encoding="utf-8")
        except UnicodeEncodeError:  # an argument, or the name of a file, may be any bytes: as JSON escapes them
            draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
