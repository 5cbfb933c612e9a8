"""What other processes take of this host's cores while a job runs, sampled from outside the job.

Other load = what /proc/stat counts as busy on the cores of the affinity, less
the CPU time of the job's own process tree. All counters run on, so that any
two readings give the mean between them:

    time ->      |------------ job ------------|
    busy            other + own, cores            /proc/stat, ticks of 10 ms
    own                     own, cores            /proc/<pid>/stat of the tree, reaped children included
    runnable        threads that ran or wanted to: beyond the job's own, those that compete with it

Threads that want a core while none is free show in `runnable` only, so load
on a full host is larger than the cores that it got. Times are seconds.
Read here and not by psutil, which takes twice the time for the same of each
process, and numbers cores by their place among those that are online.

>>> load = HostLoad(cores=2, cores_available=1.5, quota_cores=1.5, other_cores=0.3)
>>> load.left_cores, load.words()
(1.5, '1.5 of 2 cores (quota); other processes take 0.30 of a core')
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.machine.apart import DETACHED
from headway.core.machine.host import (
    ROOT,
    NamedUse,
    affinity_cores,
    available_cores,
    cpu_quota,
    first_line,
    lines_of,
    sharing,
    throttled_s,
)

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

SAMPLE_S = 0.2
"""Seconds between two readings, at least."""

SHARES_S = 1.0
"""Seconds between two readings of what processes share, at least."""

COST_FRACTION = 0.01
"""Readings may take this share of one core: with thousands of processes they come less often."""

MOST_READINGS = 4096
"""Readings that are kept; every other one is dropped beyond. Counters run on, so means stay exact."""

KERNEL_PARENT = 2
"""Process that all threads of the kernel are children of; they are skipped, what they use is small."""

LEAST_GOT = 0.05
"""Cores that others got from which on more of their threads may be waiting."""

SPAN_S = 0.5
"""Quantiles are those of means over so many seconds, at least: ticks are too coarse for less."""


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Cores that a job could use, and what other processes took of them; run.json holds it as `host_load`."""

    cores: int
    """Cores of the affinity."""

    cores_available: float
    """The same, cut to the quota."""

    quota_cores: float | None = None
    """Tightest quota of the job's cgroups; None without one."""

    quota_period_s: float | None = None
    """Its period."""

    sharing: str = "threads"
    """What the scheduler divides the cores among first: 'cgroups', 'sessions' or 'threads'."""

    other_cores: float = 0.0
    """Mean cores that other processes kept busy over the training part."""

    other_quantiles: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """10, 50 and 90 % quantile of it."""

    other_runnable: float | None = None
    """Mean threads of others that ran or waited for a core; None where the job may not run on every core."""

    other_sessions: float = 0.0
    """Mean sessions of others that used a core, each counted by its weight: two that use as much as each other are 2,
    beside a large one a small one is little more than none."""

    other_names: tuple[tuple[str, float], ...] = ()
    """The processes of others that used most: (name and pid, mean cores over all readings), largest first."""

    own_cores: float = 0.0
    """Mean cores that the job itself kept busy."""

    pressure_fraction: float | None = None
    """Share of the time in which some thread of the host waited for a core (PSI); None where the kernel has no PSI."""

    throttled_s: float | None = None
    """For how long the quota held the cgroup back, all cores added up; None where nothing counts it."""

    seconds: float = 0.0
    """Length of the training part that was sampled."""

    readings: int = 0
    """How often it was looked at."""

    @property
    def demand(self) -> float:
        """Return the threads of others that want a core: never fewer than the cores they got.

        What waits beside an idle core waits for a moment, and gets all that it wants in the end. On a full host who
        wants a core gets some of it: others that got next to nothing are threads of the job, miscounted.
        """
        if self.other_cores < LEAST_GOT:
            return self.other_cores
        idle = max(0.0, self.cores - self.own_cores - self.other_cores)
        return max(self.other_cores, (self.other_runnable or 0.0) - idle)

    @property
    def left_cores(self) -> float:
        """Return the cores that others leave to the job."""
        return max(0.0, min(self.cores_available, self.cores - self.other_cores))

    def words(self) -> str:
        """Return the figures in a sentence without an end."""
        quota = " (quota)" if self.quota_cores is not None and self.quota_cores < self.cores else ""
        return (
            f"{self.cores_available:g} of {self.cores} cores{quota}; "
            f"other processes take {self.other_cores:.2f} of a core"
        )

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> HostLoad | None:
        """Return what run.json says; None for a run recorded without it, or with something else there."""
        try:
            return msgspec.convert(facts.get("host_load"), cls)
        except msgspec.ValidationError:
            return None


@dataclass(frozen=True, slots=True)
class HostCounters:
    """Counters at one moment; all but `at_s` and `runnable_s` only grow."""

    at_s: float
    """On the monotonic clock."""

    busy_s: float
    """CPU time that the cores of the affinity spent on anything."""

    own_s: float
    """CPU time of the job's own processes."""

    runnable_s: float
    """Integral over time of the threads of others that ran or waited: an estimate, whose noise is below 0 as well."""

    sessions_s: float
    """Integral over time of the sessions of others that used a core."""

    pressure_s: float | None
    """Time in which some thread waited for a core."""

    throttled_s: float | None
    """Time for which the quota held the cgroup back."""

    memory_bytes: int = 0
    """What the job's own processes hold of the memory then, added up: what they share counts for each of them."""

    shares_bytes: tuple[int, int] = (0, 0)
    """What ranks and launcher hold, without files and shared memory, and what their children (loader workers) hold,
    shared pages split among who shares them. (0, 0) where the kernel does not tell, or nobody asked."""


class LoadSampler:
    """Follows the load beside the process tree under `pid`. Call `look` a few times a second, from outside the job.

    `detailed` readings also tell the memory that processes share, and the names of others: they cost more.
    """

    def __init__(self, pid: int, *, root: Path = ROOT, detailed: bool = False) -> None:
        self._pid, self._root, self._detailed = pid, root, detailed
        self._cpus = _cpus()
        self._whole_host = len(self._cpus) >= (os.cpu_count() or 1)
        self._spent: dict[int, float] = {}
        self._own_s = self._runnable_s = self._sessions_s = 0.0
        self._tree: set[int] = set()
        self._detached: dict[int, list[int]] = {}
        self._kernel: set[int] = set()
        self._next_s = 0.0
        self._named_use = NamedUse(root)
        self._children_bytes, self._next_shares_s, self._shares_spent_s = 0, 0.0, 0.0
        self.readings: list[HostCounters] = []

    def look(self, *, at_once: bool = False) -> None:
        """Take a reading, unless the last one was a moment ago and need not be `at_once`. Failures are no readings."""
        begin, spent_s = time.perf_counter(), time.thread_time()
        if begin < self._next_s and not at_once:
            return
        try:
            self.readings.append(self._read(begin))
        except (OSError, ValueError, IndexError):
            self._next_s = begin + 10 * SAMPLE_S
            return
        if len(self.readings) > MOST_READINGS:
            del self.readings[1:-1:2]
        spent_s = time.thread_time() - spent_s - self._shares_spent_s
        self._next_s = begin + 0.9 * max(SAMPLE_S, spent_s / COST_FRACTION)

    def between(self, begin_s: float = float("-inf"), end_s: float = float("inf")) -> HostLoad:
        """Return the load over the readings between two moments; over all of them where too few lie there."""
        chosen = [reading for reading in self.readings if begin_s <= reading.at_s <= end_s]
        load = host_load(chosen if len(chosen) > 1 else self.readings, whole_host=self._whole_host, root=self._root)
        whole_s = self.readings[-1].at_s - self.readings[0].at_s if self.readings else 0.0
        names = tuple((name, round(used_s / whole_s, 3)) for name, used_s in self._named_use.largest() if whole_s > 0)
        return msgspec.structs.replace(load, other_names=names)

    def _read(self, now_s: float) -> HostCounters:
        if len(self.readings) % 100 == 0:
            self._kernel.clear()  # their numbers may have gone to others
        processes = _processes(self._root, self._kernel)
        tree = set(_tree(self._pid, processes))
        before, self._spent = self._spent, {pid: process.cpu_s for pid, process in processes.items()}
        detached = {pid: _tree(pid, processes) for pid in _detached(processes) if pid not in tree}
        own = tree.union(*detached.values())
        others = _running(self._root) - sum(_runnable(self._root, pid, processes[pid]) for pid in own)
        if self.readings:
            # Of a process that ended, its parent has the time once it was waited for. It never runs backwards.
            had_s = sum(before[pid] for pid in self._tree)
            self._own_s += max(0.0, sum(self._spent[pid] for pid in tree) - had_s)
            # Nobody of the job waits for these: what one used since the last reading before its end is not known.
            for pid, them in detached.items():
                had_s = sum(before.get(each, 0.0) for each in self._detached.get(pid, ()))
                self._own_s += max(0.0, sum(self._spent[each] for each in them) - had_s)
            passed_s = now_s - self.readings[-1].at_s
            # Own threads that change between the two counts of a look make it too small as often as too large.
            self._runnable_s += others * passed_s
            used = {pid: self._spent[pid] - before.get(pid, 0.0) for pid in processes if pid not in own}
            if self._detailed:
                named = {pid: (each.name, each.self_s) for pid, each in processes.items() if pid not in own}
                self._named_use.add(named)
            self._sessions_s += passed_s * _effective(_by_session(used, processes))
        self._tree, self._detached = tree, detached
        return HostCounters(
            at_s=now_s,
            busy_s=_busy_s(self._root, self._cpus),
            own_s=self._own_s,
            runnable_s=self._runnable_s,
            sessions_s=self._sessions_s,
            pressure_s=_pressure_s(self._root),
            throttled_s=throttled_s(self._root),
            memory_bytes=sum(processes[pid].memory_bytes for pid in own if pid in processes),
            shares_bytes=self._shares(processes) if self._detailed else (0, 0),
        )

    def _shares(self, processes: Mapping[int, _Process]) -> tuple[int, int]:
        """Return `HostCounters.shares_bytes`: of children the last reading, a new one where that is within the cost."""
        begin, spent_s = time.perf_counter(), time.thread_time()
        self._shares_spent_s = 0.0
        ranks = [pid for pid in self._tree if pid == self._pid or processes[pid].parent == self._pid]
        if begin >= self._next_shares_s:
            self._children_bytes = _held_bytes(self._root, self._tree.difference(ranks))
            self._shares_spent_s = time.thread_time() - spent_s
            self._next_shares_s = begin + max(SHARES_S, self._shares_spent_s / COST_FRACTION)
        return _private_bytes(self._root, ranks), self._children_bytes


def _private_bytes(root: Path, pids: Iterable[int]) -> int:
    """Return the resident memory of some processes, without that of files and shared memory.

    A process counts what its fork still shares, too: no copy that a child makes of a page changes it.
    """
    total = 0
    for pid in pids:
        for line in lines_of(root / "proc" / str(pid) / "statm"):
            _, resident, shared, *_ = map(int, line.split())
            total += (resident - shared) * PAGE_BYTES
    return total


def _held_bytes(root: Path, pids: Iterable[int]) -> int:
    """Return the memory of some processes, each page split among all that have it (PSS)."""
    total = 0
    for pid in pids:
        for line in lines_of(root / "proc" / str(pid) / "smaps_rollup"):
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def host_load(readings: Sequence[HostCounters] = (), *, whole_host: bool = True, root: Path = ROOT) -> HostLoad:
    """Return the cores of this process and what `readings` say of the load beside it; without two of them, no load."""
    quota = cpu_quota(root)
    limits = HostLoad(
        cores=affinity_cores(),
        cores_available=available_cores(root),
        quota_cores=quota.cores if quota else None,
        quota_period_s=quota.period_s if quota else None,
        sharing=sharing(root),
    )
    if len(readings) < 2 or readings[-1].at_s <= readings[0].at_s:
        return limits
    first, last = readings[0], readings[-1]
    seconds = last.at_s - first.at_s
    pressure = None if last.pressure_s is None or first.pressure_s is None else last.pressure_s - first.pressure_s
    held_s = None if last.throttled_s is None or first.throttled_s is None else last.throttled_s - first.throttled_s
    means = [other_cores(one, other) for one, other in spans(readings)]
    return msgspec.structs.replace(
        limits,
        other_cores=other_cores(first, last),
        other_quantiles=tuple(_quantile(means, share) for share in (0.1, 0.5, 0.9)),
        other_sessions=(last.sessions_s - first.sessions_s) / seconds,
        other_runnable=max(0.0, (last.runnable_s - first.runnable_s) / seconds) if whole_host else None,
        own_cores=(last.own_s - first.own_s) / seconds,
        pressure_fraction=None if pressure is None else min(1.0, pressure / seconds),
        throttled_s=held_s,
        seconds=seconds,
        readings=len(readings),
    )


def load_beside(seconds: float = 0.3, *, root: Path = ROOT) -> HostLoad:
    """Look at the host for `seconds` and return the load beside this process and those below it."""
    sampler = LoadSampler(os.getpid(), root=root)
    sampler.look()
    time.sleep(seconds)
    sampler.look(at_once=True)
    return sampler.between()


@dataclass(frozen=True, slots=True)
class _Process:
    """One line of /proc/<pid>/stat."""

    parent: int
    state: str
    cpu_s: float
    """User and system time, of children that were waited for too."""
    threads: int
    session: int
    name: str = ""
    memory_bytes: int = 0
    self_s: float = 0.0
    """Of `cpu_s`, its own."""


def _processes(root: Path, kernel: set[int]) -> dict[int, _Process]:
    """Return pid -> what its stat says, of every process that can be seen; threads of the kernel go into `kernel`."""
    found = {}
    for name in os.listdir(root / "proc"):
        if name.isdigit() and int(name) not in kernel:
            try:
                process = _process((root / "proc" / name / "stat").read_text())
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
            if process.parent == KERNEL_PARENT:
                kernel.add(int(name))
            else:
                found[int(name)] = process
    return found


def _process(text: str) -> _Process:
    """Read a line of stat: the name, in brackets, may hold blanks and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    cpu_s = sum(map(int, fields[11:15])) * TICK_S
    name = text[text.index("(") + 1 : text.rindex(")")]
    memory_bytes = int(fields[21]) * PAGE_BYTES if len(fields) > 21 else 0
    self_s = sum(map(int, fields[11:13])) * TICK_S
    return _Process(int(fields[1]), fields[0], cpu_s, int(fields[17]), int(fields[3]), name, memory_bytes, self_s)


def _tree(pid: int, processes: Mapping[int, _Process]) -> list[int]:
    """Return `pid` and all its descendants."""
    children: dict[int, list[int]] = {}
    for child, process in processes.items():
        children.setdefault(process.parent, []).append(child)
    tree = [pid] if pid in processes else []
    for parent in tree:
        tree += children.get(parent, [])
    return tree


def _detached(processes: Mapping[int, _Process]) -> list[int]:
    """Return the processes that jobs of headway have detached, without their children."""
    return [
        pid
        for pid, process in processes.items()
        if process.name == DETACHED and (process.parent not in processes or processes[process.parent].name != DETACHED)
    ]


def _by_session(used_s: Mapping[int, float], processes: Mapping[int, _Process]) -> dict[int, float]:
    """Add up, per session, the CPU time that processes used."""
    found: dict[int, float] = {}
    for pid, seconds in used_s.items():
        session = processes[pid].session
        found[session] = found.get(session, 0.0) + max(0.0, seconds)
    return found


def _effective(used_s: Mapping[int, float]) -> float:
    """Return how many sessions of equal use would be as mixed: (sum u)^2 / sum u^2; 0 when none used anything."""
    squares = sum(seconds**2 for seconds in used_s.values())
    return sum(used_s.values()) ** 2 / squares if squares > 0 else 0.0


def _runnable(root: Path, pid: int, process: _Process) -> int:
    """Return how many threads of a process run or wait for a core."""
    if process.threads == 1:
        return int(process.state == "R")
    tasks = root / "proc" / str(pid) / "task"
    try:
        texts = [first_line(tasks / name / "stat") for name in os.listdir(tasks)]
    except OSError:
        return 0  # it has just ended
    return sum(text[text.rfind(")") + 2 :].startswith("R") for text in texts)


def _running(root: Path) -> int:
    """Return how many threads of the host run or wait for a core."""
    return int(next((line.split()[1] for line in lines_of(root / "proc/stat") if line.startswith("procs_running")), 0))


def _busy_s(root: Path, cpus: frozenset[int]) -> float:
    """Return the time that `cpus` spent on anything, a hypervisor's other guests (steal) included."""
    ticks = 0
    for line in lines_of(root / "proc/stat"):
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, counts[:8])
            ticks += user + nice + system + sum(interrupts_and_steal)
    return ticks * TICK_S


def _pressure_s(root: Path) -> float | None:
    """Return the time in which some thread waited for a core; None without PSI."""
    words = first_line(root / "proc/pressure/cpu").split()
    total = next((word.removeprefix("total=") for word in words if word.startswith("total=")), "")
    return int(total) / 1e6 if words[:1] == ["some"] and total.isdigit() else None


def _cpus() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def other_cores(first: HostCounters, last: HostCounters) -> float:
    """Return the mean cores that others kept busy between two readings."""
    return max(0.0, (last.busy_s - first.busy_s - last.own_s + first.own_s) / max(last.at_s - first.at_s, 1e-9))


def spans(readings: Sequence[HostCounters]) -> list[tuple[HostCounters, HostCounters]]:
    """Return pairs of readings that lie `SPAN_S` apart, one after the other; the whole when it is shorter."""
    pairs, first = [], readings[0]
    for reading in readings[1:]:
        if reading.at_s - first.at_s >= SPAN_S:
            pairs.append((first, reading))
            first = reading
    return pairs or [(readings[0], readings[-1])]


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, between two of them in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
