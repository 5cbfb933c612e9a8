"""LLM-PQ's heuristic, for what the integer program takes too long: most precise bits that fit, then transfers.

Source: *LLM-PQ* (arXiv 2403.01136), section 4.3: "adabits" looks at memory
alone; then layers and bits are moved between the slowest stage and the
others, as long as that makes the objective smaller and memory holds.

    slowest stage   16 16 16 16      a layer moves:    16 16 16        | 16 8 8 8
    another one     8 8 8            or is converted:  16 16 16 8      | 8 8 8
                                     or both
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from headway.core.errors import InputError
from headway.model.serving.plan import ServeChoice, ServingGoal
from headway.model.serving.program import LayerRuns, ServingProgram
from headway.model.serving.times import PipelineCosts

TRIED_ORDERS = 3
"""Orders with micro-batch sizes that are improved: those that begin best."""

MOST_TRANSFERS = 200
"""Transfers in an order."""


def transferred(every: Sequence[PipelineCosts], goal: ServingGoal) -> ServeChoice:
    """Return the best choice that the heuristic makes; raises `InputError` where nothing fits."""
    runs = LayerRuns.of(goal.table)
    starts = []
    for costs in every:
        solved = ServingProgram(costs, runs).solved(timed=False, gap=0.01)
        if solved is not None and np.isfinite(solved[1].value):
            starts.append(ServeChoice.of(costs, solved[0], goal.table))
    starts = list(filter(goal.allows, starts))
    if not starts:
        raise InputError("nothing fits the devices and the bound. Add a device, or offer fewer bits.")
    starts.sort(key=goal.value)
    return min((_improved(start, goal) for start in starts[:TRIED_ORDERS]), key=goal.value)


def _improved(choice: ServeChoice, goal: ServingGoal) -> ServeChoice:
    """Take the best transfer until none makes the objective smaller."""
    for _ in range(MOST_TRANSFERS):
        better = min(filter(goal.allows, _transfers(choice, goal)), key=goal.value, default=choice)
        if goal.value(better) >= goal.value(choice):
            break
        choice = better
    return choice


def _transfers(choice: ServeChoice, goal: ServingGoal) -> Iterator[ServeChoice]:
    """Yield what moving a layer from the slowest stage, converting one layer of a stage, and both would make of it."""
    table = choice.costs.decode_ns * choice.costs.num_microbatches[1] * max(choice.costs.rounds, 1)
    table = table + choice.costs.prefill_ns * choice.costs.num_microbatches[0]
    slowest = int((choice.counts * table).sum(1).argmax())
    moved = [choice]
    for target in range(len(choice.per_stage)):
        sizes = list(choice.per_stage)
        if target != slowest and (sizes[slowest] > 1 or choice.costs.optional[slowest]):
            sizes[slowest] -= 1
            sizes[target] += 1
            moved.append(replace(choice, per_stage=tuple(sizes)))
    for variant in moved:
        if variant is not choice:
            yield variant
        bounds = np.cumsum([0, *variant.per_stage])
        for first, last in itertools.pairwise(bounds.tolist()):
            for column in range(goal.table.shape[1]):
                yield from _converted(variant, first, last, column, goal)


def _converted(choice: ServeChoice, first: int, last: int, column: int, goal: ServingGoal) -> Iterator[ServeChoice]:
    """Yield the choice with one layer of first..last - 1 in other bits: the one that loses least by it, or wins most.

    One for each precision that some of them has.
    """
    now = np.array(choice.columns[first:last])
    lost = goal.table[first:last, column] - goal.table[np.arange(first, last), now]
    for source in sorted(set(now.tolist()) - {column}):
        layer = first + int(np.where(now == source, lost, np.inf).argmin())
        yield replace(choice, columns=(*choice.columns[:layer], column, *choice.columns[layer + 1 :]))
