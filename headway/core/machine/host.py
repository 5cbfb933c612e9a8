"""What this process may use of the host it runs on, and how it waits there.

The cores of a job are those of its CPU affinity, cut to the tightest CPU
quota of its control groups: a container started with `--cpus=1.5` sees every
core of the machine and gets one and a half of them.

>>> host_cores() >= 1, available_cores() <= affinity_cores()
(True, True)

The file systems that this process sees: what lies where, and whether its bytes lie on this host.

A file that is mapped into memory belongs on a file system of this host: the pages of one on a network file system are
written back over the network, and a store to such a page waits for the server, or ends the process with SIGBUS.

>>> place_of(Path("/proc/self/maps")).kind
'proc'

The control groups of this process: where their files are, and which CPU quota they set.

Both versions are read, also side by side (hybrid hosts), in nested groups and
inside containers. /proc/self/cgroup says which group the process is in,
/proc/self/mountinfo where its hierarchy is mounted; a limit of any ancestor
counts, so the tightest of all is the one that holds.

    /proc/self/cgroup          3:cpu,cpuacct:/jobs/train        0::/jobs/train
    /proc/self/mountinfo       ... / /sys/fs/cgroup/cpu - cgroup cgroup rw,cpu,cpuacct
    files that are read        /sys/fs/cgroup/cpu/jobs/train/cpu.cfs_quota_us, then /jobs, then the mount point

>>> quota_of("150000 100000"), quota_of("max 100000")
(Quota(cores=1.5, period_s=0.1), None)
"""

from __future__ import annotations

import math
import os
import re
import select
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# The file systems that this process sees: what lies where, and whether its bytes lie on this host.

REMOTE = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs")
)  # fmt: skip
"""Kinds of file systems whose bytes lie on other hosts, or with the host of a virtual machine."""


class Mapped(NamedTuple):
    """A stretch of this process's memory, of a file or its own: a line of /proc/self/maps."""

    start: int
    """Its first address."""
    end: int
    """The address behind it."""
    access: str
    """What it may do: 'r', 'w' and 'x' or '-' in their places, then 's' where others see what is written, else 'p'."""
    inode: int
    """Of its file; 0 = it has none."""
    path: str
    """Of its file as the kernel names it, or a name in brackets; '' = it has none."""


def mapped_memory() -> Iterator[Mapped]:
    """Yield the mappings of this process by address. Raises `OSError` where the kernel does not list them."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, access, _, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            start, end = span.split("-")
            yield Mapped(int(start, 16), int(end, 16), access, int(inode), path[0] if path else "")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    kind: str
    """Its type as the kernel names it: 'ext4', 'tmpfs', 'nfs4', 'fuse.sshfs'."""

    top: PurePosixPath
    """Where it is mounted."""

    shown: str = "/"
    """The directory of the file system that is seen there."""

    controllers: tuple[str, ...] = ()
    """Options of the file system itself; of a cgroup hierarchy of version 1, its controllers."""

    @property
    def is_local(self) -> bool:
        """Whether its bytes lie on this host, so far as its type says; a program behind FUSE may take them anywhere."""
        return self.kind not in REMOTE and not self.kind.startswith("fuse")


def mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """Yield what /proc/self/mountinfo lists, in the order of mounting; nothing where the system has no such file."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        left, dash, right = line.partition(" - ")
        fields, options = left.split(), right.split()
        if not dash or len(fields) < 5 or len(options) < 3:
            continue
        # Blanks in paths are written as octal numbers.
        shown, top = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
        yield Mount(options[0], PurePosixPath(top), shown, tuple(options[2].split(",")))


def place_of(path: Path, root: Path = Path("/")) -> Mount:
    """Return the file system that holds `path`, or would: the deepest mount above it; kind '' where none is known."""
    found = Mount("", PurePosixPath("/"))
    resolved = PurePosixPath(path.resolve())
    for mount in mounts(root):
        # A later mount hides an earlier one at the same place.
        if resolved.is_relative_to(mount.top) and len(mount.top.parts) >= len(found.top.parts):
            found = mount
    return found


# The control groups of this process: where their files are, and which CPU quota they set.

US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """CPU time that a group's processes may use together in each period; then all of them wait for the next one."""

    cores: float
    """CPU seconds per second."""

    period_s: float
    """Length of a period."""


def cpu_quota(root: Path = Path("/")) -> Quota | None:
    """Return the tightest CPU quota of this process's groups and their ancestors; None where no group has one."""
    found = [_quota_in(folder) for folder in group_folders("cpu", root)]
    return min((quota for quota in found if quota), key=lambda quota: quota.cores, default=None)


def throttled_s(root: Path = Path("/")) -> float | None:
    """Return the seconds for which groups of this process were held back by a quota; None where nothing counts them.

    The kernel adds up the time of each core. Of nested groups the one that waited longest counts.
    """
    found = [_throttled_in(folder) for folder in group_folders("cpu", root)]
    return max((seconds for seconds in found if seconds is not None), default=None)


def sharing(root: Path = Path("/")) -> str:
    """Return what the scheduler divides the cores among first: 'cgroups', 'sessions' or 'threads'.

    'cgroups': this process is in a cgroup with a weight of its own (any container). 'sessions': it is not, and each
    session is a group (autogroup). 'threads': every runnable thread of the host gets the same share.
    """
    leaves = group_folders("cpu", root, ancestors=False)
    if any((leaf / "cpu.weight").exists() for leaf in leaves) or any(
        (leaf / "cpu.shares").exists() and (leaf.parent / "cpu.shares").exists() for leaf in leaves
    ):
        return "cgroups"
    return "sessions" if first_line(root / "proc/sys/kernel/sched_autogroup_enabled") == "1" else "threads"


def group_folders(controller: str, root: Path = Path("/"), *, ancestors: bool = True) -> list[Path]:
    """Return the folders of this process's groups that may limit `controller`, innermost first.

    `root` stands for /. Where /proc does not say, the usual mount points are named.
    """
    memberships = list(_memberships(controller, root))
    mounts = list(_mounts(controller, root))
    found = []
    for unified, mounted, top in mounts:
        for of_unified, group in memberships:
            if of_unified == unified:
                inside = _inside(group, mounted)
                chain = [inside, *inside.parents] if ancestors else [inside]
                found += [root / top.relative_to("/") / part.relative_to("/") for part in chain]
    usual = [root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller]
    return list(dict.fromkeys(found)) if mounts and memberships else usual


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, none when it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def first_line(path: Path) -> str:
    """Return a file's first line without the blanks around it, '' when it cannot be read."""
    return (lines_of(path) or [""])[0].strip()


def number_in(path: Path) -> int | None:
    """Return the whole number that a file holds, None when it holds none."""
    text = first_line(path)
    return int(text) if text.lstrip("-").isdigit() else None


def quota_of(text: str) -> Quota | None:
    """Return the quota that cpu.max states: '<quota> <period>' in microseconds, 'max' for no quota."""
    words = text.split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]) or not int(words[0]):
        return None
    return Quota(int(words[0]) / int(words[1]), int(words[1]) / US_PER_S)


def _quota_in(folder: Path) -> Quota | None:
    """Return the quota that a group's own files state: cpu.max of version 2, two files of version 1 (-1: no quota)."""
    unified = quota_of(first_line(folder / "cpu.max"))
    if unified:
        return unified
    return quota_of(f"{first_line(folder / 'cpu.cfs_quota_us')} {first_line(folder / 'cpu.cfs_period_us')}")


def _throttled_in(folder: Path) -> float | None:
    """Return what cpu.stat counts: throttled_usec of version 2, throttled_time (ns) of version 1."""
    counts = dict(line.split(maxsplit=1) for line in lines_of(folder / "cpu.stat") if len(line.split()) == 2)
    if counts.get("throttled_usec", "").isdigit():
        return int(counts["throttled_usec"]) / US_PER_S
    return int(counts["throttled_time"]) / 1e9 if counts.get("throttled_time", "").isdigit() else None


def _memberships(controller: str, root: Path) -> Iterator[tuple[bool, str]]:
    """Yield (whether of version 2, path of the group) from /proc/self/cgroup."""
    for line in lines_of(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        if number == "0" and not names:
            yield True, group
        elif controller in names.split(","):
            yield False, group


def _mounts(controller: str, root: Path) -> Iterator[tuple[bool, str, PurePosixPath]]:
    """Yield (whether of version 2, group that is mounted, mount point) from /proc/self/mountinfo."""
    for mount in mounts(root):
        if mount.kind == "cgroup2" or (mount.kind == "cgroup" and controller in mount.controllers):
            yield mount.kind == "cgroup2", mount.shown, mount.top


def _inside(group: str, mounted: str) -> PurePosixPath:
    """Return where `group` lies below the mount point that shows the group `mounted`, as an absolute path.

    A container may see its own group as the mount's root, or a path that leads out of what it sees: then the mount
    point itself is its group.
    """
    path, shown = PurePosixPath(group), PurePosixPath(mounted)
    if ".." in path.parts or not path.is_absolute():
        return PurePosixPath("/")
    if path.is_relative_to(shown):
        return PurePosixPath("/") / path.relative_to(shown)
    return path if ".." in shown.parts else PurePosixPath("/")


ROOT = Path("/")


def affinity_cores() -> int:
    """Return the cores that this process may run on; all of the host's where the system has no affinities."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(root: Path = ROOT) -> float:
    """Return how many cores' worth of time this process may use: its affinity, cut to its cgroups' quota."""
    quota = cpu_quota(root)
    return min(float(affinity_cores()), quota.cores) if quota else float(affinity_cores())


def host_cores() -> int:
    """Return how many threads of this process can be busy at once: `available_cores`, rounded up, at least 1."""
    return max(1, math.ceil(available_cores()))


def host_id() -> str:
    """Return a name for where process numbers mean what they mean here: this boot of the host, and the container on it.

    It can be part of a file's name.
    """
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        place = ""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', socket.gethostname())}-{zlib.crc32(place.encode()):08x}"


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name: [0] state, [1] parent, [19] start in kernel ticks.

    Raises `OSError` where there is no such process. Its name may be any bytes, brackets and line ends among them.

    >>> int(process_stat(os.getpid())[1]) == os.getppid()
    True
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def readable(fd: int, timeout_s: float | None) -> bool:
    """Whether `fd` has something to read, or its end, within `timeout_s` seconds; None: however long that takes.

    `select.select` refuses descriptors of 1024 and above, which a process with many files open hands out.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3))


# Which processes used the cores, by name: of an interpreter its script, as far as others may see it.

MOST_NAMES = 3
"""Processes that are named."""

INTERPRETERS = ("python", "bash", "sh", "perl", "ruby", "node", "java")
"""Beginnings of names that say nothing of what runs."""

ENDINGS = (".py", ".sh", ".pl", ".rb", ".js", ".jar")
"""Endings of the names of scripts."""


class NamedUse:
    """Adds up the CPU seconds that processes have used themselves, without their children.

    >>> use = NamedUse(Path("/nowhere"))
    >>> use.add({7: ("trainer", 1.0)}), use.add({7: ("trainer", 3.5), 8: ("new", 9.0)})
    (None, None)
    >>> use.largest()
    [('trainer (pid 7)', 2.5)]
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._used_s: dict[int, float] = {}
        self._before_s: dict[int, float] = {}
        self._names: dict[int, str] = {}

    def add(self, processes: Mapping[int, tuple[str, float]]) -> None:
        """Note what each process (pid -> name, CPU seconds so far) has used since the call before."""
        for pid, (name, spent_s) in processes.items():
            used_s = spent_s - self._before_s.get(pid, spent_s)
            if used_s > 0:
                self._names.setdefault(pid, self._script(pid, name))
                self._used_s[pid] = self._used_s.get(pid, 0.0) + used_s
        self._before_s = {pid: spent_s for pid, (_, spent_s) in processes.items()}

    def largest(self) -> list[tuple[str, float]]:
        """Return name and CPU seconds of the processes that used most, at most `MOST_NAMES`."""
        pids = sorted(self._used_s, key=lambda pid: -self._used_s[pid])[:MOST_NAMES]
        return [(f"{self._names[pid]} (pid {pid})", self._used_s[pid]) for pid in pids]

    def _script(self, pid: int, name: str) -> str:
        if not name.startswith(INTERPRETERS):
            return name
        try:
            arguments = (self._root / "proc" / str(pid) / "cmdline").read_bytes().split(b"\0")[1:]
        except OSError:
            return name
        script = next(
            (
                os.path.basename(os.fsdecode(argument))
                for argument in arguments
                if argument and not argument.startswith(b"-")
            ),
            "",
        )
        return f"{name} {script}" if script.endswith(ENDINGS) else name
