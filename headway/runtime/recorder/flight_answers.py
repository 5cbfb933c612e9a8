"""A thread by which a rank answers for its Flight Recorder while the thread that trains hangs.

Where ranks train on devices the host only puts collectives into a queue: a rank that blocks all others is told from
what each rank's queue holds, which torch's Flight Recorder knows. The thread sleeps in a read of a named pipe beside
the rank's ring, costs nothing meanwhile, and writes what it is asked for to the file that the request names. torch
lets go of the interpreter where the host waits for a device, so the thread runs then; one that does not answer is a
finding too.

    launcher  -- "RUN/hang/0/r3.flight.json" -->  a0-r3-p71.ask  -->  rank 3 writes that file
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from headway.core.machine.hidden_thread import HiddenThread
from headway.runtime.recorder.probes import write_whole

SUFFIX = ".ask"
"""Of the pipe beside a ring."""

POLL_S = 0.02


FLIGHT_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch that return a Flight Recorder's entries: NCCL has one of its own beside that of other backends."""


def flight_entries() -> bytes:
    """Return the Flight Recorders' entries as JSON, empty when no process group exists: of the one that has the most.

    Raises what torch raises.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return b""
    module = sys.modules["torch._C._distributed_c10d"]
    dumps = [bytes(getattr(module, name)()) for name in FLIGHT_DUMPS if hasattr(module, name)]
    return max(dumps, key=lambda dump: dump.count(b'"state"'), default=b"")


def pipe_of(ring: Path) -> Path:
    """Return the pipe by which the process of a ring is asked."""
    return ring.with_suffix(SUFFIX)


def answer_requests(ring: Path) -> None:
    """Begin to answer, in a thread of this process. Raises `OSError` where the folder takes no pipes."""
    path = pipe_of(ring)
    if path.exists():
        return
    os.mkfifo(path, 0o600)
    # Open for writing as well: a pipe that nobody else has open any more would end every read at once.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    HiddenThread(lambda: _answer(descriptor), name="headway-flight").start()


def _answer(descriptor: int) -> None:
    while True:
        for target in os.read(descriptor, 4096).decode(errors="replace").splitlines():
            # What fails is not said here, where nobody looks: the file does not come.
            with contextlib.suppress(Exception):
                entries = flight_entries()
                if entries:
                    write_whole(target, entries.decode())


def collect(pipes: Mapping[int, Path], folder: Path, *, deadline_s: float) -> dict[int, Path]:
    """Ask each rank for its Flight Recorder's entries; returns the file in `folder` of each that answered in time."""
    wanted: dict[int, Path] = {}
    for rank, pipe in pipes.items():
        target = folder / f"r{rank}.flight.json"
        with contextlib.suppress(OSError):  # never asked, or gone: opening a pipe that nobody reads fails at once
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(f"{target}\n".encode())
            wanted[rank] = target
    end = time.monotonic() + deadline_s
    while not all(target.exists() for target in wanted.values()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return {rank: target for rank, target in wanted.items() if target.exists()}
