"""What became of a remedy, loader by loader: known only when each loader is first read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import Subset

from headway.core.remedies import Parameters
from headway.data.bytes.scrutiny import Scrutiny
from headway.data.guard.watch import unheard
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.script.object_graph import is_installed
from headway.trace.events.active_settings import DATASET, READING


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

    def withdrawn(self, dataset: str, reason: str) -> None:
        """Note that the remedy was taken away from a loader that had it."""
        self._withdrawn.append({"dataset": dataset, "reason": reason, **about(reason)})
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
