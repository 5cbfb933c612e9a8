"""What about this host would break or slow a training job: each finding with its value, its limit and the fix.

Use `check()` before a start. Nothing is changed, nothing leaves the host,
torch is not imported (its version comes from the package's metadata). Sizes
in bytes.

>>> finding = Finding("memory lock", 65536, 8 << 20, ok=False, fix="ulimit -l unlimited")
>>> str(finding)
'bad  memory lock: 65536 (limit 8388608). Fix: ulimit -l unlimited'
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from headway.core.machine.host import available_cores, lines_of, number_in, place_of
from headway.core.machine.host_load import load_beside
from headway.core.machine.thread_samples import ThreadSamples
from headway.core.units import GIB, MIB, format_bytes
from headway.runtime.host.host_memory import cgroup_memory, meminfo
from headway.trace.rings import ring_folders

Value = int | float | str | None

MIN_SHM_BYTES = 1 * GIB
"""A container's default is 64 MB: loader workers then die of a bus error."""

MIN_FILES = 4096
"""Open files: loader workers hold one descriptor per tensor in flight; the usual default is 1024."""

MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 2 * GIB
MIN_TORCH = (2, 6)
MIN_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: Value
    """What was found, None when the host does not say."""
    limit: Value
    """What it is held to, None when it is only stated."""
    ok: bool | None
    """None where it could not be asked."""
    fix: str = ""
    """What to do when it is not ok, or why the value matters."""

    def __str__(self) -> str:
        """Return one line."""
        state = "-   " if self.ok is None else "ok  " if self.ok else "bad "
        limit = f" (limit {self.limit})" if self.limit is not None else ""
        fix = f". Fix: {self.fix}" if self.ok is False else ""
        return f"{state} {self.name}: {self.value}{limit}{fix}"


def check(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at everything in `CHECKS`; `root` stands for / (tests look at a made-up one)."""
    return [look(root, env) for look in CHECKS.values()]


def shared_memory(root: Path, env: Mapping[str, str]) -> Finding:
    """Free space of /dev/shm: loader workers hand batches over in it."""
    name = "shared memory (/dev/shm)"
    try:
        free = shutil.disk_usage(root / "dev/shm").free
    except OSError:
        return Finding(name, None, format_bytes(MIN_SHM_BYTES), False, "mount a tmpfs on /dev/shm")
    fix = "start the container with --shm-size=8g (or --ipc=host), or use fewer loader workers"
    return Finding(name, format_bytes(free), format_bytes(MIN_SHM_BYTES), free >= MIN_SHM_BYTES, fix)


def open_files(root: Path, env: Mapping[str, str]) -> Finding:
    """Limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return Finding(
        "open files",
        "unlimited" if unlimited else soft,
        MIN_FILES,
        unlimited or soft >= MIN_FILES,
        f"ulimit -n {MIN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}",
    )


def processes(root: Path, env: Mapping[str, str]) -> Finding:
    """Limit of processes and threads of this user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    unlimited = soft == resource.RLIM_INFINITY
    return Finding("processes", "unlimited" if unlimited else soft, 1024, unlimited or soft >= 1024, "ulimit -u 4096")


def memory(root: Path, env: Mapping[str, str]) -> Finding:
    """Memory that is free for use, of the host."""
    available = meminfo(root, "MemAvailable")
    return Finding(
        "available memory",
        None if available is None else format_bytes(available),
        format_bytes(MIN_MEMORY_BYTES),
        available is None or available >= MIN_MEMORY_BYTES,
        "end other jobs on this host, or lower the batch size and the number of loader workers",
    )


def memory_limit(root: Path, env: Mapping[str, str]) -> Finding:
    """Memory left below the cgroup's limit: beyond it the kernel kills a rank without a word."""
    limit, used = cgroup_memory(root)
    left = None if limit is None else limit - (used or 0)
    return Finding(
        "memory left in the cgroup",
        "no limit" if left is None else format_bytes(left),
        format_bytes(MIN_MEMORY_BYTES),
        left is None or left >= MIN_MEMORY_BYTES,
        "raise the container's memory limit (--memory, resources.limits.memory)",
    )


def cores(root: Path, env: Mapping[str, str]) -> Finding:
    """Cores that may be used: the affinity, cut to the tightest quota of the cgroups."""
    usable = available_cores(root)
    return Finding("usable cores", usable, 1, usable >= 1, "give the container at least one core (--cpus)")


def other_load(root: Path, env: Mapping[str, str]) -> Finding:
    """Cores that other processes keep busy now: what they take, a job does not get."""
    load = load_beside(root=root)
    if not load.readings:
        return Finding("load of other processes", None, None, True)
    text = f"{load.other_cores:.2f} of {load.cores_available:g} cores"
    return Finding("load of other processes", text, None, True)


def threads(root: Path, env: Mapping[str, str]) -> Finding:
    """Threads of torch's kernels against cores: unset, each rank of a plain start takes every core."""
    usable = available_cores(root)
    text = env.get("OMP_NUM_THREADS", "")
    ranks = int(env.get("LOCAL_WORLD_SIZE", "1") or 1)
    wanted = int(text) * ranks if text.isdigit() else None
    return Finding(
        "OMP_NUM_THREADS x ranks",
        "unset" if wanted is None else wanted,
        f"{usable:g} cores",
        wanted is None or wanted <= max(usable, ranks),
        f"export OMP_NUM_THREADS={max(int(usable) // ranks, 1)}",
    )


def python(root: Path, env: Mapping[str, str]) -> Finding:
    """Version of Python."""
    wanted = ".".join(map(str, MIN_PYTHON))
    return Finding(
        "python", platform.python_version(), wanted, sys.version_info >= MIN_PYTHON, f"use {wanted} or newer"
    )


def torch(root: Path, env: Mapping[str, str]) -> Finding:
    """Version of torch, from the package's metadata."""
    wanted = ".".join(map(str, MIN_TORCH))
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", None, wanted, False, "pip install torch (the build for your driver)")
    parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    return Finding("torch", found, wanted, parts >= MIN_TORCH, "pip install --upgrade torch")


def cuda(root: Path, env: Mapping[str, str]) -> Finding:
    """CUDA devices as the driver's library sees them, without torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as cause:
        driver = (root / "proc/driver/nvidia/version").exists()
        return Finding("cuda devices", 0, None, not driver, f"the driver is there but its library is not: {cause}")
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        names = {str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)}
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    text = f"{count} ({', '.join(sorted(names))}; driver {version})" if count else 0
    return Finding("cuda devices", text, None, True)


def ptrace(root: Path, env: Mapping[str, str]) -> Finding:
    """Whether another process's stack may be read (py-spy, gdb): needed only to look into a hang."""
    scope = number_in(root / "proc/sys/kernel/yama/ptrace_scope")
    allowed = scope in (None, 0) or os.geteuid() == 0 or scope == 1
    return Finding(
        "ptrace scope",
        "off" if scope is None else scope,
        "off, 0 or 1",
        allowed,
        "run the container with --cap-add=SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=1",
    )


def run_delay(root: Path, env: Mapping[str, str]) -> Finding:
    """Whether the kernel says how long a thread waited for a core: tells fetching from a lack of cores."""
    there = bool(lines_of(root / "proc/self/schedstat"))
    fix = "sysctl kernel.sched_schedstats=1; without it such waits are counted as fetch"
    return Finding("run delay (/proc/self/schedstat)", "yes" if there else "no", "yes", there, fix)


def code_samples(root: Path, env: Mapping[str, str]) -> Finding:
    """Whether a process may sample its own code: without it useful time beside busy processes holds some waiting.

    Many containers forbid it (`kernel.perf_event_paranoid` above 2, seccomp), and only a busy host needs it.
    """
    value = "yes"
    try:
        ThreadSamples()
    except OSError as cause:
        value = f"no ({cause.strerror or cause}): beside busy processes useful time holds some waiting"
    return Finding("code samples (perf_event_open)", value, None, True)


def disk(root: Path, env: Mapping[str, str]) -> Finding:
    """Free space where run folders go: the working directory."""
    free = shutil.disk_usage(Path.cwd()).free
    return Finding(
        f"free disk ({Path.cwd()})",
        format_bytes(free),
        format_bytes(MIN_DISK_BYTES),
        free >= MIN_DISK_BYTES,
        "free some, or name another place with --out",
    )


def run_folders(root: Path, env: Mapping[str, str]) -> Finding:
    """On what file system run folders lie: on one of another host, rings are mapped elsewhere on this host."""
    place = place_of(Path.cwd(), root)
    private = None if place.is_local else next(ring_folders.bases(), None)
    value = f"{place.kind or 'unknown'}{f', rings in {private}' if private is not None else ''}"
    fix = "each record may wait for the file server: free 48 MiB of the temporary folder, or name a local --out"
    return Finding(f"file system ({Path.cwd()})", value, "a local one", place.is_local or private is not None, fix)


def temporary(root: Path, env: Mapping[str, str]) -> Finding:
    """Free space of the temporary folder: sockets and compiled kernels live there."""
    import tempfile

    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    fix = "free some, or set TMPDIR to another place"
    return Finding(f"free disk ({folder})", format_bytes(free), format_bytes(256 * MIB), free >= 256 * MIB, fix)


def host_name(root: Path, env: Mapping[str, str]) -> Finding:
    """Whether this host's own name can be resolved: gloo and rendezvous need it."""
    import socket

    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        fix = f"add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and MASTER_ADDR"
        return Finding("host name resolves", f"{name}: no", "yes", False, fix)
    return Finding("host name resolves", f"{name}: yes", "yes", True)


Check = Callable[[Path, Mapping[str, str]], Finding]

CHECKS: Final[Mapping[str, Check]] = {
    "shared_memory": shared_memory,
    "open_files": open_files,
    "processes": processes,
    "memory": memory,
    "memory_limit": memory_limit,
    "cores": cores,
    "other_load": other_load,
    "threads": threads,
    "python": python,
    "torch": torch,
    "cuda": cuda,
    "ptrace": ptrace,
    "run_delay": run_delay,
    "code_samples": code_samples,
    "disk": disk,
    "run_folders": run_folders,
    "temporary": temporary,
    "host_name": host_name,
}
"""Everything `check` looks at, in the order of the report."""
