"""Folders and files that are this user's alone, until somebody asks for more.

A run holds the command line and what the ranks print; a runtime folder holds
sockets. Both are made with mode 0700 whatever the umask is, and a folder that
somebody else made first is not used.

>>> import tempfile
>>> run = Path(tempfile.mkdtemp()) / "run"
>>> private_folder(run)
>>> oct(run.stat().st_mode & 0o777), oct(file_mode(run))
('0o700', '0o600')

Writing and deleting stay inside the folder that a verb was given: no link leads them out of it.

A checkpoint or a run may come from anybody, with `rank-0` a link to somebody's
home. Reading follows links (a rank's folder may lie on another disk); what
writes, renames or deletes asks here first. The folder itself may be a link:
whoever named it meant where it leads.

>>> import tempfile
>>> given = Path(tempfile.mkdtemp())
>>> check_links(given)
>>> (given / "rank-0").symlink_to("/etc")
>>> check_links(given)
Traceback (most recent call last):
headway.core.errors.InputError: ...rank-0 is a link to /etc, outside of ...
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from headway.core.errors import InputError

PRIVATE = 0o700
"""Mode of folders that are the user's alone."""


def private_folder(path: str | Path, mode: int = PRIVATE) -> None:
    """Make a folder with exactly this mode, and those above it as the umask says; one that exists stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, mode & PRIVATE)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        os.chmod(path, mode)


def file_mode(folder: str | Path) -> int:
    """Return the mode of a file that is as open as its folder: what may be listed may be read."""
    return os.stat(folder).st_mode & 0o666


def runtime_directory() -> Path:
    """Return the folder for sockets and logs of this user, made with mode 0700.

    $XDG_RUNTIME_DIR/headway; where that is not set, the first of /tmp/headway-<uid>, the same in /dev/shm and
    /var/tmp, and ~/.cache/headway/run that nobody else made before. All processes of a user on a host find the same.
    Raises `InputError` where none can be used.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(session) / "headway"] if os.path.isdir(session) else list(_places())
    faults = []
    for folder in candidates:
        fault = _fault(folder)
        if not fault:
            return folder
        faults.append(fault)
    raise InputError(f"{faults[0]} Remove it, or set XDG_RUNTIME_DIR to a folder of yours that nobody else can enter.")


def _places() -> Iterator[Path]:
    """Yield where the runtime folder may lie, best first; an address of a socket has to be short."""
    for base in ("/tmp", "/dev/shm", "/var/tmp"):
        yield Path(base) / f"headway-{os.getuid()}"
    with suppress(RuntimeError):  # this user has no home
        yield Path("~/.cache/headway/run").expanduser()


def _fault(folder: Path) -> str:
    """Make a folder, or say why it cannot be used; '' when it can."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(folder, PRIVATE)
        found = folder.lstat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}."
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return f"{folder} must be a folder of user {os.getuid()} that nobody else can enter (mode 0700)."
    return ""


# Writing and deleting stay inside the folder that a verb was given: no link leads them out of it.


def check_inside(root: str | Path, path: str | Path) -> None:
    """Raise `InputError` when a write to `path` (by rename, or a new file) would end outside of `root`."""
    folder = os.path.dirname(path)
    if not _is_inside(root, folder):
        raise _outside(root, folder)


def check_links(root: str | Path, names: Iterable[str] = ("",)) -> None:
    """Raise `InputError` when a link leads out of `root`: at one of `names`, folders in it, or anywhere below them.

    Without names all of `root` is looked at. What is written afterwards stays inside, whatever is at its place.
    """
    for name in names:
        top = os.path.join(root, name) if name else str(root)
        if name and not _is_inside(root, top):
            raise _outside(root, top)
        for folder, folders, files in os.walk(top):
            for place in (os.path.join(folder, entry) for entry in (*folders, *files)):
                if os.path.islink(place) and not _is_inside(root, place):
                    raise _outside(root, place)


def remove_tree(path: str | Path) -> None:
    """Remove a folder and what is in it, as far as that goes; of a link only the link."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _is_inside(root: str | Path, path: str | Path) -> bool:
    top = os.path.realpath(root)
    return os.path.commonpath([top, os.path.realpath(path)]) == top


def _outside(root: str | Path, path: str | Path) -> InputError:
    return InputError(
        f"{path} is a link to {os.path.realpath(path)}, outside of {root}: nothing is written or removed there. "
        "Put what it leads to in the place of the link, and run this again."
    )
