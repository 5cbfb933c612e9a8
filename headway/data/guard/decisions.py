"""Whether a remedy suits a loader is tried once for all loaders with the same facts, within a budget of time.

A script may make a loader anew for every epoch or update. What guards results and costs nothing is asked of every
loader (whose sampler, which dataset class); what has to be tried in a forked child is tried once per facts: the
classes of the dataset and of all that it holds, their settings, the collate function, the loader's own settings.
Contents are no facts: a replay buffer grows. Trials may take `TRIAL_S`, and then 1 % of the time since the first; a
loader of which one question was tried is asked the others too, once: half an answer has cost time and is of no use.

The job waits for the children of a trial. A dataset that hangs in a forked process, because it asks a thread or an
event loop of the training process, costs the job one child's time (`Budget.child_s`), once for all remedies:

    trial of a remedy   child answers      in 0.1 s
                        child hangs        ended after 3 to 5 s; no remedy tries loaders with these facts again
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from time import perf_counter, thread_time
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader

from headway.data.guard.files_read import FileStat
from headway.data.guard.picture import outside, size_of
from headway.data.guard.trial import Limit, limited
from headway.runtime.in_rank.remedy import Context
from headway.runtime.script.object_graph import attributes, closure_of
from headway.trace.events.loader_facts import LOOK_S, TRIAL_SHARE, may_try, too_dear

LONGEST_S = 5.0
"""The most time that a child of a trial has; also where no step was recorded."""

LEAST_S = 3.0
"""The least: a child on a busy host measures for 2.4 s how long threads wait for the interpreter's lock."""

READINGS = 10
"""A child reads a few examples so often, at most; that takes less than to read whole batches so often."""

NOT_TRIED = f"not tried: trying costs more than {TRIAL_SHARE:.0%} of the time trained"
"""Why a loader is left alone for this pass; a later one may try."""

DEPTH = 12
"""Objects and containers inside each other that facts follow."""

FEW = 8
"""A longer container holds data: it counts by its type and by what its first entry is like."""

MOST_LETTERS = 64
"""A longer text holds data."""

T = TypeVar("T")
"""What is told beside a reason."""

MOST_VALUES = 1024
"""Values that facts look into; of what lies beyond only the type counts."""


LOOKS = 3
"""Looks that are timed at most."""


@dataclass(slots=True)
class Budget:
    """The time that the trials of a rank may take."""

    clock: Callable[[], float] = perf_counter
    step_s: float | None = None
    """Seconds of a step in the run that the plan was made from; None where that is not known."""
    longest_s: float = LONGEST_S
    """The most time that a child has."""
    began: float | None = None
    """When the first trial began."""
    spent_s: float = 0.0
    tried: ref[Any] | None = None
    """The loader of the last trial."""
    asked: set[Hashable] = field(default_factory=set)
    """The questions that were tried of it."""
    hung: dict[Hashable, str] = field(default_factory=dict)
    """Facts of loaders of which a child hung -> what the remedy said of that. No other remedy tries them."""

    def allows(self, loader: Any, question: Hashable) -> bool:
        """Whether a question may be tried of a loader now; notes that it is."""
        is_same = self.tried is not None and self.tried() is loader
        is_rest = is_same and question not in self.asked
        if not (self.began is None or is_rest or may_try(self.spent_s, self.clock() - self.began)):
            return False
        self.tried, self.asked = ref(loader), {*(self.asked if is_same else ()), question}
        return True

    def child_s(self, num_workers: int) -> float:
        """Return the time that a child has to read examples of a loader, in proportion to what batches took before.

        With w workers a batch took w steps at most: else training would have waited longer, and the steps with it.

        >>> Budget(step_s=0.01).child_s(0), Budget(step_s=0.01).child_s(4), Budget().child_s(0)
        (3.1, 3.4, 5.0)
        """
        if self.step_s is None:
            return self.longest_s
        return min(LEAST_S + READINGS * max(1, num_workers) * self.step_s, self.longest_s)

    @contextmanager
    def trial(self, num_workers: int) -> Iterator[Limit]:
        """Count the time of the block, and limit the time of the children that it forks."""
        start = self.clock()
        self.began = start if self.began is None else self.began
        try:
            with limited(self.child_s(num_workers)) as limit:
                yield limit
        finally:
            self.spent_s += self.clock() - start


def look_s(read: tuple[object, ...]) -> float:
    """Return the CPU seconds of a look at what `read` goes by: the first meets cold memory, and is not counted.

    The lowest of three where one takes long: a collection of garbage may fall into any of them.
    """
    outside(read)
    took_s: list[float] = []
    while len(took_s) < LOOKS and min(took_s, default=math.inf) > LOOK_S:
        began = thread_time()
        outside(read)
        took_s.append(thread_time() - began)
    return min(took_s)


def too_dear_to_look_at(read: tuple[object, ...], decisions: Decisions) -> str | None:
    """Say why `read` may not be looked at before each batch, or None."""
    return too_dear(look_s(read), decisions.budget.step_s or 0.0) or None


def budget_of(context: Context) -> Budget:
    """Return the budget of this rank, one for all remedies."""
    found = context.shared.setdefault("data.trials", Budget(step_s=context.step_s))
    assert isinstance(found, Budget)
    return found


@dataclass(slots=True)
class Decisions:
    """Why loaders are left alone, by their facts. One per remedy and rank."""

    budget: Budget = field(default_factory=Budget)
    """Shared by the remedies of a rank."""
    _known: dict[Hashable, tuple[str | None, object]] = field(default_factory=dict)

    def result(self, loader: DataLoader[Any], tried: Callable[[], str | None]) -> str | None:
        """Return why a loader would get other batches, None when it would not: `tried` where that is not known."""
        return self._of("result", loader, lambda: (tried(), 0), 0)[0]

    def keeping(
        self, loader: DataLoader[Any], tried: Callable[[], tuple[str | None, Mapping[str, FileStat]]]
    ) -> tuple[str | None, Mapping[str, FileStat]]:
        """Return why workers may not be kept for another pass, None when they may; and what a first reading goes by."""
        return self._of("keeping", loader, tried, {}, whole_texts=True)

    def caching(self, loader: DataLoader[Any], tried: Callable[[], tuple[str | None, int]]) -> tuple[str | None, int]:
        """Return why examples may not be kept, None when they may; and the bytes of one."""
        return self._of("caching", loader, tried, 0)

    def speed(self, loader: DataLoader[Any], tried: Callable[[], str | None]) -> str | None:
        """Return why the remedy would not pay; settings of the dataset, such as a probability, do not count."""
        return self._of("speed", loader, lambda: (tried(), 0), 0, settings=False)[0]

    def _of(
        self, question: str, loader: DataLoader[Any], tried: Callable[[], tuple[str | None, T]], nothing: T, *,
        settings: bool = True, whole_texts: bool = False,
    ) -> tuple[str | None, T]:  # fmt: skip
        # By its hash: classes of the script that lived on would keep its files from being flushed at exit.
        facts, budget = hash(facts_of(loader, settings=settings, whole_texts=whole_texts)), self.budget
        if (question, facts) not in self._known:
            if facts in budget.hung:
                return budget.hung[facts], nothing
            if not budget.allows(loader, (id(self), question)):
                return NOT_TRIED, nothing
            with budget.trial(loader.num_workers) as limit:
                answer = self._known[question, facts] = tried()
            if limit.reached and answer[0] is not None:
                budget.hung[facts] = answer[0]
        return cast("tuple[str | None, T]", self._known[question, facts])


def facts_of(loader: DataLoader[Any], *, settings: bool = True, whole_texts: bool = False) -> Hashable:
    """Return what decides whether a remedy suits a loader; `settings`: with the values that its dataset is set to.

    A text of more than 64 letters counts by its length, with `whole_texts` by all its letters.

    >>> from torch.utils.data import TensorDataset
    >>> small, large = (DataLoader(TensorDataset(torch.zeros(size))) for size in (8, 80))
    >>> facts_of(small) == facts_of(large), facts_of(small) == facts_of(DataLoader(small.dataset, 2))
    (True, False)
    """
    shape = _Shape(settings=settings, size=size_of(loader.dataset), longest=None if whole_texts else MOST_LETTERS)
    own = (loader.batch_size, loader.num_workers, loader.drop_last, loader.pin_memory, loader.persistent_workers)
    samplers = type(loader.sampler), type(loader.batch_sampler)
    parts = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
    return own, samplers, *(shape.of(part, DEPTH) for part in parts)


class _Shape:
    """What values are like: types, code and settings, not contents."""

    def __init__(self, *, settings: bool, size: int, longest: int | None = MOST_LETTERS) -> None:
        self._settings, self._size, self._left, self._longest = settings, size, MOST_VALUES, longest

    def of(self, value: Any, depth: int, *, settings: bool = True) -> Hashable:
        """Return something hashable that is equal for values alike."""
        self._left -= 1
        kind: object = type(value)
        if isinstance(value, PurePath):
            value = str(value)
        if isinstance(value, (bool, int, float, str, bytes, type(None))):
            if not (settings and self._settings) or (type(value) is int and value == self._size):
                return kind  # how much data there is, is no setting
            is_long = self._longest is not None and len(str(value)) > self._longest
            return kind, len(value) if is_long else value  # type: ignore[arg-type]  # a long text
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return kind, str(value.dtype), value.ndim
        if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            code: object = value
            return code
        if depth == 0 or self._left < 0:
            return kind
        return kind, *self._inside(value, depth - 1, settings)

    def _inside(self, value: Any, depth: int, settings: bool) -> list[Hashable]:
        """Return what the parts of a function, a container or an object are like."""
        if isinstance(value, MethodType):
            return [value.__func__, self.of(value.__self__, depth, settings=settings)]
        if isinstance(value, FunctionType):
            cells = closure_of(value)
            bound = [*cells, value.__defaults__, value.__kwdefaults__]
            return [value.__code__, *(self.of(part, depth, settings=settings) for part in bound)]
        if isinstance(value, partial):
            return [self.of(part, depth, settings=settings) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, Mapping):
            parts = list(value.items()) if len(value) <= FEW else []
        elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "popleft"):
            long = len(value) > FEW
            first = [self.of(next(iter(value)), depth, settings=False)] if long else []
            return first or [self.of(part, depth, settings=settings) for part in value]
        else:
            parts = list(attributes(value).items())
        return [entry for key, part in parts for entry in (str(key), self.of(part, depth, settings=settings))]
