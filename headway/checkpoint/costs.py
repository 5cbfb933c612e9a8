"""What a checkpoint costs and how often one pays: the closed forms of CheckFreq, Young and Daly.

A save stops training for `stall_s` and needs `duration_s` from its start until
it is durable. Two bounds follow for the steps between saves: they must not
overtake each other (`overlap_steps`), and their stalls must stay within a share
of the training time (`budget_steps`). Against failures with a mean time between
them of `mtbf_s`, saving rarely loses work and saving often loses time:
`wall_factor` is the expected wall time per useful second, `best_interval_s`
where it is least, `young_daly` its closed approximation. Plain seconds, steps
and bytes; nothing here measures anything.

>>> overlap_steps(stall_s=0.05, duration_s=2.05, step_s=0.1), budget_steps(cost_s=0.05, step_s=0.1, budget=0.035)
(20, 15)
>>> round(young_daly(10.0, 11_124.0)), round(best_interval_s(10.0, 11_124.0))
(465, 465)
>>> round(1 / wall_factor(300.0, stall_s=10.0, mtbf_s=11_124.0, restart_s=600.0), 3)
0.904

What a folder and this host's memory can do for a save: rates of copy, checksum, write and read.

Use it to tell what a save of N bytes would cost before there is one:
`measure(folder)` takes a few seconds and leaves nothing behind. A save through
headway stops training for a copy in memory; writing and checksums run behind
the steps, one after the other. Bytes per second.

>>> rates = StorageRates(copy=8e9, checksum=16e9, write=5e8, read=2e9, sync_s=0.01)
>>> rates.blocked_s(16_000_000_000), round(rates.durable_s(16_000_000_000), 2)
(2.0, 35.1)
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import MIB, NS_PER_S, format_bytes
from headway.ledger.answers.metrics import daly_interval_s, ettr, optimal_interval_s
from headway.storage.digests import block_bytes_for, digest_of
from headway.storage.stores import durable_file, sync_folder

ROUNDING = 1e-9
"""Share of a step by which a quotient may exceed a whole number and still be that number: 0.3 / 0.1 is 3 steps."""


DURABLE_FILES = 10
"""Small files and folders that a save makes durable one after the other besides its data: digests, manifest, copies,
metadata, record of the commit, folders."""
DURABLE_S = 0.15
"""What that takes where nobody measured it: a shared disk syncs in about 15 ms."""
CALL_S = 0.005
"""What a save that goes on behind the steps holds training up for besides its copy, where nobody measured it: a hundred
tensors are looked up and a thread is started."""
NEVER_S = 1e18
"""An interval beyond which nothing is saved any more: thirty billion years."""


def positive(name: str, value: float, *, zero: bool = False, infinite: bool = False) -> float:
    """Return `value` if it can be a duration or a rate; raise `InputError` naming the field if it cannot."""
    fits = value >= 0 if zero else value > 0
    if not fits or (math.isinf(value) and not infinite):
        least = ">= 0" if zero else "> 0"
        raise InputError(f"{name} is {value}; pass a {'number' if infinite else 'finite number'} {least}.")
    return value


def whole_steps(quotient: float) -> int:
    """Return the least number of steps, at least 1, that reaches `quotient`; exact quotients are not rounded up."""
    return max(1, math.ceil(quotient * (1 - ROUNDING)))


def overlap_steps(*, stall_s: float, duration_s: float, step_s: float, inflight: int = 1) -> int:
    """Return the least steps between saves at which at most `inflight` of them are under way (CheckFreq's k1).

    ceil((T_f - O) / (N * T_i)): what is left of a save once training goes on must end within N intervals.
    """
    positive("stall_s", stall_s, zero=True)
    positive("duration_s", duration_s, zero=True)
    positive("step_s", step_s)
    if inflight < 1:
        raise InputError(f"inflight is {inflight}; pass the number of saves under way at once, at least 1.")
    return whole_steps(max(0.0, duration_s - stall_s) / (inflight * step_s))


def budget_steps(*, cost_s: float, step_s: float, budget: float) -> int:
    """Return the least steps between saves at which `cost_s` per save stays within `budget` of their time (k2).

    ceil(O / (p * T_i)).
    """
    positive("cost_s", cost_s, zero=True)
    positive("step_s", step_s)
    positive("budget", budget)
    return whole_steps(cost_s / (budget * step_s))


def young_daly(stall_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints that lose least: Young's sqrt(2 c M), with Daly's correction.

    `ledger.answers.metrics.daly_interval_s` (Daly 2006, eq. 37). A checkpoint that costs nothing is taken all the time
    (0); a job that never fails needs none (inf). Within 1 % of the exact optimum of `wall_factor` for
    stall_s <= mtbf_s / 2; `best_interval_s` is that optimum.
    """
    positive("stall_s", stall_s, zero=True)
    positive("mtbf_s", mtbf_s, infinite=True)
    if stall_s == 0:
        return 0.0
    if math.isinf(mtbf_s):
        return math.inf
    return daly_interval_s(mtbf_s, save_s=stall_s)


def wall_factor(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the expected wall seconds per second of useful work.

    The inverse of `headway.ledger.answers.metrics.ettr`; with mtbf_s = inf it is 1 + stall_s / interval_s.
    """
    positive("interval_s", interval_s)
    positive("stall_s", stall_s, zero=True)
    positive("mtbf_s", mtbf_s, infinite=True)
    positive("restart_s", restart_s, zero=True)
    if math.isinf(mtbf_s):
        return 1 + stall_s / interval_s
    share = ettr(mtbf_s, restart_s=restart_s, interval_s=interval_s, save_s=stall_s)
    return 1 / share if share else math.inf  # no such interval is ever finished


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints at which `wall_factor` is least.

    `headway.ledger.answers.metrics.optimal_interval_s`, and the limits of `young_daly`.
    """
    positive("stall_s", stall_s, zero=True)
    positive("mtbf_s", mtbf_s, infinite=True)
    if stall_s == 0 or math.isinf(mtbf_s):
        return 0.0 if stall_s == 0 else math.inf
    return optimal_interval_s(mtbf_s, save_s=stall_s)


class Goal(TypedDict):
    """What an interval is chosen for; the keywords of `best_steps`."""

    step_s: float
    budget: float
    mtbf_s: float | None


def best_steps(cost_s: float, *, step_s: float, budget: float, mtbf_s: float | None = None) -> int:
    """Return the steps between saves that lose least at a known failure rate; else the fewest within the budget.

    Of the two whole numbers beside `best_interval_s` the one with the smaller `wall_factor`.
    """
    if mtbf_s is None:
        return budget_steps(cost_s=cost_s, step_s=step_s, budget=budget)
    positive("step_s", step_s)
    below = max(1, math.floor(min(best_interval_s(cost_s, mtbf_s), NEVER_S) / step_s))
    return min(below, below + 1, key=lambda steps: wall_factor(steps * step_s, stall_s=cost_s, mtbf_s=mtbf_s))


def behind_steps(stall_s: float, *, late_s: float, now: int, goal: Goal) -> int:
    """Return the steps between saves that stop training for `stall_s` and are durable `late_s` after that.

    They must not overtake each other; and come more often than `now` only where a known failure rate asks for it.
    """
    apart = overlap_steps(stall_s=0.0, duration_s=late_s, step_s=goal["step_s"])
    return max(best_steps(stall_s, **goal), apart, now if goal["mtbf_s"] is None else 1)


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """Where to copy a state first."""

    device: str
    """'device' or 'host'."""

    stall_s: float
    """What training waits for that copy."""


def choose_snapshot(
    *, device_s: float, host_s: float, overlap_s: float, state_bytes: int, free_bytes: int
) -> SnapshotChoice:
    """Choose between a copy on the device and one in host memory (CheckFreq section 4.2).

    `device_s` and `host_s` are the durations of the copies, `overlap_s` the time from the start of a step to its
    weight update, which hides so much of the copy to the host. A device copy stops training for its whole (short)
    duration and needs `state_bytes` of the device's `free_bytes`.
    """
    for name, value in {"device_s": device_s, "host_s": host_s, "overlap_s": overlap_s}.items():
        positive(name, value, zero=True)
    if state_bytes <= 0:
        raise InputError(f"state_bytes is {state_bytes}; an empty state needs no snapshot. Pass what is to be saved.")
    on_host = SnapshotChoice("host", max(0.0, host_s - overlap_s))
    if state_bytes < free_bytes and device_s < on_host.stall_s:
        return SnapshotChoice("device", device_s)
    return on_host


PIECE_BYTES = 8 * MIB
"""Bytes per write and read."""

ROUNDS = 3
"""The fastest of so many is taken: others on the host only ever take time away."""


@dataclass(frozen=True, slots=True)
class StorageRates:
    """What was measured."""

    copy: float
    """Memory to memory, one thread, into memory that is there already."""
    checksum: float
    """xxh3 per block and Merkle root."""
    write: float
    """To the folder until it is durable."""
    read: float
    """From the folder, with the page cache told to forget it (which tmpfs cannot)."""
    sync_s: float
    """Seconds to make a small file durable under its name: file, rename, folder."""

    def blocked_s(self, num_bytes: int) -> float:
        """Return what a save of that size stops training for."""
        return num_bytes / self.copy

    def durable_s(self, num_bytes: int) -> float:
        """Return how long after its start the save is durable."""
        passes_s = num_bytes / self.copy + num_bytes / self.checksum + num_bytes / self.write
        return passes_s + DURABLE_FILES * self.sync_s

    def restored_s(self, num_bytes: int) -> float:
        """Return what reading it back takes, verified and copied to its place."""
        return num_bytes / self.read + num_bytes / self.checksum + num_bytes / self.copy


def measure(folder: Path, num_bytes: int = 64 * MIB) -> StorageRates:
    """Measure with files of `num_bytes` in `folder`. Raises `InputError` where nothing can be written there."""
    if num_bytes < PIECE_BYTES:
        raise InputError(f"{num_bytes} bytes are too few to measure with: pass at least {format_bytes(PIECE_BYTES)}.")
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder. Name the one that checkpoints shall go to.")
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    path = folder / f".bench-{uuid.uuid4().hex}"
    try:
        write_s = _fastest(lambda: _write(path, source))
        read_s = _fastest(lambda: _read(path, target), before=lambda: _forget(path))
        sync_s = _fastest(lambda: _write(path, source[:4096]))
    except OSError as cause:
        free = format_bytes(num_bytes)
        raise InputError(
            f"{folder} cannot be measured: {cause}. Name a folder that you may write, with {free} free."
        ) from cause
    finally:
        path.unlink(missing_ok=True)
    copy_s = _fastest(lambda: np.copyto(target, source))
    checksum_s = _fastest(lambda: digest_of(source.data, block_bytes_for(num_bytes)))
    return StorageRates(num_bytes / copy_s, num_bytes / checksum_s, num_bytes / write_s, num_bytes / read_s, sync_s)


def _fastest(act: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the least seconds of a few rounds; the first warms up and does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        before()
        start_ns = time.perf_counter_ns()
        act()
        seconds.append((time.perf_counter_ns() - start_ns) / NS_PER_S)
    return max(min(seconds[1:]), 1e-9)


def _write(path: Path, data: NDArray[np.uint8]) -> None:
    with durable_file(path) as file:
        for start in range(0, len(data), PIECE_BYTES):
            file.write(data[start : start + PIECE_BYTES].data)
    sync_folder(path.parent)


def _read(path: Path, into: NDArray[np.uint8]) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(into), PIECE_BYTES):
            file.readinto(into[start : start + PIECE_BYTES].data)


def _forget(path: Path) -> None:
    """Ask the kernel to drop the pages of a file that is durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
