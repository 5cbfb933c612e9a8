"""How long a step takes with operators in mixed precisions, on ranks that wait for each other.

Base times of each operator come from runs in which all operators had one
precision. In a mixture an operator costs its base time, and casts where what
it takes comes in another precision than in that run: `casts` says what
casting n numbers takes, a n + b. So changing one operator changes its own
cost and that of the operators that take its output, and nothing else; with
all operators in one precision no cast is left, and the base times remain:

    forward(o)  = base_p(o) + sum over sources s of o: cast(out(p_s) -> p_o) - cast(out(p_o) -> p_o)
    backward(o) = the same with the gradient's cast, p_o -> out(p_s)

out(p) is the precision in which an operator's output leaves it. Over ranks
the step is replayed by `headway.sim.ddp`: each rank's forward, its backward
operator by operator, each bucket of gradients all-reduced as soon as every
rank has it, the update.

Source: *QSync* (IPDPS 2024), section 5 (cost mapper, cross-rank replay).

>>> CastLine(2.88e-11, 1.0e-6).seconds(1_000_000) == 2.88e-5 + 1.0e-6, CastLine(1e-12, -1.0).seconds(5)
(True, 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, seconds_to_ns
from headway.model.remedies import PRECISIONS
from headway.sim.ddp.ddp_link import CollectiveLink
from headway.sim.ddp.ddp_step import DdpStep, compiled, makespan_ns
from headway.sim.ddp.ddp_thread import CALL, WAIT, WORK, Thread

KEPT_OUTPUT = {"int8": "float32", "bf16": "float32", "float32": "float32"}
"""Precision -> that of an operator's output where the remedy applies it: what follows sees no difference."""

LOW_OUTPUT = {"int8": "float32", "bf16": "bf16", "float32": "float32"}
"""The same where an operator hands on what it computed in: int8 products are scaled to float32."""


@dataclass(frozen=True, slots=True)
class CastLine:
    """Seconds of a cast: a n + b for n numbers."""

    per_number_s: float
    """a."""

    fixed_s: float
    """b."""

    def seconds(self, numel: int) -> float:
        """Return the seconds, never below 0: a fitted b may be negative."""
        return max(0.0, self.per_number_s * numel + self.fixed_s)


Casts = Mapping[tuple[str, str], CastLine]
"""(from, to) -> its line."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """An adjustable operator on one rank."""

    name: str
    """Its module."""

    forward_s: tuple[float, ...]
    """[precisions] Base time of the forward, casts of a uniform run included; infinite where the device lacks it."""

    backward_s: tuple[float, ...]
    """[precisions] Of the backward."""

    input_numel: int = 0
    """Numbers that it takes from each source."""

    sources: tuple[int, ...] = ()
    """Adjustable operators whose output it takes, nothing in between."""


def operator_seconds(
    operators: Sequence[OperatorTimes],
    choice: Sequence[int],
    casts: Casts,
    *,
    precisions: Sequence[str] = PRECISIONS,
    outputs: Mapping[str, str] = LOW_OUTPUT,
) -> tuple[list[float], list[float]]:
    """Return forward and backward of each operator, `choice` [operators] being columns of `precisions`.

    Raises `InputError` naming the operator whose device lacks a precision, or the cast that was not measured.
    """
    if len(choice) != len(operators):
        raise InputError(f"{len(choice)} precisions for {len(operators)} operators; give each one.")
    forward, backward = [], []
    for operator, column in zip(operators, choice, strict=True):
        own_forward, own_backward = operator.forward_s[column], operator.backward_s[column]
        precision = precisions[column]
        if not math.isfinite(own_forward + own_backward):
            raise InputError(f"the device has no {precision} for {operator.name}. Leave {precision} out there.")
        for source in operator.sources:
            came, usual = outputs[precisions[choice[source]]], outputs[precision]
            if came != usual:
                numel = operator.input_numel
                own_forward += _cast(casts, came, precision, numel) - _cast(casts, usual, precision, numel)
                own_backward += _cast(casts, precision, came, numel) - _cast(casts, precision, usual, numel)
        forward.append(max(0.0, own_forward))
        backward.append(max(0.0, own_backward))
    return forward, backward


def _cast(casts: Casts, source: str, target: str, numel: int) -> float:
    """Return the seconds of one cast; none within a precision."""
    if source == target:
        return 0.0
    if (source, target) not in casts:
        raise InputError(f"what casting {source} to {target} takes was not measured. Measure it for two sizes.")
    return casts[source, target].seconds(numel)


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step but for its adjustable operators."""

    before_s: float
    """Forward, and what else comes before the first gradient: all but adjustable operators."""

    between_s: float
    """Backward of all but adjustable operators; spread evenly over it."""

    after_s: float
    """From the last bucket to the end of the step: the update."""


def replayed_step_s(
    ranks: Sequence[RankStep],
    seconds: Sequence[tuple[Sequence[float], Sequence[float]]],
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    link: CollectiveLink,
) -> float:
    """Return the seconds of a data-parallel step.

    `seconds` is forward and backward of each rank's operators, `buckets` the operators whose gradients share one, in
    the order in which buckets are full, `sizes` their bytes. Operators run backward in reverse. A bucket begins when
    every rank has it and the one before it has begun; without buckets, or alone, ranks do not meet.
    """
    threads = []
    for rank, (step, (forward, backward)) in enumerate(zip(ranks, seconds, strict=True)):
        items = [(WORK, seconds_to_ns(step.before_s + sum(forward)), -1)]
        share_s, done = step.between_s / max(1, len(backward)), set[int]()
        for operator in reversed(range(len(backward))):
            items.append((WORK, seconds_to_ns(backward[operator] + share_s), -1))
            done.add(operator)
            items += [(CALL, 0, k) for k, bucket in enumerate(buckets) if operator in bucket and done >= set(bucket)]
        items += [(WAIT, 0, k) for k in range(len(buckets))]
        items.append((WORK, seconds_to_ns(step.after_s), -1))
        what, own_ns, ref = (np.array(column, np.int64) for column in zip(*items, strict=True))
        unknown, none = np.zeros(what.size, np.int64), np.zeros(len(buckets), np.int64)
        threads.append(Thread(rank, what, unknown, own_ns, ref, unknown, none, none))
    count = len(buckets)
    if not count:
        return max(int(thread.own_ns.sum()) for thread in threads) / NS_PER_S
    nothing = np.zeros(count, np.int64)
    step_of_all = DdpStep(
        tuple(threads), np.array(sizes, np.int64), nothing, np.zeros((count, len(threads)), np.bool_), 1,
        np.zeros(len(threads), np.int64), 0,
    )  # fmt: skip
    return makespan_ns(compiled(step_of_all, link)) / NS_PER_S
