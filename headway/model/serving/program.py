"""Layers to stages and bits to layers as one integer program for an order of devices and micro-batch sizes.

Layers with the same indicator that follow each other are one run of n_r
layers, and the program counts them: x[r, j, b] layers of run r on stage j in
bits b. Where all layers are alike that is one run, a program of stages x bits
variables; where all differ, n_r = 1, and x is a choice. Each stage gets
layers that follow each other when, with prefix sums P[r, j] = sum over
j' <= j and b of x[r, j', b] (layers of run r up to stage j),

    P[r + 1, j] <= n_{r+1} u[r, j]    and    n_r u[r, j] <= P[r, j],    u whole (P itself for n_r = 1):

nothing of a run is on the stages up to j before all of the one in front is:

    run 0 (4 layers)   run 1 (3)        stage 0: 3 of run 0    stage 1: 1 of run 0, 2 of run 1    stage 2: 1
    P[0] = 3 4 4       P[1] = 0 2 3     u[0] = 0 1 1

The other rows are those of LLM-PQ's algorithm 1: each layer once, memory,
the busiest resource of each phase, and here the round (`times`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, InputError
from headway.core.linear import Optimum, minimise
from headway.model.serving.times import PipelineCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Solved = tuple[Ints, Optimum] | None
"""Layers [runs, stages, bits] and the optimum; None where nothing fits."""

GB, NS = 1e9, 1e-9
"""Memory and times as the solver sees them: numbers near 1."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRuns:
    """Layers that follow each other and lose alike."""

    sizes: Ints
    """[runs] Layers of each."""

    omega: Floats
    """[runs, bits] Indicator of each of its layers."""

    @classmethod
    def of(cls, omega: Floats) -> LayerRuns:
        """Join layers of `omega` [layers, bits] with equal rows.

        >>> LayerRuns.of(np.array([[2.0, 1.0], [2.0, 1.0], [3.0, 1.0]])).sizes.tolist()
        [2, 1]
        """
        starts = np.flatnonzero(np.r_[True, (omega[1:] != omega[:-1]).any(1)])
        return cls(np.diff(np.r_[starts, len(omega)]), omega[starts])


@dataclass(slots=True)
class _ProgramRows:
    """Rows of a program, in triplets."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, *terms: tuple[Ints | Sequence[int], object], low: float = -np.inf, high: float = np.inf) -> None:
        """Add low <= sum of coefficients x columns <= high; each term is columns and their coefficients."""
        for columns, values in terms:
            flat = np.asarray(columns).ravel()
            self.column += flat.tolist()
            self.value += np.broadcast_to(np.asarray(values, np.float64), np.shape(columns)).ravel().tolist()
            self.row += [len(self.low)] * flat.size
        self.low.append(low)
        self.high.append(high)


@dataclass(frozen=True, slots=True, eq=False)
class ServingProgram:
    """The integer program of one order and pair of micro-batch sizes; `solved` as often as there are objectives."""

    costs: PipelineCosts
    """What each device takes."""

    runs: LayerRuns
    """The layers."""

    def solved(
        self, *, theta: float = 0.0, omega_most: float = np.inf, time_most: float = np.inf, timed: bool = True,
        value_most: float = np.inf, relaxed: bool = False, gap: float = 0.0, stages: Ints | None = None,
    ) -> Solved:  # fmt: skip
        """Return layers [runs, stages, bits] and the optimum of makespan + theta omega; None where nothing fits.

        Seconds; `timed=False` leaves the makespan out of the objective. `omega_most`, `time_most` and `value_most`
        (of the objective) bound what is looked for. `relaxed` lets all variables be fractions: a lower bound.
        `stages` [runs] fixes the stage of each run, so that only bits are chosen.
        """
        costs, runs = self.costs, self.runs
        num_runs, num_bits = runs.omega.shape
        num_stages = len(costs.rows)
        count = num_runs * num_stages * num_bits
        x = np.arange(count).reshape(num_runs, num_stages, num_bits)
        used = count + np.arange(num_stages)
        done = count + num_stages + np.arange((num_runs - 1) * num_stages).reshape(num_runs - 1, num_stages)
        busiest = count + num_stages + done.size + np.arange(2)
        turn = int(busiest[-1]) + 1
        rows = _ProgramRows()
        self._contiguity(rows, x, used, done)
        for j in range(num_stages):
            rows.add((x[:, j], costs.layer_bytes / GB), high=costs.room_bytes[j] / GB)
        time, fixed_s = self._time(rows, x, used, busiest, turn)
        omega = np.zeros(turn + 1)
        omega[x] = runs.omega[:, None, :]
        # The indicator as a share of the largest one that can be: a number near 1 at any unit.
        unit = float(runs.sizes @ runs.omega.max(1)) or 1.0
        everything = np.arange(turn + 1)
        cost = (time if timed else 0.0) + (theta if timed else 1.0 / unit) * omega
        offset = fixed_s if timed else 0.0
        if np.isfinite(omega_most):
            rows.add((everything, omega / unit), high=omega_most / unit)
        if np.isfinite(time_most):
            rows.add((everything, time), high=time_most - fixed_s)
        if np.isfinite(value_most):
            rows.add((everything, cost), high=value_most - offset)
        high = np.full(turn + 1, np.inf)
        high[x] = runs.sizes[:, None, None]
        if stages is not None:
            high[x[np.arange(num_stages)[None, :] != stages[:, None]]] = 0.0
        high[used] = high[done] = 1.0
        low = np.zeros(turn + 1)
        low[used] = ~costs.optional
        links = costs.link_ns[:, ~costs.optional].max(1) * NS
        low[busiest] = links
        integral = np.ones(turn + 1)
        integral[[*busiest, turn]] = 0.0
        try:
            best = minimise(
                cost, rows=(rows.row, rows.column, rows.value), num_rows=len(rows.low), row_low=rows.low,
                row_high=rows.high, low=low, high=high, whole=None if relaxed else integral, gap=gap,
            )  # fmt: skip
        except InputError:  # no x satisfies the rows: the memory, or a bound on time or indicator
            return None
        except HeadwayError:  # the solver gave up on digits: no layers, and no bound but 0
            return np.zeros(x.shape, np.int64), Optimum(np.zeros(turn + 1), np.inf, 0.0, np.zeros(0))
        scale = 1.0 if timed else unit
        moved = Optimum(best.x, best.value * scale + offset, best.bound * scale + offset, best.row_price)
        return np.round(best.x[:count]).astype(np.int64).reshape(x.shape), moved

    def _contiguity(self, rows: _ProgramRows, x: Ints, used: Ints, done: Ints) -> None:
        """Add that each layer is on one stage, and that stages have layers that follow each other."""
        sizes, optional = self.runs.sizes, self.costs.optional
        num_runs, num_stages, _ = x.shape
        for r in range(num_runs):
            rows.add((x[r], 1.0), low=sizes[r], high=sizes[r])
        for j in range(num_stages):
            rows.add((x[:, j], 1.0), (used[j : j + 1], -1.0), low=0.0)
            if optional[j]:
                rows.add((x[:, j], 1.0), (used[j : j + 1], -float(sizes.sum())), high=0.0)
                if j + 1 < num_stages and optional[j + 1] and self.costs.rows[j] == self.costs.rows[j + 1]:
                    rows.add((used[j : j + 2], [1.0, -1.0]), low=0.0)  # of equal devices the first are used
        for r in range(num_runs - 1):
            for j in range(num_stages - 1):
                complete = (x[r, : j + 1], 1.0) if sizes[r] == 1 else (done[r, j : j + 1], 1.0)
                rows.add((x[r + 1, : j + 1], 1.0), (complete[0], -float(sizes[r + 1])), high=0.0)
                if sizes[r] > 1:
                    rows.add((x[r, : j + 1], 1.0), (complete[0], -float(sizes[r])), low=0.0)

    def _time(self, rows: _ProgramRows, x: Ints, used: Ints, busiest: Ints, turn: int) -> tuple[Floats, float]:
        """Add the rows of the busiest resources and of the round; return the makespan's coefficients and constant."""
        costs = self.costs
        optional = np.flatnonzero(costs.optional)
        time, fixed = np.zeros(turn + 1), 0.0
        for phase, table in enumerate((costs.prefill_ns, costs.decode_ns)):
            if phase and not costs.rounds:
                break
            per_layer, links, head = table * NS, costs.link_ns[phase] * NS, costs.head_ns[phase] * NS
            for j in range(len(costs.rows)):
                last = head if j == len(costs.rows) - 1 else 0.0
                rows.add((x[:, j], per_layer[j]), (busiest[phase : phase + 1], -1.0), high=-last)
            for j in optional.tolist():
                rows.add((used[j : j + 1], links[j]), (busiest[phase : phase + 1], -1.0), high=0.0)
            passed = np.zeros(turn + 1)
            passed[x] = per_layer[None]
            passed[used[optional]] = links[optional]
            constant = float(links[~costs.optional].sum()) + head
            time += passed
            fixed += constant
            time[busiest[phase]] += costs.num_microbatches[phase] - 1
            if phase:
                time[turn] += costs.rounds - 1
                rows.add((np.arange(turn + 1), passed - np.eye(1, turn + 1, turn)[0]), high=-constant)
                rows.add((busiest[1:], float(costs.num_microbatches[1])), ([turn], -1.0), high=0.0)
        return time, fixed
