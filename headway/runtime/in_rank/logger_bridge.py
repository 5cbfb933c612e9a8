"""Hands step time, goodput and losses of this rank to an experiment logger, off the step path.

`headway.log_to(target)` makes one. What it costs the training thread is one
entry into a bounded queue now and then; a thread of its own reads the rank's
ring, as an outsider would, and calls the logger. A logger that blocks makes
reports drop, one that raises is warned about once: training never notices.
Seconds and fractions, as the names say.

>>> seen = []
>>> class Run:
...     def log(self, values, step): seen.append((values, step))
>>> writer_of(Run())({"headway/goodput": 0.5}, 7); seen
[({'headway/goodput': 0.5}, 7)]
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import HeadwayError, InputError
from headway.core.machine.worker import BackgroundWorker
from headway.core.units import NS_PER_S
from headway.runtime.recorder.probes import now
from headway.trace.rings.ring import warn

if TYPE_CHECKING:
    from headway.ledger.live_ledger import LiveFigures, LiveLedger
    from headway.ledger.live_mfu import LiveMfu
    from headway.runtime.in_rank.bootstrap import Session

Write = Callable[[Mapping[str, float], int], object]

QUEUE = 4
"""Reports that wait at most; one more is dropped and counted."""

LAST_S = 2.0
"""Seconds that the last reports may take when the recording ends."""

MOST_STEPS = 1 << 20
"""Most steps until the next look at the clock."""


def writer_of(target: Any) -> Write:
    """Return what hands (values, step) to `target`, by the methods it has.

    An MLflow module or client-like object: `log_metrics(values, step=)`; a TensorBoard writer: `add_scalar(name, value,
    step)`; a W&B run: `log(values, step=)`. Raises `InputError` for an object without any of them.
    """
    if callable(getattr(target, "log_metrics", None)):
        return lambda values, step: target.log_metrics(dict(values), step=step)
    if callable(getattr(target, "add_scalar", None)):
        return lambda values, step: [target.add_scalar(name, value, step) for name, value in values.items()]
    if callable(getattr(target, "log", None)):
        return lambda values, step: target.log(dict(values), step=step)
    raise InputError(
        f"{type(target).__name__} has neither log, log_metrics nor add_scalar. "
        "Pass a W&B run, the mlflow module or a TensorBoard SummaryWriter."
    )


class LoggerBridge:
    """One logger that is told of this rank's time; made by `headway.log_to`."""

    def __init__(
        self, session: Session | None, target: Any, *, every_s: float = 10.0, every_steps: int | None = None
    ) -> None:
        """Begin to report every `every_steps` steps, or every `every_s` seconds when that is None.

        Raises `InputError` for an interval that cannot be, and for a target that takes no values.
        """
        if not every_s > 0 or (every_steps is not None and every_steps < 1):
            raise InputError(
                f"every_s is {every_s} and every_steps is {every_steps}; an interval must be positive. "
                "Pass every_s=10, or every_steps=100."
            )
        self.failures = 0
        """Calls of the logger that raised."""
        self._write, self._name = writer_of(target), type(target).__name__
        self._every_ns, self._every_steps = round(every_s * NS_PER_S), every_steps
        self._session = session
        self._worker: BackgroundWorker[int] | None = None
        self._reports: AccountChanges | None = None
        self._due_ns = self._looked_ns = now()
        self._looked_at = 0
        self._warned = False
        self._pid = os.getpid()
        if session is None:
            # A launched rank begins to record when its script imports torch.
            early = "HEADWAY_RUN" in os.environ and "torch" not in sys.modules
            remedy = (
                "Call it after `import torch`"
                if early
                else "Use `headway run`, or call it inside `with headway.run():`"
            )
            warn(f"log_to reports nothing: nothing is recorded here{' yet' if early else ''}. {remedy}")
            return
        self._worker = BackgroundWorker(self._report, capacity=QUEUE, when_full="drop", name="headway-log-to")
        session.probes.listeners.append(self._after_step)
        session.probes.due[0] = session.probes.steps[0] + 1
        session.undos.append(self.close)
        atexit.register(self.close)

    @property
    def recording(self) -> bool:
        """Whether there is anything to report, now or later."""
        return self._worker is not None

    @property
    def dropped(self) -> int:
        """Reports that the logger was too slow for."""
        return self._worker.dropped if self._worker is not None else 0

    def ask(self) -> None:
        """Queue a report now, beside those that are due; nothing happens where reports already wait."""
        worker, session = self._worker, self._session
        if worker is not None and session is not None and self._pid == os.getpid():
            worker.put(session.probes.steps[0])

    def close(self) -> None:
        """Report once more and stop; waits for the logger at most `LAST_S`. Calling it again does nothing."""
        worker, self._worker = self._worker, None
        if worker is None or self._session is None or self._pid != os.getpid():
            return
        probes = self._session.probes
        if self._after_step in probes.listeners:
            probes.listeners.remove(self._after_step)
        try:
            worker.put(probes.steps[0])
            worker.close(LAST_S)
        except HeadwayError as reason:  # still blocked, or a fork's copy: the job's end does not wait for it
            self._warn(f"{self._name} did not take its last reports: {reason}")
        atexit.unregister(self.close)

    def _after_step(self, optimizer: int) -> int:
        """Queue a report when one is due; returns the number of optimizer steps until the next look."""
        worker, session = self._worker, self._session
        if worker is None or session is None or self._pid != os.getpid():
            return MOST_STEPS  # a forked child trains for itself
        steps, moment = session.probes.steps[0], now()
        due = steps % self._every_steps == 0 if self._every_steps else moment >= self._due_ns
        if due:
            self._due_ns = moment + self._every_ns
            if not worker.put(steps):
                self._warn(f"{self._name} is too slow: reports are dropped, and training goes on")
        wait = self._steps_until_due(steps, moment)
        self._looked_ns, self._looked_at = moment, steps
        return wait

    def _steps_until_due(self, steps: int, moment: int) -> int:
        if self._every_steps:
            return self._every_steps - steps % self._every_steps
        passed = max(steps - self._looked_at, 1)
        step_ns = max((moment - self._looked_ns) // passed, 1)
        return int(max(1, min((self._due_ns - moment) // step_ns, 2 * passed, MOST_STEPS)))

    def _report(self, _: int) -> None:
        """Read the ring and call the logger, on the worker's thread; what it raises is told once."""
        if self._session is None:
            return
        try:
            if self._reports is None:
                self._reports = AccountChanges(self._session)
            report = self._reports.next()
            if report is not None:
                self._write(*report)
        except Exception as cause:  # the logger's affair: the next report is tried again
            self.failures += 1
            self._warn(f"{self._name} failed, and training goes on: {type(cause).__name__}: {cause}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"log_to: {text}")


class AccountChanges:
    """What changed in this rank's account since the last report."""

    def __init__(self, session: Session) -> None:
        """Read the ring of `session` from its beginning."""
        # Here and not above: numpy and the ledger are not for the start of every rank.
        from headway.trace.rings.follow import RunFollower

        recorder = session.probes.recorder
        self._follower = RunFollower(Path(recorder.folder), rank=recorder.rank)
        self._ledger: LiveLedger | None = None
        self._attempt = recorder.attempt
        self._before: LiveFigures | None = None
        self._run = Path(session.probes.run)
        self._mfu: LiveMfu | None = None

    def next(self) -> tuple[dict[str, float], int] | None:
        """Return values by name, and the number of complete steps; None when no step was completed since."""
        from headway.ledger.live_ledger import LiveLedger

        for header, records in self._follower.poll():
            if header.attempt == self._attempt:
                self._ledger = self._ledger or LiveLedger(start_ns=header.clock_ns, world_size=1)
                self._ledger.add(header, records)
        if self._ledger is None:
            return None
        figures, before = self._ledger.figures(now()), self._before
        if not figures.total_steps or (before is not None and before.total_steps == figures.total_steps):
            return None
        self._before = figures
        steps = figures.total_steps - (before.total_steps if before else 0)
        step_s = (figures.step_sum_s - (before.step_sum_s if before else 0.0)) / steps
        values = {
            "headway/step_s": step_s,
            "headway/steps_per_s": figures.steps_per_s,
        }
        if figures.tells_goodput:
            values["headway/goodput"] = figures.goodput
        if self._mfu is None and (self._run / "flops").exists():  # else there is none, and nothing to load for it
            from headway.ledger.live_mfu import LiveMfu

            self._mfu = LiveMfu(self._run)
        used = self._mfu.of(figures) if self._mfu is not None else None
        if used is not None:
            values["headway/mfu"] = used
        amounts = figures.bucket_ns
        earlier = before.bucket_ns if before else dict.fromkeys(amounts, 0)
        spent = {name: max(amount - earlier[name], 0) for name, amount in amounts.items()}
        total = max(sum(spent.values()), 1)
        # Every bucket that ever took time is there from then on: a chart without gaps.
        values |= {f"headway/lost/{name}": spent[name] / total for name in spent if name != "useful" and amounts[name]}
        return values, figures.ranks[0].steps
