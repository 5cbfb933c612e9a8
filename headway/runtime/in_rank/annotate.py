"""Names and marks that a script adds to its recording: timers, evaluation, epochs, steps.

They work under `headway run` and inside `with headway.run()` (`in_process.py`),
and do nothing anywhere else, so that they may stay in the script.

    for index in range(epochs):
        headway.epoch(index)
        for batch in headway.steps(loader):
            with headway.timer("augment"):
                ...
        with headway.evaluation():
            validate(model)

>>> with timer("anything"), evaluation():
...     total = sum(steps([1, 2, 3]))
>>> total
6
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from headway.core.errors import InputError
from headway.runtime.recorder.probes import now
from headway.trace.events.vocabulary import SPANS

if TYPE_CHECKING:
    from headway.runtime.in_rank.logger_bridge import LoggerBridge

T = TypeVar("T")

REGION = SPANS["region"].code
NEXT = SPANS["input.next"].code
EVALUATION = SPANS["eval.mark"].code
EPOCH = SPANS["epoch"].code


class Timer:
    """Records how long stretches take under a name of the script's own: `with`, or `begin()` and `end()`.

    Timers nest; each one times one stretch at a time. Once the rank computes on a device its events time the
    stretch, without synchronising; else the host's clock does. Without a recording nothing is recorded.
    """

    def __init__(self, name: str, session: Any) -> None:
        self.name = name
        self._probes = session.probes if session is not None else None
        self._begun: tuple[int, Any, int] | None = None

    def begin(self) -> None:
        """Begin a stretch. Raises `InputError` when one is going on."""
        if self._begun is not None:
            raise InputError(
                f"timer {self.name!r} was begun in step {self._begun[2]} and is begun again in {self._where()} without "
                "an end in between. End it first, or make a second timer for what lies inside."
            )
        probes = self._probes
        self._begun = (now(), self._event(), probes.steps[0] if probes is not None else -1)
        if probes is not None:
            probes.open_timers[id(self)] = (self.name, self._begun[2])

    def end(self) -> None:
        """End the stretch and record it. Raises `InputError` when none was begun."""
        if self._begun is None:
            raise InputError(
                f"timer {self.name!r} is ended in {self._where()} but was not begun. "
                f"Call begin() before it, or write: with headway.timer({self.name!r}): ..."
            )
        (start, begun, _), self._begun = self._begun, None
        probes = self._probes
        if probes is None:
            return
        probes.open_timers.pop(id(self), None)
        code = self._code(probes)
        ended = self._event() if begun is not None else None
        if ended is not None:
            on_device, end = ended
            on_device.add(REGION, code, begun[1], end, start)
        else:
            probes.emit(REGION, start, now() - start, code)

    def __enter__(self) -> Timer:
        """Begin."""
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()

    def _event(self) -> Any:
        """Return a device's timers and an event recorded on it, None where the host's clock has to do."""
        probes = self._probes
        return probes.device_timers.event() if probes is not None and probes.device_timers else None

    def _code(self, probes: Any) -> int:
        """Return the number of the name, which the tables keep."""
        names: list[str] = probes.tables.setdefault("regions", [])
        if self.name not in names:
            names.append(self.name)
            probes.write_tables()
        return names.index(self.name)

    def _where(self) -> str:
        return f"step {self._probes.steps[0]}" if self._probes is not None else "a run that is not recorded"


def timer(name: str) -> Timer:
    """Return a timer for a stretch of the script: `with headway.timer("augment"): ...`.

    Records under `headway run` and inside `with headway.run()`; anywhere else it does nothing.
    """
    from headway.runtime.in_rank import bootstrap

    return Timer(name, bootstrap.active())


class Evaluation:
    """Marks stretches of the script as evaluation: `with`, or `begin()` and `end()`, as callbacks need it.

    A second `begin()` inside a stretch, and an `end()` outside one, change nothing: a framework may report the
    beginning of one evaluation by several of its hooks. Without a recording nothing is recorded.
    """

    def __init__(self, session: Any) -> None:
        self._probes = session.probes if session is not None else None
        self._begun_ns = 0
        self._number = 0

    @property
    def open(self) -> bool:
        """Whether a stretch has begun and not ended."""
        return self._begun_ns != 0

    def begin(self) -> None:
        """Begin a stretch."""
        if not self._begun_ns:
            self._begun_ns = now()

    def end(self) -> None:
        """End the stretch and record it."""
        started_ns, self._begun_ns = self._begun_ns, 0
        if started_ns and self._probes is not None:
            self._probes.emit(EVALUATION, started_ns, now() - started_ns, self._number)
            self._number += 1

    def __enter__(self) -> Evaluation:
        """Begin."""
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()


def evaluation() -> Evaluation:
    """Return a mark for evaluation: `with headway.evaluation(): validate(model)`.

    The ledger books what happens inside as evaluation, whatever the model's mode says. Records under `headway run` and
    inside `with headway.run()`; anywhere else it does nothing.
    """
    from headway.runtime.in_rank import bootstrap

    return Evaluation(bootstrap.active())


def mark_epoch(session: Any, index: int) -> None:
    """Record in `session` that epoch `index` begins; None records nothing."""
    if session is not None:
        session.probes.emit(EPOCH, now(), 0, index)


def epoch(index: int) -> None:
    """Mark the beginning of epoch `index` (from 0). Does nothing where nothing is recorded."""
    from headway.runtime.in_rank import bootstrap

    mark_epoch(bootstrap.active(), index)


def log_to(target: Any, *, every_s: float = 10.0, every_steps: int | None = None) -> LoggerBridge:
    """Hand this rank's step time, goodput and losses to an experiment logger, off the step path.

    `target` is a W&B run (`log`), the mlflow module (`log_metrics`), a TensorBoard SummaryWriter (`add_scalar`), or
    any object with such a method; none of them is imported here. A report comes every `every_steps` steps, or every
    `every_s` seconds. Names are `headway/step_s`, `headway/steps_per_s`, `headway/goodput` (of the run so far) and
    `headway/lost/<bucket>` (share of the time since the report before). A logger that is slow or fails costs reports,
    one warning and no training step. Where nothing is recorded it says so and does nothing.
    Raises `InputError` for a target without such a method.
    """
    from headway.runtime.in_rank import bootstrap
    from headway.runtime.in_rank.logger_bridge import LoggerBridge

    return LoggerBridge(bootstrap.active(), target, every_s=every_s, every_steps=every_steps)


def steps(loader: Iterable[T]) -> Iterator[T]:
    """Iterate over `loader`; the wait for each batch is recorded even when it is no torch DataLoader.

    A torch `DataLoader` is passed through: its own waits are recorded already.
    """
    from headway.runtime.in_rank import bootstrap

    session = bootstrap.active()
    torch_data = sys.modules.get("torch.utils.data")
    if session is None or (torch_data is not None and isinstance(loader, torch_data.DataLoader)):
        yield from loader
        return
    emit = session.probes.emit
    iterator = iter(loader)
    seq = 0
    while True:
        start = now()
        try:
            batch = next(iterator)
        except StopIteration:
            emit(NEXT, start, now() - start, -1, -1, -1, -1)
            return
        emit(NEXT, start, now() - start, -1, seq, -1, -1)
        seq += 1
        yield batch
