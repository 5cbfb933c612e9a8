"""Where the rings of a run lie: in a folder for each host, and their mapped files on a file system of that host.

    one launcher                RUN/rings/            rings, spools, sealed pieces
    several hosts, launchers    RUN/hosts/<host>-<its index>/rings/   the same, of this host's processes alone
    RUN on NFS, Lustre, FUSE    <either>/live -> a folder of this host: the rings; the rest stays in RUN

A ring is mapped memory that every record is stored into. On a network file system each store may wait for a server,
and a file that another host shortens ends its writer with SIGBUS. So a host touches rings of its own only, and what
leaves them for RUN is appended in large pieces.

>>> ring_folders(Path("/nonexistent"))
[]
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headway.core.machine.host import host_id, place_of

LIVE = "live"
"""Name of the link to the private folder that holds the mapped files."""

OF = "of"
"""Name of the link back, in that folder: while it leads there, the rings are wanted."""

PREFIX = "headway-rings-"

NEW_S = 60.0
"""A private folder younger than this is never swept."""

_HELD: list[int] = []
"""Locks of this process on private folders."""

ROOM_BYTES = 48 << 20
"""Free room that a file system must have to be chosen: eight ranks with sixteen loader workers each fill 42 MB."""


def ring_folders(run: Path) -> list[Path]:
    """Return the folders of a run that hold, or held, rings."""
    found = [run / "rings", *sorted(run.glob("hosts/*/rings"))]
    return [folder for folder in found if folder.is_dir()]


def live_folder(rings: Path) -> Path:
    """Return where the mapped files of `rings` lie: itself, or a private folder of this host."""
    live = rings / LIVE
    return live if os.path.isdir(live) else rings  # also where the file system fails: the job goes on


def make(run: Path, host: int | None = None) -> Path:
    """Make the folder for the rings of this host; `host` is its index where other launchers write into `run` as well.

    Raises `OSError` where the run folder cannot be written; without room elsewhere on this host the rings lie in it.
    """
    rings = run / "rings" if host is None else run / "hosts" / f"{host_id()}-{host}" / "rings"
    rings.mkdir(parents=True, exist_ok=True)
    if not place_of(rings).is_local:
        if (rings / LIVE).is_dir():
            _HELD.append(_hold(rings / LIVE))  # another launcher of this host made it, and may end before this one
        else:
            _link(rings)
    return rings


def leave(rings: Path) -> None:
    """Remove the private folder that `make` made, once the last ring is gone."""
    live = rings / LIVE
    if not live.is_symlink():
        return
    with contextlib.suppress(OSError):
        private = live.resolve()
        if os.listdir(private) == [OF]:  # otherwise another launcher of this host still has rings there
            shutil.rmtree(private)
            live.unlink()


def bases() -> Iterator[Path]:
    """Yield folders of this host in which rings may lie, the best first."""
    # /dev/shm last: a container's may be small, and loader workers need it.
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/dev/shm"):
        base = Path(name)
        if name and base.is_dir() and os.access(base, os.W_OK) and place_of(base).is_local:
            room = os.statvfs(base)
            if room.f_bavail * room.f_frsize >= ROOM_BYTES:
                yield base


def _link(rings: Path) -> None:
    """Make the private folder to which `live` points; the first of a host's launchers to do so wins."""
    link = rings / LIVE
    for base in bases():
        with contextlib.suppress(OSError):
            _sweep(base)
            private = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            _HELD.append(_hold(private))
            try:
                (private / OF).symlink_to(link.absolute())
                if link.is_symlink() and not link.exists():
                    link.unlink()  # what it led to is gone: of an earlier boot, or swept
                link.symlink_to(private)
            except FileExistsError:
                shutil.rmtree(private)
            return


def _hold(private: Path) -> int:
    """Lock a private folder as in use until this process ends, also where it is seen from another container."""
    descriptor = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _sweep(base: Path) -> None:
    """Remove folders of this user that no launcher holds and to which no run folder leads: that was removed.

    A run folder that another container sees alone seems to be removed as well: hence the lock. A folder of the last
    minute may not have been locked yet.
    """
    for private in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            of, about = private / OF, private.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < NEW_S:
                continue
            if of.is_symlink() and of.resolve() != private.resolve() and _is_free(private):
                shutil.rmtree(private)


def _is_free(private: Path) -> bool:
    descriptor = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
