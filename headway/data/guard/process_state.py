"""What all code goes by besides its own data: modes of torch, environment, current folder, context variables.

A worker process has them as they were when it was forked, a thread that was
started has some of its own. Two pictures show whether something was set in
between.

>>> before = circumstances()
>>> with torch.no_grad():
...     circumstances() == before
False
>>> circumstances() == before
True
"""

from __future__ import annotations

import csv
import decimal
import locale
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cache
from time import perf_counter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._device import DeviceContext

from headway.runtime.script.object_graph import LEAVES

_DEVICES = ("cpu", "cuda")

OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"}
"""Variables of the environment that torch sets for itself when it first compiles or profiles."""


def modes() -> tuple[object, ...]:
    """Return the settings of torch that each thread has for itself; 3 us."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return *grads, torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), *autocast


LISTENS = "the script listens to each operation or call of the thread that reads, or interrupts it by a timer"
"""Why batches are read by the loop itself."""


SOON_S = 5.0
"""A timer that runs for longer is no limit on a batch, but on a run or an epoch."""


def listens() -> bool:
    """Tell whether something of the script's is told of what this thread runs, and so of its readings.

    That is a mode of torch that sees operators or functions, such as one that counts them, or a function that Python
    calls for each line or call (a debugger, a profiler). A default device is such a mode too: it tells nobody.
    """
    if torch._C._len_torch_dispatch_stack() or sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    if 0 < signal.getitimer(signal.ITIMER_REAL)[0] < SOON_S and callable(signal.getsignal(signal.SIGALRM)):
        return True  # it takes the time of this batch
    functions = torch._C._len_torch_function_stack()
    if any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(functions)):
        return True
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))


@cache
def modes_of_threads() -> tuple[object, ...]:
    """Return the modes that a thread begins with."""
    found: list[tuple[object, ...]] = []
    thread = threading.Thread(target=lambda: found.append(modes()), name="headway-modes")
    thread.start()
    thread.join()
    return found[0]


def circumstances() -> tuple[object, ...]:
    """Return a picture of modes, defaults of torch, environment, folder and context; 0.1 ms."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = ""
    settings = settings_in_c()  # first: asked for its context, `decimal` makes one, which is a variable of this context
    # Headway's own say under which seed an example is made: that changes from one to the next.
    variables = [pair for pair in copy_context().items() if not pair[0].name.startswith("headway")]
    context = [(id(variable), id(value)) for variable, value in variables]
    defaults = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    # Asked one by one, `os.environ` decodes each variable: ten times as long, and another thread may change it.
    environment = dict(getattr(os.environ, "_data", os.environ))
    for name in OF_TORCH:
        environment.pop(os.fsencode(name), None)
    return modes(), defaults, folder, environment, context, settings


_DENORMAL = torch.tensor(1e-310, dtype=torch.float64)


def settings_in_c() -> tuple[object, ...]:
    """Return the settings of libraries that no variable of Python's holds; 20 us."""
    decimals = decimal.getcontext()  # but for its flags, which any calculation may set
    numbers = decimals.prec, decimals.rounding, decimals.Emin, decimals.Emax, decimals.clamp, *decimals.traps.values()
    floats = tuple(np.geterr().values()), bool(_DENORMAL * 1 == 0), torch.get_float32_matmul_precision()
    texts = csv.field_size_limit(), csv.list_dialects(), locale.setlocale(locale.LC_ALL)
    filters = [tuple(map(id, one)) for one in warnings.filters]
    return numbers, floats, texts, filters, sys.getrecursionlimit()


# How often that is looked at: before each batch at first, later within a share of the time.
#
#     first pass, and 64 batches at the least     later passes
#     each batch                                  where an attribute was set, while all looks together take less than
#                                                 SHARE of the time since, and at the end of the pass
#
# A look takes 0.5 to 2 ms: before each of many short steps that is more than many a remedy wins. Whether an attribute
# was set takes 2 to 30 us: that is asked before the first batch of a pass and, within NEAR_SHARE, before the others.

FULL = 64
"""Batches of a loader before each of which is looked, at the least."""

SHARE, NEAR_SHARE = 0.003, 0.003
"""Shares of the time that looks take later, and looks at attributes alone: within a hundredth in all."""

MOST_NEAR, FEW = 128, 16
"""Values of attributes that are looked at more often; values of a list, tuple or dictionary among them."""

OPAQUE = (type, ModuleType, FunctionType, torch.Tensor, np.ndarray)
"""What is only looked at for which one it is."""

LATE = "{}; a look {} batches before had not shown it yet: from there on, batches may not have been the script's own"
"""What is said of a change that was seen late, after the reason."""


class Looks:
    """When it is time to look whether what the batches of a loader go by has changed; one per loader and remedy.

    >>> looks, dataset = Looks(), type("Dataset", (), {"epoch": 2})
    >>> [looks.are_alike([dataset], lambda: dataset.epoch == epoch) for epoch in (2, 2, 3)]
    [True, True, False]
    """

    def __init__(self, passes: int = 0, *, each_batch: bool = False) -> None:
        """Begin, with so many passes behind; `each_batch`: look before all, however long that takes."""
        self.each_batch, self._passes, self._num_batches = each_batch, passes, 0
        self._skipped = self._skipped_near = self._late = 0
        self._since_s = self._spent_s = self._last_s = self._near_spent_s = self._near_last_s = 0.0
        self._next_s = 0.0  # before then nothing is due: a batch that is not looked at costs one comparison
        self._is_first = True
        self._near: Attributes | None = None

    @property
    def is_behind(self) -> bool:
        """Whether batches were not looked at since the last look."""
        return self._skipped > 0

    def begin(self) -> None:
        """Begin a pass, another one over the same data or the first."""
        self._passes, self._is_first, self._next_s = self._passes + 1, True, 0.0

    def are_alike(self, read: Sequence[object], look: Callable[[], bool]) -> bool:
        """Return what `look` says, True where none is due; `read` is whose attributes are looked at more often."""
        begin_s = perf_counter()
        if begin_s < self._next_s and not self.each_batch:
            self._skipped += 1
            self._skipped_near += 1
            return True
        if self.each_batch or self._passes < 2 or self._num_batches < FULL:
            self._num_batches += 1
            self._since_s, self._spent_s, self._near_spent_s, self._near = begin_s, 0.0, 0.0, None
            self._late = 0
            return self._looked(look)
        alike = True
        if self._is_due(read, begin_s):
            alike = self._looked(look)
        else:
            self._skipped += 1
        near_s, look_s = self._near_spent_s + self._near_last_s, self._spent_s + self._last_s
        self._next_s = self._since_s + min(near_s / NEAR_SHARE, look_s / SHARE)
        return alike

    def are_alike_now(self, read: Sequence[object], look: Callable[[], bool]) -> bool:
        """Return what `look` says, at the end of a pass or between two; True where the last batch was looked at."""
        if not self.is_behind:
            return True
        is_near = self._near is not None and not self._near.are_those_of(read)
        self._late = self._skipped_near if is_near else self._skipped
        return self._looked(look)

    def _looked(self, look: Callable[[], bool]) -> bool:
        begin_s = perf_counter()
        alike = look()
        self._last_s = perf_counter() - begin_s
        self._spent_s += self._last_s
        if alike:
            self._skipped = 0
        return alike

    def _is_due(self, read: Sequence[object], now_s: float) -> bool:
        """Say whether to look: an attribute was set, or it is time."""
        passed_s, self._late = now_s - self._since_s, self._skipped
        if self._is_first or self._near_spent_s + self._near_last_s <= NEAR_SHARE * passed_s:
            alike = self._near is not None and self._near.are_those_of(read)
            self._near = self._near if alike else Attributes(read)
            self._near_last_s = perf_counter() - now_s
            self._near_spent_s += self._near_last_s
            if not alike:
                self._late, self._skipped_near = self._skipped_near, 0
                return True
            self._skipped_near = 0
        else:
            self._skipped_near += 1
        self._is_first = False
        return self._spent_s + self._last_s <= SHARE * passed_s

    def reason(self, changed: str) -> str:
        """Return why a remedy is taken away, of which a look has said no: `changed`, and since when that may be so."""
        return type(changed)(LATE.format(changed, self._late + 1)) if self._late else changed


Values = Any
"""A list, a tuple, or a dictionary; or what leads to a value in one: an index or a key."""


class Attributes:
    """What the attributes of objects are, and of those in them: which values, `MOST_NEAR` at most.

    It keeps no object but numbers and texts, and looks at as many dictionaries and lists as it met: 2 to 20 us.

    >>> dataset = type("Dataset", (), {})()
    >>> dataset.steps = [dataset_step := type("Step", (), {})()]
    >>> attributes = Attributes([dataset])
    >>> dataset_step.probability = 0.5
    >>> attributes.are_those_of([dataset])
    False
    """

    def __init__(self, read: Sequence[object]) -> None:
        """Walk them, those of the classes of `read` first."""
        self._ways: list[tuple[int, Values]] = []
        """How each container is reached: by which key of which one before; of -1: an object of `read` by its index."""
        self._values: list[tuple[int, ...]] = []
        self._leaves: list[object] = []  # or another value may come to lie where one lay
        containers: list[Values] = []
        todo = [(-1, index, value) for index, value in enumerate(read)]
        while todo and sum(map(len, self._values)) < MOST_NEAR:
            parent, key, value = todo.pop(0)
            if (container := _container(value)) is None:
                continue
            self._ways.append((parent, key))
            self._values.append(_identities(container))
            containers.append(container)
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for inner, one in items if len(container) <= FEW or container is not value else ():
                if type(one) in LEAVES:
                    self._leaves.append(one)
                elif not isinstance(one, OPAQUE):
                    todo.append((len(containers) - 1, inner, one))
        self._classes = [_identities(vars(type(owner))) for owner in read]

    def are_those_of(self, read: Sequence[object]) -> bool:
        """Say whether nothing was set since."""
        if [_identities(vars(type(owner))) for owner in read] != self._classes:
            return False
        containers: list[Values] = []
        try:
            for (parent, key), values in zip(self._ways, self._values, strict=True):
                container = _container(read[key] if parent < 0 else containers[parent][key])
                if container is None or _identities(container) != values:
                    return False
                containers.append(container)
        except (KeyError, IndexError):
            return False
        return True


def _container(value: object) -> Values:
    """Return a list, tuple or dictionary itself, the attributes of another object, None where it has none."""
    if isinstance(value, (list, tuple, dict)):
        return value
    try:  # not `vars`: a class of the script's may answer for its attributes itself
        return object.__getattribute__(value.__self__ if isinstance(value, MethodType) else value, "__dict__")
    except (AttributeError, TypeError):
        return None


def _identities(container: Values) -> tuple[int, ...]:
    """Return which values it has; of a long one how many, for an object's attributes are seldom many."""
    if len(container) > MOST_NEAR:
        return (len(container),)
    return tuple(map(id, container if isinstance(container, (list, tuple)) else container.values()))
