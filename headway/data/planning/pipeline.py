"""Measure and plan an input pipeline: the functions, for any object that knows how to run its examples.

`headway.data.Pipeline` is that object; what needs torch is in `runtime/`.

>>> from headway.data.planning.optimize import Op
>>> class Two:
...     def ops(self): return (Op(0, "read", source=True), Op(1, "crop"))
...     def timed(self, index): return {0: (0.001, 0, 100), 1: (0.003, 100, 10)}
...     def __len__(self): return 4
>>> measured = profile(Two(), n=8)
>>> measured.examples_per_s, measured.out_bytes[1], plan(Two(), measured).order
(250.0, 10.0, (0, 1))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from headway.core.errors import InputError
from headway.core.machine.host import host_cores
from headway.data.orders.order import permute
from headway.data.planning import optimize
from headway.data.planning.optimize import Op, PipelinePlan, PipelineProfile, Resources

MEMORY_S_PER_BYTE = 1e-10
"""Of a cache in memory: one copy at 10 GB/s, which any host of today reaches on one core."""


class Timed(Protocol):
    """What can be profiled."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def ops(self) -> tuple[Op, ...]:
        """Return the operators, the source first."""
        ...

    def timed(self, index: int) -> Mapping[int, tuple[float, float, float]]:
        """Run example `index`; return operator -> (seconds, bytes in, bytes out), without those that did not run."""
        ...


def profile(pipeline: Timed, n: int = 256) -> PipelineProfile:
    """Run `n` examples in this thread and return what each operator cost. Raises `InputError` when none comes through.

    Operators count their CPU time, the source its wall time: so other load
    on the host does not move the figures, and slow storage does.
    """
    if n < 1 or not len(pipeline):
        raise InputError(f"{n} examples of {len(pipeline)} are to be profiled; both must be 1 or more.")
    order = permute(len(pipeline), seed=0, epoch=0)
    pipeline.timed(order(0))  # what is loaded on first use is no cost of an example
    ids = [op.id for op in pipeline.ops()]
    sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {op: np.zeros(3) for op in ids}
    counts = dict.fromkeys(ids, 0)
    for k in range(n):
        for op, figures in pipeline.timed(order(k % len(pipeline))).items():
            sums[op] += figures
            counts[op] += 1
    idle = [op.name for op in pipeline.ops() if not counts[op.id]]
    if idle:
        raise InputError(f"none of {n} examples reached {idle[0]}. Profile more, or drop the filter before it.")
    seconds = {op: float(sums[op][0]) / n for op in ids}
    total = sum(seconds.values())
    if total <= 0:
        raise InputError(f"{n} examples took no measurable time. Profile more examples.")
    sizes = {op: sums[op] / counts[op] for op in ids}
    return PipelineProfile(
        in_bytes={op: float(size[1]) for op, size in sizes.items()},
        out_bytes={op: float(size[2]) for op, size in sizes.items()},
        seconds=seconds,
        examples_per_s=1 / total,
        read_s_per_byte=MEMORY_S_PER_BYTE,
    )


def plan(pipeline: Timed, profile: PipelineProfile, resources: Resources | None = None) -> PipelinePlan:
    """Return the best plan of a profiled pipeline; a cache must hold the whole dataset. Raises `InputError`."""
    resources = resources or Resources(cores=host_cores())
    if resources.cache_bytes and not resources.num_examples:
        resources = dataclasses.replace(resources, num_examples=len(pipeline))
    return optimize.plan(pipeline.ops(), profile, resources)


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether two orders of a pipeline gave the same examples."""

    examples: int
    equal: bool
    """Bit by bit, with types and shapes."""
    largest_difference: float
    """Of any value; infinity where shapes, types or the set of examples differ."""

    def to_json(self) -> dict[str, Any]:
        """Return what `plan --check --json` prints."""
        return asdict(self)


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two results: 0 when equal bit by bit, infinity when they cannot be compared."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.tobytes() == other.tobytes() or not one.size:
            return 0.0
        gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
        return float("inf") if np.isnan(gap).any() else max(float(gap.max()), float(np.finfo(np.float64).tiny))
    return 0.0 if type(one) is type(other) and one == other else float("inf")
