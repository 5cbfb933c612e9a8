"""One example through the operators of a pipeline, in whatever process or thread: read, apply, cache, drop.

Every random operator draws from a generator of its own, keyed by the
example's seed and the operator's place in the pipeline as written. So its
draws depend on no other operator, thread or order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.data.bytes.scrutiny import CHANGED, DREW, Scrutiny
from headway.data.bytes.source import Source
from headway.data.bytes.torch_examples import equal
from headway.data.cached.tiered import TieredCache
from headway.data.guard.outcome import speak
from headway.data.guard.watch import GeneratorWatch
from headway.data.pipeline import torch_ops as ops
from headway.data.pipeline.operators import Stage

Array = np.ndarray[Any, np.dtype[Any]]


class Dropped:
    """What a filter leaves of an example."""


DROPPED = Dropped()


class ResultCache:
    """Results in memory, by example: arrays and bytes, whole or not at all. Safe for threads.

    What may be kept, and what is made anew and compared although it is here, `scrutiny` says.

    Worker processes that fork from this one start with a copy, and fill it on their own.
    """

    def __init__(self, num_bytes: int, num_examples: int) -> None:
        self.scrutiny = Scrutiny(num_examples)
        self.cache = TieredCache(num_bytes, split=(0.0, 1.0, 0.0), policies="static")
        self._forms: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._lock = threading.Lock()

    def get(self, index: int) -> Any:
        """Return the result for example `index` (arrays are read-only), None when it is not here."""
        with self._lock:
            found = self.cache.get(index)
            if found is None:
                return None
            form = self._forms[index]
        view = found[1]
        return bytes(view) if form[0] == "bytes" else np.frombuffer(view, np.dtype(form[0])).reshape(form[1])

    def put(self, index: int, value: Any) -> None:
        """Keep the result while there is room; what is neither bytes nor an array is not kept."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            form, payload = (value.dtype.str, value.shape), value.tobytes()
        elif isinstance(value, bytes):
            form, payload = ("bytes", ()), value
        else:
            return
        with self._lock:
            if self.cache.put(index, "decoded", payload):
                self._forms[index] = form

    def __getstate__(self) -> dict[str, Any]:
        """Leave the results behind: a copy for another process would cost more than it saves."""
        return {"num_bytes": self.cache.capacity_bytes["decoded"], "num_examples": self.scrutiny.num_examples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start empty."""
        self.__init__(**state)  # type: ignore[misc]  # the constructor is all there is to restore


class Chain:
    """A source and the stages behind it, in the order in which they run."""

    def __init__(self, source: Source, stages: Sequence[Stage]) -> None:
        self.source, self.stages = source, tuple(stages)
        places = [k for k, stage in enumerate(self.stages) if stage.kind == "cache"]
        self._cached = places[-1] if places else -1
        """Place of the last cache; an earlier one would never be asked."""
        self.kept = ResultCache(self.stages[self._cached].cache_bytes, len(source)) if places else None
        self._watch = GeneratorWatch([stage.function for stage in self.stages]) if places else None
        self._own = [getattr(_function(stage), "__module__", "") == ops.__name__ for stage in self.stages]
        self._writer = self._last_writer()
        """Place of the operator that may write its result into memory of the caller's; -1 when none may."""

    def run(self, index: int, seed: int, out: Array | None = None) -> Any:
        """Return the result for example `index`, `DROPPED` when a filter says so; a failure names the operator.

        `out`, memory of the result's shape and type, may be used on the way; the result is there only if it is `out`.
        """
        value, first = self._begin(index, seed, out)
        return value if value is DROPPED else self.through(value, index, seed, first, len(self.stages), out)

    def through(self, value: Any, index: int, seed: int, first: int, last: int, out: Array | None = None) -> Any:
        """Return what the stages from place `first` up to `last` make of the value before them; `out` as in `run`."""
        for place in range(first, last):
            value = self._apply(place, value, index, seed, out if place == self._writer else None)
            if value is DROPPED:
                break
        return value

    def timed(self, index: int, seed: int = 0) -> dict[int, tuple[float, float, float]]:
        """Return operator -> (seconds, bytes in, bytes out): wall time of the source, CPU time of the others."""
        start = time.perf_counter()
        value = self.source.read(index)
        found = {0: (time.perf_counter() - start, 0.0, size_of(value))}
        for place, stage in enumerate(self.stages):
            before, start = size_of(value), time.thread_time()
            value = self._apply(place, value, index, seed)
            spent = time.thread_time() - start
            if value is DROPPED:
                found[stage.id] = (spent, before, 0.0)
                break
            found[stage.id] = (spent, before, size_of(value))
        return found

    def _begin(self, index: int, seed: int, out: Array | None) -> tuple[Any, int]:
        """Return what to start from, and the first stage that is left to run."""
        kept, watch = self.kept, self._watch
        if kept is None or watch is None or kept.scrutiny.over:
            return self.source.read(index), 0
        found = kept.get(index)
        if found is not None and not kept.scrutiny.is_due(int(size_of(found)), first=False):
            return found, self._cached + 1
        made = watch.around(lambda: self.through(self.source.read(index), index, seed, 0, self._cached, out))
        if found is not None and made.drew:
            kept.scrutiny.end(DREW, index)
        elif found is not None and not equal(_in_row_order(found), _in_row_order(made.value)):
            kept.scrutiny.end(CHANGED, index)
        elif made.value is not DROPPED and kept.scrutiny.may_keep(index, drew=made.drew):
            kept.put(index, made.value)
        speak(self.source, kept.scrutiny)
        return made.value, self._cached + 1

    def _last_writer(self) -> int:
        """Return the last operator that can write where it is told, if all behind it are our own: they keep nothing."""
        places = [k for k, stage in enumerate(self.stages) if _function(stage) in ops.WRITERS]
        return places[-1] if places and all(self._own[places[-1] :]) else -1

    def _apply(self, place: int, value: Any, index: int, seed: int, out: Array | None = None) -> Any:
        stage = self.stages[place]
        if stage.kind == "cache":
            return value  # `run` keeps it
        assert stage.function is not None
        try:
            told = {} if out is None else {"out": out}
            if not stage.random:
                value_or_keep = stage.function(value, **told)
            elif self._own[place]:
                value_or_keep = stage.function(value, _GENERATORS.keyed(seed, stage.id), **told)
            else:  # a user's function may keep its generator
                value_or_keep = stage.function(value, generator(seed, stage.id))
        except Exception as error:
            error.add_note(f"in operator {stage.name!r}, example {index}")
            raise
        if stage.kind == "filter":
            return value if value_or_keep else DROPPED
        return value_or_keep


def _in_row_order(value: Any) -> Any:
    """Return an array in row order, as it is kept; anything else as it is."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) and value.ndim else value


def generator(seed: int, stage: int) -> np.random.Generator:
    """Return a new generator of one example and stage; 7 us (half of what the key as an array would take)."""
    return np.random.Generator(np.random.Philox(key=int(seed) | int(stage) << 64))


class _Generators(threading.local):
    """A generator per thread, put back to the beginning of one stream or another: 1.5 us, where a new one takes 13."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._key = self._state["state"]["key"]

    def keyed(self, seed: int, stage: int) -> np.random.Generator:
        """Return the generator of one example and stage, equal to `generator`'s, until the next call."""
        self._key[0], self._key[1] = seed, stage
        self._bits.state = self._state
        return self._generator


_GENERATORS = _Generators()


def _function(stage: Stage) -> Any:
    """Return the function that a stage calls, without the arguments that are bound to it."""
    return getattr(stage.function, "func", stage.function)


def size_of(value: Any) -> float:
    """Return the bytes that an example takes, 1 at least: what a transfer of it would move."""
    if hasattr(value, "nbytes"):
        return float(max(value.nbytes, 1))
    if isinstance(value, (bytes, bytearray, str)):
        return float(max(len(value), 1))
    if isinstance(value, (list, tuple)):
        return float(max(sum(size_of(part) if hasattr(part, "__len__") else 8.0 for part in value), 1.0))
    if isinstance(value, dict):
        return float(max(sum(size_of(part) for part in value.values()), 1.0))
    return float(sys.getsizeof(value))
