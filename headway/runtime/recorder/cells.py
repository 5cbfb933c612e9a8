"""Pauses of a recording that spans cells of a notebook: from the end of one cell to the beginning of the next.

IPython tells when a cell begins and ends. Anywhere else nothing is followed, and nothing is recorded here.

    cell 1: run.start() ... train() |          | cell 2: train() ... run.stop()
                                    [  pause   )

A cell may run others inside (`get_ipython().run_cell`): a pause begins with the end of the outermost. What the
kernel runs between cells, such as a widget's callback, records itself; that is cut out of the pause when the run is
finalised.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import SPANS

PAUSE = SPANS["pause"].code


@dataclass(slots=True)
class Cells:
    """The cells of a notebook while a recording goes on; made in one of them."""

    probes: Probes
    """Where pauses are recorded."""

    _events: Any = None
    _depth: int = 1
    _ended_ns: int = field(default=0)
    """When the last cell ended; 0 while one runs."""
    _was_open: bool = False
    """Whether the gap after an update was open then."""

    def follow(self) -> None:
        """Ask IPython to tell of cells; outside of it nothing happens."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            return
        self._events = shell.events
        self._events.register("pre_run_cell", self._begins)
        self._events.register("post_run_cell", self._ends)

    def leave(self) -> None:
        """Be told no more; a pause that goes on ends here."""
        self._record()
        events, self._events = self._events, None
        if events is not None:
            events.unregister("pre_run_cell", self._begins)
            events.unregister("post_run_cell", self._ends)

    def _begins(self, *_: object) -> None:
        self._record()
        self._depth += 1

    def _ends(self, *_: object) -> None:
        # An empty cell ends without having begun: the pause goes on.
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and not self._ended_ns:
            self._ended_ns = now()
            # No line of the script is to be found on the stack until the next cell.
            self._was_open, self.probes.gap.open[0] = self.probes.gap.open[0], False

    def _record(self) -> None:
        """Record the pause that ends now, if there is one."""
        started_ns, self._ended_ns = self._ended_ns, 0
        if started_ns:
            self.probes.emit(PAUSE, started_ns, now() - started_ns)
            self.probes.gap.open[0] = self._was_open or self.probes.gap.open[0]
