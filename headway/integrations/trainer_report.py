"""What every trainer's callback shares: marks of evaluation and epochs, and the ledger's newest figures.

`headway.log_to`'s reader thread makes the figures, off the step path; a
callback takes the newest ones at the moments when its trainer logs. Where
nothing is recorded everything here does nothing, so that a callback may stay
in the script.

>>> report = TrainerReport()
>>> report.begin(); report.take(), report.end()
({}, {})
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.runtime.in_rank import bootstrap
from headway.runtime.in_rank.annotate import Evaluation, mark_epoch
from headway.runtime.in_rank.logger_bridge import LoggerBridge


class TrainerReport:
    """The marks and figures of one training; a callback holds one and calls it from its hooks."""

    def __init__(self, *, every_s: float = 10.0) -> None:
        """Take figures every `every_s` seconds."""
        self._every_s = every_s
        self._bridge: LoggerBridge | None = None
        self._evaluation = Evaluation(None)
        self._newest: Mapping[str, float] = {}

    def begin(self) -> None:
        """Begin to take figures of this process's recording: training is about to start."""
        session = bootstrap.active()
        if session is not None and self._bridge is None:
            self._bridge = LoggerBridge(session, self, every_s=self._every_s)

    def begin_evaluation(self) -> None:
        """Begin a mark; inside one nothing changes."""
        if not self._evaluation.open:
            self._evaluation = Evaluation(bootstrap.active())
            self._evaluation.begin()

    def end_evaluation(self) -> None:
        """End the mark, if there is one."""
        self._evaluation.end()

    def epoch(self, index: int) -> None:
        """Mark the beginning of epoch `index`."""
        mark_epoch(bootstrap.active(), index)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the newest figures: called by the bridge, on its own thread."""
        self._newest = values

    def ask(self) -> None:
        """Ask for figures now, to be taken later: for a trainer whose updates are not those of a torch optimizer."""
        if self._bridge is not None:
            self._bridge.ask()

    def take(self) -> dict[str, float]:
        """Return the figures that came since the last call; empty without any."""
        newest, self._newest = self._newest, {}
        return dict(newest)

    def end(self) -> dict[str, float]:
        """Return the last figures: training has ended."""
        bridge, self._bridge = self._bridge, None
        self.end_evaluation()
        if bridge is not None:
            bridge.close()
        return self.take()
