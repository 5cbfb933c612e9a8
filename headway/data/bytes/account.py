"""What loading cost, written into the run's record: batches that threads or a data server made, counts, deliveries.

Loader workers that are processes are seen by the recorder itself. Threads of
this process and the data server are not: the iterator that takes their batches
says what each of them took (`loaded`), and a cache or an order says what it
did (`counted`). `headway why` and `data stalls` then read such a run as any
other. Without a recorder each call returns at once (well below 1 us).
Times are int ns on the clock of `time.perf_counter_ns`.

>>> on()
False
>>> before = clocks()
>>> spent = before.until(clocks())
>>> spent.fetch_ns >= 0 and spent.prep_ns >= 0 and (spent + spent).prep_ns == 2 * spent.prep_ns
True

What a process and its children have used so far, from /proc: read twice, the difference is a rate.

Children that have ended are part of their parent's figures, so that the sum
over the living never goes back.

>>> first, second = usage(), usage()
>>> second["cpu_s"] >= first["cpu_s"] and second["seconds"] > first["seconds"]
True
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from headway.runtime.in_rank.bootstrap import active
from headway.runtime.recorder.probes import Probes, now
from headway.runtime.script.run_delay import open_schedstat, read_delay
from headway.trace.events.vocabulary import SPANS

MADE, PARTS, AUDIT = (SPANS[name].code for name in ("input.made", "input.parts", "input.audit"))

WRITE_EVERY_NS = 10_000_000_000
"""Counts are written into the run folder this often, and at the end: a killed process loses the rest."""

_WORD = 1 << 64
_counting = threading.Lock()
_last_write_ns = [0]


def on() -> bool:
    """Whether this process is being recorded: what is not may skip measuring."""
    return active() is not None


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """Time of one thread, or of several added up (`+`), in three parts that partition it."""

    fetch_ns: int = 0
    """Blocked: storage, network, sleep, and waiting for the interpreter lock, which looks the same."""

    prep_ns: int = 0
    """On a core."""

    cpu_wait_ns: int = 0
    """Runnable, but without a core; 0 where the kernel does not tell it from being blocked."""

    def __add__(self, other: ThreadTime) -> ThreadTime:
        """Return the time of both."""
        return ThreadTime(
            self.fetch_ns + other.fetch_ns, self.prep_ns + other.prep_ns, self.cpu_wait_ns + other.cpu_wait_ns
        )


@dataclass(frozen=True, slots=True)
class ThreadClocks:
    """The clocks of the calling thread at one moment."""

    wall_ns: int
    cpu_ns: int
    delay_ns: int
    """Time without a core so far; -1 where the kernel does not tell."""

    def until(self, later: ThreadClocks) -> ThreadTime:
        """Return what this thread spent from here to `later`: fetch = wall - CPU - run delay."""
        wall = later.wall_ns - self.wall_ns
        prep = min(later.cpu_ns - self.cpu_ns, wall)
        waited = later.delay_ns - self.delay_ns if later.delay_ns >= 0 <= self.delay_ns else 0
        waited = min(waited, wall - prep)
        return ThreadTime(wall - prep - waited, prep, waited)


def clocks() -> ThreadClocks:
    """Read the clocks of the calling thread; 3 us, most of it the run delay."""
    return ThreadClocks(now(), time.thread_time_ns(), read_delay(open_schedstat()))


def loaded(
    started_ns: int,
    ended_ns: int,
    *,
    batch: int,
    items: int,
    fetch_ns: int,
    prep_ns: int,
    bytes: int = 0,
    cpu_wait_ns: int | None = None,
    workers: int = 1,
) -> None:
    """Note what making one batch took. Call it inside `next`, on the thread that takes the batch.

    `batch` is the n-th of its iterator, from 0; `workers` how many threads
    make batches for it at once. `fetch_ns`, `prep_ns` and `cpu_wait_ns` (see
    `ThreadTime`) are summed over whoever made parts of it, so they may exceed
    `ended_ns - started_ns`; None = what is left of that time. The record that
    `next` itself leaves behind this one says which loader and pass it was.
    """
    session = active()
    if session is None:
        return
    probes = session.probes
    try:
        waited = max(ended_ns - started_ns - fetch_ns - prep_ns, 0) if cpu_wait_ns is None else cpu_wait_ns
        duration = fetch_ns + prep_ns + waited
        start = ended_ns - duration
        probes.emit(MADE, start, duration, workers, batch, items, bytes)
        probes.emit(PARTS, start, duration, prep_ns, waited, 0, 0)
    except Exception as cause:
        probes.failed("input.made", cause)


def loads_as(worker: int) -> None:
    """Say that this process is loader worker `worker`, where torch's worker information is hidden from the script."""
    session = active()
    if session is not None:
        session.probes.recorder.set_worker(worker)


def counted(name: str, **numbers: int) -> None:
    """Add `numbers` to the counts of `name`: counted("cache.decoded", hits=7, misses=1, bytes=4096).

    They add up over the process's life into run.json's `input`, ranks
    summed; from any thread. Count in the rank's own process: calls in its
    loader workers do nothing.
    """
    session = active()
    if session is None or not session.probes.leads:
        return
    probes = session.probes
    try:
        with _counting:
            counts = probes.tables.setdefault("input", {}).setdefault(name, {})
            for key, number in numbers.items():
                counts[key] = counts.get(key, 0) + int(number)
            if now() - _last_write_ns[0] > WRITE_EVERY_NS:
                _last_write_ns[0] = now()
                probes.write_tables()
    except Exception as cause:
        probes.failed("input counts", cause)


def began(walk: int, facts: int, epoch: int, start: int) -> None:
    """Note that pass number `walk` of this process began: `facts` as `told` numbered them, where in which epoch."""
    session = active()
    if session is not None:
        _emit_audit(session.probes, walk, -1 - facts, epoch, start)


def delivered(walk: int, items: int, low: int, high: int) -> None:
    """Note that pass number `walk` has given `items` examples, and their sum (`headway.data.loader.audit.AuditSum`)."""
    session = active()
    if session is not None:
        _emit_audit(session.probes, walk, items, _signed(low), _signed(high))


def told(key: str, facts: dict[str, Any]) -> int:
    """Return the number of `facts` in the list `key` of this rank's tables (RUN/tables), to which records refer.

    Inside `iter(loader)` they get the recorder's number of that loader ("loader", else -1). New ones are written into
    the run folder at once. Without a recorder 0.
    """
    session = active()
    if session is None:
        return 0
    probes = session.probes
    facts = {"loader": probes.opening[0], **facts}
    known: list[dict[str, Any]] = probes.tables.setdefault(key, [])
    if facts not in known:
        known.append(facts)
        probes.write_tables()
    return known.index(facts)


def describe(**facts: Any) -> None:
    """Correct the facts of the loader whose iterator is being made (run.json's `loaders`): what a remedy changed."""
    session = active()
    if session is None:
        return
    probes = session.probes
    known = probes.loaders.get(probes.opening[0])
    if known is not None and any(known.get(key) != value for key, value in facts.items()):
        known.update(facts)
        probes.write_tables()


def _emit_audit(probes: Probes, *numbers: int) -> None:
    try:
        probes.emit(AUDIT, now(), 0, *numbers)
    except Exception as cause:
        probes.failed("input.audit", cause)


def _signed(word: int) -> int:
    """Return a 64-bit word as the signed number of the same bits: records hold signed ones."""
    return word - _WORD if word >= _WORD >> 1 else word


# What a process and its children have used so far, from /proc: read twice, the difference is a rate.

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, float]:
    """Return seconds (a clock), cpu_s, read_bytes (storage), rss_bytes; shm_bytes and page_cache_bytes of the host.

    The resident bytes count a page once for each process that shares it.
    """
    total = {"cpu_s": 0.0, "read_bytes": 0.0, "rss_bytes": 0.0}
    for pid in family(os.getpid()):
        for key, value in _of(pid).items():
            total[key] += value
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "seconds": perf_counter(),
        **total,
        "shm_bytes": float((shm.f_blocks - shm.f_bfree) * shm.f_frsize) if shm else 0.0,
        "page_cache_bytes": 1024.0 * int(_lines("/proc/meminfo").get("Cached", "0 kB").split()[0]),
    }


def family(pid: int) -> list[int]:
    """Return `pid` and all its living descendants."""
    found = [pid]
    for task in _listed(f"/proc/{pid}/task"):
        for child in _text(f"/proc/{pid}/task/{task}/children").split():
            found += family(int(child))
    return found


def _of(pid: int) -> dict[str, float]:
    """Return the figures of one process; one that ends meanwhile has none left."""
    stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    pages = _text(f"/proc/{pid}/statm").split()
    return {
        "cpu_s": sum(map(int, stat[11:15])) / _TICKS_PER_S,  # fields 14-17 of proc(5): own and ended children's
        "read_bytes": float(_lines(f"/proc/{pid}/io").get("read_bytes", "0")),
        "rss_bytes": float(pages[1]) * _PAGE_BYTES if pages else 0.0,
    }


def _lines(path: str) -> dict[str, str]:
    """Return the 'key: value' lines of a file."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
