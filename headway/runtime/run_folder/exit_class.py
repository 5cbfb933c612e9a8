"""Why a run ended: which rank failed first, and whose fault it was.

Classes: `ok`, `user` (a Python exception, an exit code of the script's own),
`oom` (host or device memory), `hang` (a collective or barrier timed out),
`infra` (signals, lost connections, a crash at teardown), `preempted`
(SIGTERM from outside). A rank that fails only because a peer died is never
named while a rank with a fault of its own exists. Times in ns on
CLOCK_MONOTONIC; exit codes as `subprocess` gives them (-9 = SIGKILL).

>>> ends = [RankEnd(0, 1, end_ns=50, stderr=HEADER + "\\nRuntimeError: Connection closed by peer"),
...         RankEnd(1, 1, end_ns=90, stderr=HEADER + "\\nValueError: x")]
>>> first_failure(ends).rank, classify(first_failure(ends))
(1, 'user')
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headway.core.errors import HEADER, raised

if TYPE_CHECKING:
    from headway.runtime.run_folder.recording import Exit
    from headway.trace.events.loader_facts import AppliedRow

CLASSES: Final = ("ok", "user", "oom", "hang", "infra", "preempted")
"""Every exit class."""

ADVICE: Final = {
    "ok": "nothing failed",
    "user": "an error of the script, which would come again",
    "oom": "out of memory, as it would be again: lower the batch size, or the number of loader workers",
    "hang": "a rank did not come to a collective: compare the ends of RUN/logs; starting it again may help",
    "infra": "not the script's fault by all appearances: starting it again may help",
    "preempted": "stopped from outside: start it again to go on",
}
"""Exit class -> whether to start again."""

TIMERS: Final = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""Signals of a process's own timers."""

TRIAL: Final = "measure.try"
"""What `headway try` has in force in the one run of its script."""

FIXES: Final = (
    (
        r"insufficient shared memory|signal: Bus error",
        "give /dev/shm more room (docker --shm-size=8g), or use fewer workers",
    ),
    (r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    (r"No space left on device", "free some disk space, or write elsewhere"),
    (r"signal: Killed", "a loader worker was killed, most likely for memory: use fewer workers or smaller prefetch"),
    (r"Address already in use", "let the launcher choose the port: drop --master-port"),
)
"""(pattern in the last words of a rank, what to do about it)."""

BLAME: Final = ("user", "oom", "hang", "infra", "preempted", "ok")
"""Classes in the order in which they explain a run of which several launchers each saw a part."""

FAILED_AT_EXIT: Final = "failed_at_exit"
"""Fact that a remedy notes in RUN/applied when work of the script's failed after its last line: a rank that left with
0 has failed all the same."""

_RANK = re.compile(r"^\[rank\d+\]:(?: |$)")
"""What torch's excepthook puts before each line once a process group exists."""

_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ABORT_LINES = 4
"""Lines that a C++ abort may leave behind the traceback of the exception it came from."""

_OOM = re.compile(
    r"OutOfMemoryError|CUDA out of memory|HIP out of memory|^MemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|"
    r"\[Errno 12\] Cannot allocate memory|CUDA_ERROR_OUT_OF_MEMORY",
    re.MULTILINE,
)
_HANG = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)|"
    r"collective operation timed out|Application timeout caused pair closure|"
    r"timed out in monitoredBarrier|wait timeout after \d+ms",
    re.IGNORECASE,
)
_PEER = re.compile(
    r"Connection (?:closed|reset|refused)|closed by peer|reset by peer|Broken pipe|connectFullMesh|Socket closed|"
    r"remote process exited|ncclRemoteError|DistNetworkError|failed to recv, got 0 bytes|recvValue failed|"
    r"No route to host|Network is unreachable|TCPStore.*(?:shut down|closed)|NCCL.*unhandled system error",
    re.IGNORECASE,
)
_INFRA = re.compile(
    r"Bus error|insufficient shared memory|No space left on device|inline_container\.cc:\d+\] \. unexpected pos|"
    r"PytorchStreamWriter failed writing|basic_ios::clear: iostream error|Too many open files|Input/output error|"
    r"Stale file handle|CUDA error: (?:uncorrectable ECC|unspecified launch failure|device-side)|"
    r"CUDA driver|NCCL.*(?:unhandled|internal error)|DataLoader worker .* is killed by signal"
)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    """Global rank."""

    code: int
    """Exit code; minus the signal when one killed it."""

    end_ns: int = 0
    """When the launcher saw it gone."""

    stderr: str = ""
    """The end of what it printed on stderr."""

    traceback_ns: int | None = None
    """When the last traceback began to arrive, None without one."""

    told: bool = False
    """Whether the launcher had sent it a signal before it ended."""

    oom_killed: bool = False
    """Whether the kernel's counters or log say that it was killed for memory."""

    hung: bool = False
    """Whether the launcher ended the run because this rank, or nobody in particular, made no progress."""

    covered: bool = False
    """Whether it was killed, and the other ranks did its work."""


def traceback_of(stderr: str) -> str | None:
    """Return the last traceback in `stderr`, with the exceptions it was chained from; None without one."""
    lines = [_RANK.sub("", line) for line in stderr.replace("\r\n", "\n").split("\n")]
    heads = [index for index, line in enumerate(lines) if line.endswith(HEADER) and "Original" not in line]
    if not heads:
        return _syntax_error(lines)
    first = heads[-1]
    for earlier in reversed(heads[:-1]):
        if any(line in _CHAIN for line in lines[earlier:first]):
            first = earlier
        else:
            break
    return "\n".join(lines[first : _end_of_exception(lines, heads[-1])]).strip("\n")


def _syntax_error(lines: Sequence[str]) -> str | None:
    """Return what Python says of a script that it cannot parse: that has no header; None without it."""
    last = max((index for index, line in enumerate(lines) if _SYNTAX.match(line)), default=-1)
    head = max((index for index in range(last) if lines[index].startswith('  File "')), default=-1)
    return "\n".join(lines[head : last + 1]) if head >= 0 and last - head <= _SYNTAX_LINES else None


_SYNTAX, _SYNTAX_LINES = re.compile(r"(SyntaxError|IndentationError|TabError): "), 4


def _end_of_exception(lines: Sequence[str], head: int) -> int:
    """Return the index after the exception that `lines[head]` opens: what a library prints later is cut off."""
    index = head + 1
    while index < len(lines) and (not lines[index] or lines[index][0] in " \t|+"):
        index += 1
    index += 1  # the line 'ValueError: ...'
    while index < len(lines) and not re.match(r"\[?[A-Z]?\d{3,4}[ :/-]|terminate called|\[rank\d+\]:\[", lines[index]):
        index += 1
    return index


def is_secondary(end: RankEnd) -> bool:
    """Say whether this rank failed only because another process went away, or because it was told to."""
    if end.code == 0 or end.told:
        return True
    message = _message(_exception_of(end))
    if end.code == -signal.SIGABRT and not message:
        return not _HANG.search(end.stderr)
    if end.code < 0 and not message:
        return False
    return bool(_PEER.search(message)) and not _OOM.search(message)


def _exception_of(end: RankEnd) -> str:
    """Return the traceback that ended this rank, '' when something else did.

    Where a signal ended it, an earlier traceback in its log is none of this;
    but gloo may abort the teardown that an exception began.
    """
    found = traceback_of(end.stderr) or ""
    if end.code > 0 or not found:
        return found
    behind = end.stderr[end.stderr.rfind(HEADER) :].count("\n") - found[found.rfind(HEADER) :].count("\n")
    aborted = end.code in (-signal.SIGABRT, -signal.SIGINT)
    return found if aborted and behind <= _ABORT_LINES and _message(found).count("\n") < _ABORT_LINES else ""


def _message(text: str) -> str:
    """Return the exception's own lines: what follows the last indented frame."""
    lines = text.rstrip("\n").split("\n")
    frames = [index for index, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[frames[-1] + 1 :] if frames else lines)


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that failed first of its own accord, or the earliest of the others, or None.

    Order: the rank that a run was ended for; a fault of its own before one caused by a peer; then the moment of
    the traceback; then the moment of the exit.
    """
    failed = [end for end in ends if (end.code != 0 and not end.covered) or end.hung]
    if not failed:
        return None
    return min(
        failed, key=lambda end: (not end.hung, is_secondary(end), end.told, end.traceback_ns or end.end_ns, end.rank)
    )


def classify(end: RankEnd | None, *, preempted: bool = False) -> str:
    """Return the exit class of the first failing rank; `preempted` when the launcher itself got SIGTERM."""
    if preempted:
        return "preempted"
    if end is None:
        return "ok"
    if end.hung:
        return "hang"
    message = _message(_exception_of(end))
    text = message or end.stderr[-4096:]
    if end.oom_killed or _OOM.search(text):
        return "oom"
    if _HANG.search(text) or (end.code == -signal.SIGABRT and _HANG.search(end.stderr)):
        return "hang"
    if end.code == -signal.SIGTERM:
        return "preempted"
    if -end.code in (signal.SIGINT, *TIMERS):
        return "user"
    own = end.code > 0 or bool(message)
    return "user" if own and not is_secondary(end) and not _INFRA.search(text) else "infra"


def advice(end: RankEnd, cls: str) -> str:
    """Return what to do about this end: the fix of a known cause, else whether a new start may help."""
    words = end.stderr[-4096:]
    return next((fix for pattern, fix in FIXES if re.search(pattern, words)), ADVICE[cls])


def failure_text(first: RankEnd, end: Exit, run: Path, *, interrupted: bool, alone: bool) -> str:
    """Return the last words on stderr: who failed, of what class, what to do, and the traceback.

    After Ctrl-C nobody failed, and where the script was told is nobody's question. What a rank `alone` printed last
    stands right above: it is not printed twice.
    """
    if interrupted:
        return f"headway: stopped by Ctrl-C. The run is in {run}\n"
    how = f"killed by signal {-first.code}" if first.code < 0 else f"exit code {end.code}"
    how = "ended for making no progress" if first.hung else how
    do = f"who was waited for says: headway hang {shlex.quote(str(run))}" if first.hung else advice(first, end.cls)
    guarded = "BadLoss" in (end.traceback or "")  # a remedy that was asked to end the job did so
    if end.cls == "user" and not first.hung and not guarded and (names := in_force(run, first.rank)):
        do = f"an error while {', '.join(names)} changed how the script runs: run it once more without --apply, and "
        do += "report it if that succeeds"
        if names == [TRIAL]:  # the user asked for `headway try`, not for --apply
            do = "an error of the script, or of a trial: run it with headway run, and report it if that succeeds"
    begin = "\n" if first.rank == 0 and first.stderr and not first.stderr.endswith("\n") else ""
    what = raised(end.traceback or "")
    who = f"{what}. Rank" if what else "rank"
    head = f"{begin}headway: {who} {first.rank} failed first ({how}): {do}. The run is in {run}\n"
    if end.traceback:
        told = alone and first.stderr.rstrip().endswith(end.traceback.rstrip())
        return head if told else head + end.traceback + "\n"
    if alone:
        return head
    last = [line for line in first.stderr.splitlines() if line.strip()][-5:]
    return head + "".join(f"  {line}\n" for line in last)


def failed_at_exit(run: Path, rank: int) -> bool:
    """Say whether a remedy has noted in the folder `run` that work of this rank's script failed after its last line."""
    return any(FAILED_AT_EXIT in (row.facts or {}) for row in _outcomes(run, rank))


def in_force(run: Path, rank: int) -> list[str]:
    """Return the names of the remedies that this rank had to its end."""
    return [row.name for row in _outcomes(run, rank) if row.applied and not row.why_without]


def _outcomes(run: Path, rank: int) -> list[AppliedRow]:
    from headway.trace.recording.run_facts import outcomes_of  # the launcher starts without it

    return outcomes_of(run, rank=rank)


FLUSH_CODE: Final = 120
"""What Python exits with when it could not flush its output at the end."""

HUNG_CODE: Final = 124
"""Exit status of a run that was ended for making no progress and whose ranks left with 0: that of timeout(1)."""


def exit_status(code: int) -> int:
    """Return what a shell would report: the code, or 128 + the signal.

    >>> exit_status(3), exit_status(-9)
    (3, 137)
    """
    return 128 - code if code < 0 else code


class OomWatch:
    """Counts of processes the kernel killed for memory: read once before the start, once after."""

    def __init__(self, cgroup: Path | None = None, kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._counters = _counter_files(cgroup)
        self._kernel_log = kernel_log
        self._since_us = time.monotonic_ns() // 1000
        self._before = self._count()

    def _count(self) -> int:
        total = 0
        for path in self._counters:
            try:
                for line in path.read_text().splitlines():
                    word, _, value = line.partition(" ")
                    total += int(value) if word == "oom_kill" else 0
            except (OSError, ValueError):
                continue
        return total

    def killed(self, pid: int) -> bool:
        """Say whether the cgroup's counter rose since the start, or the kernel's log names `pid`."""
        return self._count() > self._before or _kernel_log_names(self._kernel_log, pid, self._since_us)


def _counter_files(cgroup: Path | None) -> list[Path]:
    """Return this process's `memory.events` (cgroup 2) and `memory.oom_control` (cgroup 1), where they exist."""
    if cgroup is not None:
        return [cgroup / "memory.events", cgroup / "memory.oom_control"]
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [Path("/sys/fs/cgroup" + path) / "memory.events", Path("/sys/fs/cgroup/memory.events")]
        elif "memory" in controllers.split(","):
            found += [Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control"]
    return [path for path in dict.fromkeys(found) if path.exists()]


def _kernel_log_names(path: Path, pid: int, since_us: int) -> bool:
    """Look for 'Killed process <pid>' in what the kernel logged since `since_us`, where its log may be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    pattern = re.compile(rb"^\d+,\d+,(\d+),[^;]*;.*Killed process %d\b" % pid)
    try:
        while record := os.read(fd, 8192):
            found = pattern.match(record)
            if found and int(found[1]) >= since_us:
                return True
        return False
    except OSError:
        return False
    finally:
        os.close(fd)
