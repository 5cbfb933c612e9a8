"""The file systems that this process sees: what lies where, and whether its bytes lie on this host.

A file that is mapped into memory belongs on a file system of this host: the pages of one on a network file system are
written back over the network, and a store to such a page waits for the server, or ends the process with SIGBUS.

>>> place_of(Path("/proc/self/maps")).kind
'proc'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REMOTE = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs")
)  # fmt: skip
"""Kinds of file systems whose bytes lie on other hosts, or with the host of a virtual machine."""


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
