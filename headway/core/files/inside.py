"""Writing and deleting stay inside the folder that a verb was given: no link leads them out of it.

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
from collections.abc import Iterable
from pathlib import Path

from headway.core.errors import InputError


def check_inside(root: str | Path, path: str | Path) -> None:
    """Raise `InputError` when a write to `path` (by rename, or a new file) would end outside of `root`."""
    folder = os.path.dirname(path)
    if not _is_inside(root, folder):
        raise _refused(root, folder)


def check_links(root: str | Path, names: Iterable[str] = ("",)) -> None:
    """Raise `InputError` when a link leads out of `root`: at one of `names`, folders in it, or anywhere below them.

    Without names all of `root` is looked at. What is written afterwards stays inside, whatever is at its place.
    """
    for name in names:
        top = os.path.join(root, name) if name else str(root)
        if name and not _is_inside(root, top):
            raise _refused(root, top)
        for folder, folders, files in os.walk(top):
            for place in (os.path.join(folder, entry) for entry in (*folders, *files)):
                if os.path.islink(place) and not _is_inside(root, place):
                    raise _refused(root, place)


def remove_tree(path: str | Path) -> None:
    """Remove a folder and what is in it, as far as that goes; of a link only the link."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _is_inside(root: str | Path, path: str | Path) -> bool:
    top = os.path.realpath(root)
    return os.path.commonpath([top, os.path.realpath(path)]) == top


def _refused(root: str | Path, path: str | Path) -> InputError:
    return InputError(
        f"{path} is a link to {os.path.realpath(path)}, outside of {root}: nothing is written or removed there. "
        "Put what it leads to in the place of the link, and run this again."
    )
