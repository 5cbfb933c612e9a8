"""What can be learnt of a process from outside, each question with a deadline: state, CPU use, Python stacks.

Needs no right to trace: /proc of the own user, and a signal for which the
process itself has registered a handler of `faulthandler`, which writes its
stacks even while it is blocked in C. A process that does not answer is a
finding, not a wait. Linux only, as the launcher.

>>> state(os.getpid()), state(1 << 30)
('R', 'X')
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
"""Asks a rank for its stacks; one of the signals that nobody else has a meaning for."""

CPU_S = 0.2
"""How long the CPU use of a suspect is watched."""

POLL_S = 0.02

HALTED = "not asked: the process runs no code"
"""In place of the stack of a process that is stopped or gone."""


def register_stacks(path: str) -> int:
    """Let `SIGNAL` write this process's Python stacks to `path`; returns the signal, 0 when it is taken already."""
    import faulthandler

    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)
    return int(SIGNAL)


def state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; 'X' when the process is gone."""
    return _stat(pid)[0]


def name(pid: int) -> str:
    """Return the name of a process, '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Return the child processes of a process, in order; [] when the kernel does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return sorted(found)


def _stat(pid: int) -> tuple[str, float]:
    """Return (state letter, CPU seconds used) of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "X", 0.0


def catches(pid: int, number: int) -> bool:
    """Say whether a process has a handler for signal `number`: without one the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt:\t0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def ask(
    pids: Mapping[int, int], signals: Mapping[int, int], files: Mapping[int, Path], *, deadline_s: float
) -> dict[int, dict[str, object]]:
    """Return per rank `cpu_fraction`, `wait_channel` and `stack` (text, or why there is none), within `deadline_s`.

    `signals` says by which signal a rank writes its stacks, 0 for none, and `files` to which file.
    """
    began = time.monotonic()
    before = {rank: _stat(pid)[1] for rank, pid in pids.items()}
    sizes = {rank: _size(file) for rank, file in files.items()}
    able = [rank for rank, pid in pids.items() if state(pid) not in "TtZX"]  # a stopped one answers once it goes on
    asked = [rank for rank in able if signals.get(rank) and catches(pids[rank], signals[rank])]
    for rank in asked:
        with contextlib.suppress(OSError):
            os.kill(pids[rank], signals[rank])
    seen = dict(sizes)
    quiet_since = time.monotonic()
    while (passed := time.monotonic() - began) < deadline_s:
        now = {rank: _size(files[rank]) for rank in asked}
        if any(now[rank] != seen[rank] for rank in asked):
            quiet_since, seen = time.monotonic(), {**seen, **now}
        answered = all(seen[rank] > sizes[rank] for rank in asked)
        if passed > CPU_S and answered and time.monotonic() - quiet_since > 3 * POLL_S:
            break
        time.sleep(POLL_S)
    spent_s = max(time.monotonic() - began, POLL_S)
    return {
        rank: {
            "cpu_fraction": round(max(_stat(pid)[1] - before[rank], 0.0) / spent_s, 3),
            "wait_channel": _wait_channel(pid),
            "stack": _stack(files[rank], sizes[rank], rank in asked, deadline_s) if rank in able else HALTED,
        }
        for rank, pid in pids.items()
    }


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _stack(file: Path, begin: int, asked: bool, deadline_s: float) -> str:
    if not asked:
        return "not asked: the process has no handler for it"
    try:
        text = file.read_bytes()[begin:].decode(errors="replace").strip()
    except OSError as cause:
        return f"not readable: {cause}"
    return _unescaped(text) or f"no answer within {deadline_s:g} s"


def _unescaped(text: str) -> str:
    r"""Return what faulthandler wrote with its escapes, which it uses for all beyond ASCII, as the letters they mean.

    >>> _unescaped(r'File "/data/m\xfcller/\u03b1.py", line 3')
    'File "/data/müller/α.py", line 3'
    """
    return re.sub(r"\\(?:x(..)|u(....)|U(.{8}))", _letter, text)


def _letter(escape: re.Match[str]) -> str:
    """Return the character of one escape; what is none stays."""
    try:
        return chr(int(escape[1] or escape[2] or escape[3], 16))
    except (ValueError, OverflowError):
        return escape[0]


def _wait_channel(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in, '' when the kernel does not tell."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        return ""
