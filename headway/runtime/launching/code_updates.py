"""New code for a running job: later attempts run a copy of the script that was taken when the attempt before ended.

`headway run --update-from DIR`: a user changes the code in DIR while the job trains, and the next restart, whatever
its reason, runs it from RUN/code/<n>. A copy, so that what an attempt runs does not change under it, and can be gone
back from: an update that fails in the same words twice is undone, and not taken again until DIR changes.

>>> code = CodeUpdates(None, Path("run"), ["train.py", "--lr", "1"], say=print)
>>> code.take(), code.script, code.updated
(None, ['train.py', '--lr', '1'], False)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.core.errors import InputError

FOLDER = "code"
"""Of a run folder: the copies."""

IGNORED = ("__pycache__", ".git", "headway-runs")
"""Folders that hold no code."""


class CodeUpdates:
    """Which script the next attempt runs."""

    def __init__(self, source: Path | None, run: Path, script: Sequence[str], *, say: Callable[[str], None]) -> None:
        """`source` is the folder with newer code, None = there is none; `say` prints one line."""
        self._source, self._folder, self._say = source, run / FOLDER, say
        self._versions = [list(script)]
        self._stamp: object = None

    @property
    def script(self) -> list[str]:
        """The script and its arguments."""
        return self._versions[-1]

    @property
    def updated(self) -> bool:
        """Whether it is newer than the one that the job began with."""
        return len(self._versions) > 1

    def take(self) -> None:
        """Copy the code, if it has changed; what cannot be copied leaves the job with what it has."""
        if self._source is None:
            return
        first = self._versions[0]
        try:
            stamp = _stamp(self._source)
            if stamp == self._stamp:
                return
            target = self._folder / str(sum(1 for _ in self._folder.glob("*")) + 1)
            shutil.copytree(self._source, target, ignore=shutil.ignore_patterns(*IGNORED))
        except (OSError, shutil.Error) as cause:
            self._say(f"the code in {self._source} could not be taken, the job goes on with what it has: {cause}")
            return
        self._stamp = stamp
        script = target / Path(first[0]).name
        if script.is_file():
            self._versions.append([str(script), *first[1:]])
            self._say(f"the next attempt runs {script}, a copy of {self._source}")
        else:
            self._say(f"{self._source} holds no {script.name}; the job goes on with the code that it has")

    def undo(self) -> None:
        """Go back to the code before the last update."""
        if self.updated:
            self._versions.pop()
            self._say(f"the last update of the code is undone; the next attempt runs {self.script[0]}")


def check_source(source: Path, script: str) -> None:
    """Raise `InputError` unless newer versions of `script` can come from the folder `source`."""
    if not source.is_dir():
        raise InputError(f"--update-from {source} is not a folder. Name the one with the newer code.")
    if source.resolve() == Path(script).resolve().parent:
        raise InputError(
            f"--update-from {source} is the folder that the job runs from. Copy the code elsewhere and change it there."
        )


def _stamp(source: Path) -> list[tuple[str, int, int]]:
    """Return what changes when a file of the folder does."""
    found = []
    for path in sorted(source.rglob("*")):
        if path.is_file() and not {*path.relative_to(source).parts} & {*IGNORED}:
            facts = path.stat()
            found.append((str(path), facts.st_mtime_ns, facts.st_size))
    return found
