"""`headway.run`: a recording that answers for itself: its ledger, causes and report, also as the value of a cell.

>>> run(enabled=False)
<headway.run: nothing is recorded>
"""

from __future__ import annotations

import abc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import InputError
from headway.runtime.in_rank import in_process
from headway.runtime.in_rank.in_process import Shown

if TYPE_CHECKING:
    from headway.ledger.answers.ledger import Ledger
    from headway.why.explanation import Explanation


class Answers:
    """What can be asked of a run folder from Python."""

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """The run folder; '' where nothing is recorded."""

    @property
    def ledger(self) -> Ledger:
        """Where the device time went; raises `InputError` where nothing is recorded."""
        return self._explained().ledger

    def why(self) -> dict[str, Any]:
        """Return the `headway.why/2` object: ledger, ranked causes, verdict; as `headway why --json` prints it."""
        from headway.verbs.runs.why import why_object

        return why_object(self._explained())

    def report(self, out: str | os.PathLike[str] = "report.html") -> Path:
        """Write the report, one self-contained HTML page, to `out`; returns where it is."""
        from headway.report.page.html import write_report
        from headway.verbs.runs.report import report_data

        write_report(report_data(self._explained()), Path(out))
        return Path(out)

    def _explained(self) -> Explanation:
        # Here and not above: the ledger and its reports (numpy, pyarrow, rich) are not for the start of every rank.
        from headway.trace.recording.runs import is_run
        from headway.why.explanation import explain

        if not self.path or not is_run(Path(self.path)):
            raise InputError(f"{self!r} has no run folder to read. Record first, or name a run folder.")
        return explain([Path(os.path.relpath(self.path))])


class NotebookRun(in_process.InProcessRun, Answers):
    """A recording of this process; made by `headway.run`."""


class RecordedRun(Answers):
    """A run folder that was recorded before; made by `headway.open_run`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the run folder at `path`; raises `InputError` where there is none."""
        self._path = os.fspath(path)
        self._explained()

    @property
    def path(self) -> str:
        """The run folder, as it was named."""
        return self._path

    def __repr__(self) -> str:
        """Return the call that opens it."""
        return f"headway.open_run({self.path!r})"

    def _repr_html_(self) -> str:
        """Return the ledger for a notebook."""
        return draw(Path(self.path)).html


def run(path: str | os.PathLike[str] | None = None, *, enabled: bool = True) -> NotebookRun:
    """Return a recording of this process: a `with` block, or `start()` and `stop()` where it spans a notebook's cells.

    Without a launcher it records into `path`, by default a new folder under ./headway-runs, and afterwards shows its
    ledger in Jupyter and IPython; `ledger`, `why()` and `report()` answer in Python. Under `headway run` the recording
    is the launcher's, and `path` is ignored. With `enabled=False`, or HEADWAY=off in the environment, nothing is
    recorded and everything else works.
    """
    return NotebookRun(path, enabled=enabled, draw=draw)


def open_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Return the run folder at `path`, with `ledger`, `why()` and `report()`; raises `InputError` where none is."""
    return RecordedRun(path)


def draw(path: Path) -> Shown:
    """Return the ledger of a run folder as text and as a fragment of a page."""
    from headway.report.page.html import fragment
    from headway.report.paper import screen_of
    from headway.report.terminal import render_why

    found = RecordedRun(os.path.relpath(path))
    why = found.why()
    return Shown(render_why(why, source=found.path, **screen_of(sys.stdout)), fragment(why))
