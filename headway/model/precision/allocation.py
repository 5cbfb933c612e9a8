"""Which operators get more bits again, while the step holds its bound: the allocator.

The indicator falls with precision, the step gets longer. Where there are few
choices, all are gone through by rising indicator: the first that holds is the
optimum. Where times add up operator by operator (seen on drawn choices), the
choice is an integer program, min omega with sum of seconds <= bound. Else
QSync's recovery: from the fastest uniform choice, the operator whose next
precision lowers the indicator most goes up, as long as the replayed step
holds; then exchanges, one operator up for one down, while that lowers the
indicator.

Source: *QSync* (IPDPS 2024), algorithm 1. Its code takes the gain of the
wrong pair of precisions; the drop from the present one to the next is meant.

>>> allocate([[4.0, 1.0, 0.0], [9.0, 3.0, 0.0]], lambda choice: 1.0 + sum(choice), bound_s=3.0)
[0, 2]
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.rng import stream

MOST_ENUMERATED = 8192
"""Choices that are gone through one by one: 8 operators of 3 precisions are 6,561."""

MOST_EXCHANGES = 20_000
"""Steps replayed for exchanges."""

TRIED_SUMS, SAME = 8, 1e-9
"""Drawn choices on which times must add up, to this share of the step."""

StepFn = Callable[[list[int]], float]
FitsFn = Callable[[list[int]], bool]


def allocate(
    omega: Sequence[Sequence[float]], step_s: StepFn, *, bound_s: float, fits: FitsFn | None = None
) -> list[int]:
    """Return [operators] the precision of each with the least sum of `omega` under which the step holds `bound_s`.

    `omega[operator][precision]` must not rise with precision (0 = fewest bits); `step_s(choice)` is the step in
    seconds, `fits(choice)` whether it fits the memory. What is returned was asked for both. Raises `InputError` on an
    indicator that rises, a bound or a step that is no number above 0, and where no choice holds.
    """
    rows = [_row(number, row) for number, row in enumerate(omega)]
    if not (math.isfinite(bound_s) and bound_s > 0):
        raise InputError(f"bound_s is {bound_s}; give seconds, a finite number > 0.")
    search = _Allocation(rows, step_s, bound_s, fits)
    if math.prod(map(len, rows)) <= MOST_ENUMERATED:
        return search.enumerated()
    starts = search.starts()
    ends = [search.recovered(start) for start in starts]
    return search.added_up(starts[0]) or search.exchanged(min(ends, key=search.lost))


def _row(number: int, row: Sequence[float]) -> list[float]:
    """Check the indicator of one operator."""
    values = [float(value) for value in row]
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise InputError(f"omega[{number}] is {values}; give at least one precision, each a finite number >= 0.")
    if any(low < high for low, high in itertools.pairwise(values)):
        raise InputError(
            f"omega[{number}] is {values}; it must not rise with precision. Order it from the fewest bits."
        )
    return values


class _Allocation:
    """One call: the steps replayed so far are not replayed again."""

    def __init__(self, rows: list[list[float]], step_s: StepFn, bound_s: float, fits: FitsFn | None) -> None:
        self.rows, self.bound_s = rows, bound_s
        self._step_s, self._fits = step_s, fits
        self._steps: dict[tuple[int, ...], float] = {}

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the step of a choice."""
        key = tuple(choice)
        if key not in self._steps:
            value = float(self._step_s(list(key)))
            if not value >= 0:
                raise InputError(f"step_s returned {value} for {list(key)}; it must return seconds >= 0.")
            self._steps[key] = value
        return self._steps[key]

    def fits(self, choice: Sequence[int]) -> bool:
        """Say whether a choice fits the memory."""
        return self._fits is None or bool(self._fits(list(choice)))

    def holds(self, choice: Sequence[int]) -> bool:
        """Say whether it fits and holds the bound."""
        return self.fits(choice) and self.seconds(choice) <= self.bound_s

    def lost(self, choice: Sequence[int]) -> float:
        """Return the sum of the indicator."""
        return sum(row[column] for row, column in zip(self.rows, choice, strict=True))

    def enumerated(self) -> list[int]:
        """Return the first choice that holds, by rising indicator; of equal ones the one with the fewest bits."""
        sums = np.zeros(1)
        for row in self.rows:
            sums = np.add.outer(sums, row).ravel()
        shape = tuple(map(len, self.rows))
        for index in np.argsort(sums, kind="stable").tolist():
            choice = [int(column) for column in np.unravel_index(index, shape)] if shape else []
            if self.holds(choice):
                return choice
        raise self._nothing()

    def starts(self) -> list[list[int]]:
        """Return the uniform choices that hold, the fastest first; where none does, what lowers the step one by one."""
        most_bits = max(map(len, self.rows), default=1)
        uniform = [[min(column, len(row) - 1) for row in self.rows] for column in range(most_bits)]
        fitting = [choice for choice in uniform if self.fits(choice)]
        if not fitting:
            raise self._nothing()
        fitting.sort(key=lambda uniform_choice: (self.seconds(uniform_choice), self.lost(uniform_choice)))
        holding = [uniform_choice for uniform_choice in fitting if self.seconds(uniform_choice) <= self.bound_s]
        if holding:
            return holding
        choice = fitting[0]
        while self.seconds(choice) > self.bound_s:
            near = [
                [*choice[:i], column, *choice[i + 1 :]]
                for i, row in enumerate(self.rows) for column in range(len(row)) if column != choice[i]
            ]  # fmt: skip
            faster = min(filter(self.fits, near), key=self.seconds, default=choice)
            if self.seconds(faster) >= self.seconds(choice):
                raise self._nothing()
            choice = faster
        return [choice]

    def _nothing(self) -> InputError:
        """Say that no choice holds, and what the fastest one takes."""
        if not self._steps:
            return InputError("no choice fits the memory. Lower the batch, or offer fewer bits.")
        choice, seconds = min(self._steps.items(), key=lambda pair: pair[1])
        return InputError(
            f"no choice holds {self.bound_s:.6g} s: the fastest, {list(choice)}, takes {seconds:.6g} s. Raise the "
            "bound, or offer fewer bits."
        )

    def added_up(self, start: list[int]) -> list[int] | None:
        """Return the optimum where the times of operators add up; None where they do not, or it does not fit."""
        base = self.seconds(start)
        extra = [
            [self.seconds([*start[:i], column, *start[i + 1 :]]) - base for column in range(len(row))]
            for i, row in enumerate(self.rows)
        ]
        rng = stream(0, "allocate", len(self.rows))
        for _ in range(TRIED_SUMS):
            choice = [int(rng.integers(len(row))) for row in self.rows]
            total = base + sum(times[column] for times, column in zip(extra, choice, strict=True))
            if abs(total - self.seconds(choice)) > SAME * max(total, self.seconds(choice)):
                return None
        # One variable for each operator and precision; row 0 is the time, row i + 1 says that operator i has one.
        owner = np.repeat(np.arange(len(self.rows)), [len(row) for row in self.rows])
        times, lost = np.concatenate(extra), np.concatenate(self.rows)
        unit = float(lost.max()) or 1.0
        columns = np.arange(owner.size)
        best = minimise(
            lost / unit, num_rows=len(self.rows) + 1, high=1.0, whole=1.0, gap=1e-3,
            rows=(
                np.r_[np.zeros(owner.size, np.int64), owner + 1], np.r_[columns, columns],
                np.r_[times / self.bound_s, np.ones(owner.size)],
            ),
            row_low=np.r_[-np.inf, np.ones(len(self.rows))],
            row_high=np.r_[(1 - base / self.bound_s) * (1 - 1e-9), np.ones(len(self.rows))],
        )  # fmt: skip
        chosen = [int(best.x[owner == i].argmax()) for i in range(len(self.rows))]
        return chosen if self.holds(chosen) else None

    def recovered(self, choice: list[int]) -> list[int]:
        """Raise the operator with the largest drop, again and again; one that does not hold is left as it is."""
        choice = list(choice)
        heap = [(-self._drop(i, column), i) for i, column in enumerate(choice) if column + 1 < len(self.rows[i])]
        heapq.heapify(heap)
        while heap:
            _, i = heapq.heappop(heap)
            raised = [*choice[:i], choice[i] + 1, *choice[i + 1 :]]
            if self.holds(raised):
                choice = raised
                if choice[i] + 1 < len(self.rows[i]):
                    heapq.heappush(heap, (-self._drop(i, choice[i]), i))
        return choice

    def _drop(self, operator: int, column: int) -> float:
        return self.rows[operator][column] - self.rows[operator][column + 1]

    def exchanged(self, choice: list[int]) -> list[int]:
        """Change one operator, or two at once, while that lowers the indicator and holds; largest gain first."""
        tried = len(self._steps)
        improved = True
        while improved and len(self._steps) - tried < MOST_EXCHANGES:
            improved = False
            singles = [
                (row[column] - row[choice[i]], i, column)
                for i, row in enumerate(self.rows) for column in range(len(row)) if column != choice[i]
            ]  # fmt: skip
            pairs = [
                (first[0] + second[0], first, second)
                for first in singles for second in singles
                if first[1] != second[1] and first[0] < 0 and first[0] + second[0] < 0
            ]  # fmt: skip
            moves: list[tuple[float, tuple[tuple[int, int], ...]]]
            moves = [(gain, ((i, column),)) for gain, i, column in singles if gain < 0]
            moves += [(gain, (first[1:], second[1:])) for gain, first, second in pairs]
            for _, changes in sorted(moves):
                changed = list(choice)
                for i, column in changes:
                    changed[i] = column
                if self.holds(changed):
                    choice, improved = changed, True
                    break
                if len(self._steps) - tried >= MOST_EXCHANGES:
                    break
        return choice
