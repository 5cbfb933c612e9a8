"""What became of a remedy, loader by loader: known only when each loader is first read.

A remedy that makes steps slower than they were recorded is withdrawn while the job runs.

The plan says how long a step took. Over `STEPS` steps under the remedy the median step, plus the remedy's one-time
costs (trials, iterators) spread over those steps, is held against it:

    steps  ──10──┬──10──┬──10──┬──10──┬──10──   median of five means, without the time in iter(loader)
    iter(loader)   all of it / 50               added

Steps that look too slow are watched for as many again. If other processes take cores meanwhile, the host is slower
than it was, and nothing is decided, a few times over. Then the next steps run without the remedy, and if those take as
long, it comes back for good. Workers are left in the middle of a pass; other remedies end, and all come back, at the
next iterator: in a job of one pass none comes back.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch.utils.data import Subset

from headway.core.machine.host_load import LoadSampler
from headway.core.remedies import Parameters
from headway.data.bytes.scrutiny import Scrutiny
from headway.data.guard.watch import unheard
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.script.object_graph import is_installed
from headway.trace.events.loader_facts import DATASET, READING
from headway.trace.rings.ring import warn


class OfReading(str):
    """A reason that lies with a dataset or its loader: nobody may read its batches ahead of training."""

    __slots__ = ()


class OfDataset(OfReading):
    """A reason that lies with a dataset: its examples may neither be read ahead, nor kept, nor shared."""

    __slots__ = ()


def impure(finding: str, dataset: Any) -> OfReading:
    """Return the reason that `finding` is, found where a batch was made as another process would make it.

    >>> impure("reading it twice gives two results", range(3)), type(impure(OfDataset("it draws"), [])).__name__
    ('range: reading it twice gives two results', 'OfDataset')
    """
    kind = type(finding) if isinstance(finding, OfReading) else OfReading
    return kind(f"{read_by(dataset)}: {finding}")


def read_by(dataset: Any) -> str:
    """Name what reads an example, with its line where that is the user's: `Toy.__getitem__ (train.py:31)`.

    Subsets are looked through. A class of an installed package is named alone.
    """
    for _ in range(MOST_SUBSETS):
        if type(dataset) is not Subset:
            break
        dataset = dataset.dataset
    kind = type(dataset)
    for name in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None and not is_installed(kind.__module__):
            return f"{kind.__name__}.{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return kind.__name__


MOST_SUBSETS = 8
"""Subsets of subsets that are looked through for the dataset's name."""


def about(reason: str) -> dict[str, str]:
    """Return what is to be noted beside a reason: what it is about, where other remedies have to know.

    >>> about(OfDataset("it draws")), about("there is no memory")
    ({'about': 'dataset'}, {})
    """
    if isinstance(reason, OfDataset):
        return {"about": DATASET}
    return {"about": READING} if isinstance(reason, OfReading) else {}


MOST_DECISIONS = 100
"""Decisions of one kind that are kept: of a script that makes loaders of other sizes all the time, the newest."""


class OutcomeWriter:
    """Keeps the outcome of a remedy up to date in RUN/applied.

    The remedy counts as applied as soon as one loader takes it; it is refused while all have been left alone.
    """

    def __init__(self, name: str, parameters: Parameters, context: Context) -> None:
        """Report on remedy `name`, as the plan gives it `parameters`."""
        self.name, self._parameters, self._context = name, parameters, context
        self._decisions: list[dict[str, Any]] = []
        self._withdrawn: list[dict[str, str]] = []
        self._compared = {"batches": 0, "compared": 0, "equal": 0, "unequal": 0}
        self._not_compared: dict[str, int] = {}

    def __call__(self, facts: Mapping[str, Any]) -> None:
        """Note the facts of one decision; 'reason_not_applied' among them means that a loader was left alone."""
        decision = {**facts, **about(facts.get("reason_not_applied", ""))}
        if decision in self._decisions:
            return  # a loader made anew for each epoch: nothing new to say, and nothing to keep
        like = [known for known in self._decisions if _kind(known) == _kind(decision)]
        if len(like) >= MOST_DECISIONS:
            self._decisions.remove(like[0])
        self._decisions.append(decision)
        self._write()

    def names(self, loader: Any) -> dict[str, str]:
        """Return what decisions call a loader: the class of its dataset, and the line that made it, where seen."""
        line = self._context.probes.constructed.get(loader, {}).get("constructed")
        return {"dataset": type(loader.dataset).__name__, **({"line": line} if line else {})}

    def withdrawn(self, names: Mapping[str, str], reason: str) -> None:
        """Note that the remedy was taken away from a loader that had it."""
        self._withdrawn.append({**names, "reason": reason, **about(reason)})
        self._write()

    def restored(self) -> None:
        """Note that what was withdrawn is applied again."""
        self._withdrawn.clear()
        self._write()

    def made(self) -> None:
        """Count a batch that the loop got under the remedy, compared or not."""
        self._compared["batches"] += 1

    def compared(self, *, equal: bool) -> None:
        """Count a batch that was compared with the script's own; written with the next decision, or at the end."""
        self._compared["compared"] += 1
        self._compared["equal" if equal else "unequal"] += 1

    def not_compared(self, reason: str) -> None:
        """Count a batch that was to be compared and could not be."""
        self._not_compared[reason] = self._not_compared.get(reason, 0) + 1

    def _write(self) -> None:
        reasons = [fact["reason_not_applied"] for fact in self._decisions if "reason_not_applied" in fact]
        if len(reasons) == len(self._decisions):
            self._context.note(
                RefusedRemedy(self.name, "; ".join(dict.fromkeys(reasons)), {"loaders": self._decisions})
            )
            return
        facts: dict[str, Any] = {**self._parameters.to_json(), "loaders": self._decisions}
        if self._withdrawn:
            facts["withdrawn"] = self._withdrawn
        if self._context.verify:  # the same objects: what is counted later is written later
            facts["verification"] = self._compared
            facts["not_compared"] = self._not_compared
        self._context.note(Applied(self.name, facts))


def _kind(decision: Mapping[str, Any]) -> tuple[object, bool]:
    """Return the dataset's class of a decision, and whether its loader was left alone."""
    return decision.get("dataset"), "reason_not_applied" in decision


def speak(dataset: Any, scrutiny: Scrutiny) -> None:
    """Warn, once for all readers of a dataset, that what was kept of it is not used any more."""
    if scrutiny.is_news():
        text = f"{type(dataset).__name__} is cached no more: {scrutiny.finding}. Its examples are read anew."
        # A script that makes errors of warnings loses no batch by it, nor do the workers that hand over its batches.
        with suppress(RuntimeWarning), unheard():
            warnings.warn(text, RuntimeWarning, stacklevel=3)


CHUNK, CHUNKS = 10, 5
STEPS = CHUNK * CHUNKS

SLOWER = 1.1
"""Times as long as recorded: more is slower."""

BUSY_CORES = 0.3
"""Cores that other processes take on a host that is slower than it was."""

PATIENCE = 4
"""Times that a busy host puts the decision off."""

AS_LONG = 0.98
"""Steps without the remedy that take this share of those with it, or more, are no reason to leave it out."""


class OtherCores:
    """Cores that processes outside of the job of this rank take between two calls."""

    def __init__(self) -> None:
        self._sampler: LoadSampler | None = None

    def __call__(self) -> float | None:
        """Look; None the first time."""
        before, self._sampler = self._sampler, LoadSampler(os.getppid() if os.getppid() > 1 else os.getpid())
        self._sampler.look(at_once=True)
        if before is None:
            return None
        before.look(at_once=True)
        return before.between().other_cores


@dataclass(slots=True)
class Withdrawal:
    """Watches the steps of a rank under one remedy."""

    recorded_s: float | None
    """Time of a step in the run that the plan was made from; None: nothing is withdrawn."""
    report: OutcomeWriter
    """Learns what is withdrawn."""
    clock: Callable[[], float] = perf_counter
    other_cores: Callable[[], float | None] = field(default_factory=lambda: OtherCores())
    """Says how many cores other processes took since the last call; None at the first one."""
    leave: Callable[[], bool] = lambda: False
    """Lets go of the loaders that have the remedy; says whether at once, and not at their next passes."""
    is_off: bool = False
    """Whether loaders are to be left alone at their next iterator."""
    has_remedy: bool = False
    """Whether the iterator that was made last is the remedy's."""
    _in_use: bool = False
    _settled: bool = False
    _put_off: int = 0
    _with_s: float = 0.0
    _mark: float = 0.0
    _making_s: float = 0.0
    _chunks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CHUNKS))
    """(seconds of a step without what making iterators took, seconds of that) of the last chunks."""

    def step(self, _: int) -> int:
        """Be called at an optimizer step; returns the number of steps until the next call."""
        now = self.clock()
        spent_s, making_s = now - self._mark, self._making_s
        counts = self._mark > 0 and self._in_use and (self.has_remedy or self.is_off)
        self._mark, self._making_s = now, 0.0
        if counts and not self._settled:
            self._chunks.append(((spent_s - making_s) / CHUNK, making_s / CHUNK))
            if len(self._chunks) == CHUNKS:
                self._judge()
        return CHUNK

    @contextmanager
    def making(self) -> Iterator[None]:
        """Count the time of the block, in which an iterator is made; one of the remedy's sets `has_remedy`."""
        start, self.has_remedy = self.clock(), False
        try:
            yield
        finally:
            self._making_s += self.clock() - start
            if not self._in_use:
                # After a change, chunks count from the first one on that begins after the first iterator.
                self._in_use, self._mark = True, 0.0
                self._chunks.clear()

    def _judge(self) -> None:
        assert self.recorded_s is not None
        steps, making = zip(*self._chunks, strict=True)
        step_s = statistics.median(steps) + statistics.fmean(making)
        if self.is_off:
            self._settled, took = True, f"{1e3 * step_s:.1f} ms"
            if step_s >= AS_LONG * self._with_s:
                self.is_off = False
                self.report.restored()
                warn(f"{self.report.name} is applied again: without it a step takes {took}")
        elif step_s > SLOWER * self.recorded_s:
            if self._put_off < PATIENCE:
                taken = self.other_cores()
                if taken is None or taken >= BUSY_CORES:
                    self._put_off += taken is not None
                    self._chunks.clear()
                    return
            self._with_s, self.is_off = step_s, True
            reason = (
                f"over {STEPS} steps one took {1e3 * step_s:.1f} ms, and {1e3 * self.recorded_s:.1f} ms when the plan "
                "was made"
            )
            self._in_use, self._mark = self.leave(), 0.0
            self._chunks.clear()
            self.report.withdrawn({"dataset": "all loaders"}, reason)
            warn(f"{self.report.name} is withdrawn: {reason}")


def withdrawal_of(context: Context, report: OutcomeWriter) -> Withdrawal:
    """Return what watches the steps of this rank; with `--verify`, which takes time, nothing is judged."""
    watch = Withdrawal(None if context.verify == "all" else context.step_s, report)
    if watch.recorded_s:
        listener: Any = watch.step
        context.listen(listener)
    return watch
