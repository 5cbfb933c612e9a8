"""What a folder and this host's memory can do for a save: rates of copy, checksum, write and read.

Use it to tell what a save of N bytes would cost before there is one:
`measure(folder)` takes a few seconds and leaves nothing behind. A save through
headway stops training for a copy in memory; writing and checksums run behind
the steps, one after the other. Bytes per second.

>>> rates = StorageRates(copy=8e9, checksum=16e9, write=5e8, read=2e9, sync_s=0.01)
>>> rates.blocked_s(16_000_000_000), round(rates.durable_s(16_000_000_000), 2)
(2.0, 35.1)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.checkpoint.policy.costs import DURABLE_FILES
from headway.core.errors import InputError
from headway.core.units import MIB, NS_PER_S, format_bytes
from headway.storage.stored.digests import block_bytes_for, digest_of
from headway.storage.stored.durable import durable_file, sync_folder

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
