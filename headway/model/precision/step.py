"""How long a step takes with operators in mixed precisions, on ranks that wait for each other.

Base times of each operator come from runs in which all operators had one
precision. The remedy hands every output on as float32, so changing one
operator changes its own cost, its casts included, and no other's.

Over ranks the step is replayed by `headway.sim.ddp`: each rank's forward, its backward
operator by operator, each bucket of gradients all-reduced as soon as every
rank has it, the update.

Source: *QSync* (IPDPS 2024), section 5 (cost mapper, cross-rank replay).

>>> operator_seconds([OperatorTimes("fc", (0.1, 0.2, 0.4), (0.2, 0.4, 0.8))], [1])
([0.2], [0.4])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, seconds_to_ns
from headway.model.remedies import PRECISIONS
from headway.sim.ddp.ddp_link import CollectiveLink, DdpStep, compiled, makespan_ns
from headway.sim.ddp.ddp_thread import CALL, WAIT, WORK, Thread


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """An adjustable operator on one rank."""

    name: str
    """Its module."""

    forward_s: tuple[float, ...]
    """[precisions] Base time of the forward, casts of a uniform run included; infinite where the device lacks it."""

    backward_s: tuple[float, ...]
    """[precisions] Of the backward."""


def operator_seconds(operators: Sequence[OperatorTimes], choice: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return forward and backward of each operator, `choice` [operators] being columns of `PRECISIONS`.

    Raises `InputError` naming the operator whose device lacks a precision.
    """
    if len(choice) != len(operators):
        raise InputError(f"{len(choice)} precisions for {len(operators)} operators; give each one.")
    chosen = list(zip(operators, choice, strict=True))
    for operator, column in chosen:
        if not math.isfinite(operator.forward_s[column] + operator.backward_s[column]):
            precision = PRECISIONS[column]
            raise InputError(f"the device has no {precision} for {operator.name}. Leave {precision} out there.")
    forward = [max(0.0, operator.forward_s[column]) for operator, column in chosen]
    return forward, [max(0.0, operator.backward_s[column]) for operator, column in chosen]


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
