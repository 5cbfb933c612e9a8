"""Copies of jobs on devices of unlike speed, slot by slot: who runs where, and how many steps each copy does.

HadarE (arXiv 2503.10918, section on job forking): a job has at most one copy
per device; in each slot its steps are dealt to its copies by their speeds, and
at the end of the slot the copies become one state again (`consolidate`).
A slot ends after `slot_s`, or where the first job in it is done:

    4 steps/s   | a a a a a a a a | c c c c c c |
    2 steps/s   | b b b b b b b b | c c c c c c |      a is done: its device helps with c,
    1 step/s    | c c c c c c c c | b b b b b b |      which has most left
                0              slot 1       slot 2

`Copies` is asked by the engine of queues (`simulate`) what happens in a slot.

>>> deal(7, np.array([4.0, 2.0, 1.0])).tolist()
[4, 2, 1]
>>> deal(1, np.array([4.0, 2.0, 1.0])).tolist()
[1, 0, 0]
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.cluster.model import Allocation, Cluster, Indices, QueueState, Values

COST_FRACTION = 0.05
"""Share of a slot that saving, averaging and loading may take, unless its length is given."""

FEWEST_STEPS = 20
"""Steps of the slowest device in a slot, at least."""

MOST_SLOT_S = 360.0
"""Longest slot: copies that train apart for long cost accuracy (a round of Gavel)."""


def slot_seconds(cost_s: float, slowest: float) -> float:
    """Return how long a slot should be that costs `cost_s`, where the slowest device does `slowest` steps/s.

    >>> slot_seconds(0.5, 10.0), slot_seconds(0.5, 1.0), slot_seconds(60.0, 10.0)
    (10.0, 20.0, 360.0)
    """
    return min(max(cost_s / COST_FRACTION, FEWEST_STEPS / slowest), MOST_SLOT_S)


def deal(num_steps: int, speeds: Values) -> Indices:
    """[c] Whole steps of each copy, `num_steps` together, such that the last copy ends as early as it can.

    `speeds` [c] in steps/s, > 0. Each copy gets its share rounded down; of the fewer than c steps that are left, each
    goes to the copy that ends it first.
    """
    steps: Indices = np.floor(num_steps * (speeds / speeds.sum())).astype(np.int64)
    for _ in range(num_steps - int(steps.sum())):
        steps[((steps + 1) / speeds).argmin()] += 1
    return steps


class Copies:
    """The copies of `n` jobs on `W` devices (model.Adapting): their steps, placements and costs so far."""

    aligned = False

    def __init__(self, steps: Indices, speeds: Values, slot_s: float, slot_cost_s: float) -> None:
        """Start with `steps` [n] to do; `speeds` [W] in steps/s, > 0; a slot is longer than its cost and one step."""
        self.left, self.speeds, self.slot_s, self.slot_cost_s = steps.copy(), speeds, slot_s, slot_cost_s
        self.running: NDArray[np.bool_] = np.zeros((steps.size, speeds.size), np.bool_)
        """[n, W] Where each has run in the last slot."""
        self.steps_on: Indices = np.zeros((steps.size, speeds.size), np.int64)
        """[n, W] Steps that each has done on each device."""
        self.num_slots, self.num_copies = np.zeros(steps.size, np.int64), np.zeros(steps.size, np.int64)
        """[n] Slots in which each ran; most copies that it had at once."""
        self.cost_s = np.zeros(steps.size)
        """[n] Seconds of saving, averaging and restoring."""

    def work(self, jobs: Indices, devices: Values, seconds: Values) -> tuple[Values, Values]:
        """Let jobs [k] run on devices [k, W] for a slot; return steps [k] and seconds [k] until done, or to its end.

        A job pays the cost of a slot if it has several copies in it, or starts again on another device.
        """
        copies, again = devices > 0, self.num_slots[jobs] > 0
        moved = again & (copies != self.running[jobs]).any(axis=1)
        paid_s = self.slot_cost_s * (moved | (copies.sum(axis=1) > 1))
        # What each would do if nothing ended the slot: all that it has left, dealt to its copies.
        dealt = np.zeros(copies.shape, np.int64)
        for row, index in enumerate(jobs.tolist()):
            dealt[row, copies[row]] = deal(int(self.left[index]), self.speeds[copies[row]])
        end_s = paid_s + (dealt / self.speeds).max(axis=1)
        slot_s = min(float(seconds.max()), float(end_s.min()))
        done = end_s <= slot_s
        # The others do the whole steps that fit; 1e-9 of a step is rounding.
        fit = np.floor(self.speeds * np.maximum(slot_s - paid_s, 0.0)[:, None] + 1e-9)
        steps = np.where(done[:, None], dealt, np.minimum(fit, dealt).astype(np.int64))
        self.running[:] = False
        self.running[jobs] = copies
        self.left[jobs] -= steps.sum(axis=1)
        self.steps_on[jobs] += steps
        self.num_slots[jobs] += 1
        self.num_copies[jobs] = np.maximum(self.num_copies[jobs], copies.sum(axis=1))
        self.cost_s[jobs] += np.minimum(paid_s, slot_s)
        return steps.sum(axis=1).astype(np.float64), np.full(jobs.size, slot_s)

    def place(self, state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
        """Give each device, fastest first, to the job that would end last without it, where that job then ends sooner.

        As many jobs as there are devices are dealt to first, those with most steps left: forking begins where devices
        are left over, because copies that train apart cost accuracy.
        """
        jobs, remaining = state.index, self.left[state.index]
        copies = np.zeros((jobs.size, self.speeds.size), np.bool_)
        end_s = np.full(jobs.size, math.inf)
        for device in np.argsort(-self.speeds, kind="stable").tolist():
            # Jobs without a device first, of those the one with most left; `lexsort` sorts by its last key first.
            for row in np.lexsort((-remaining, -end_s)).tolist():
                if copies[:, device].any():
                    break
                with_it = copies[row].copy()
                with_it[device] = True
                sooner_s, stays = self._end_s(jobs[row], int(remaining[row]), with_it), self.running[jobs[row]]
                if math.isinf(end_s[row]) and stays.sum() == 1 and not copies[:, stays].any():
                    # A job that runs on one device leaves it only where that pays for the move.
                    stays_s = self._end_s(jobs[row], int(remaining[row]), stays)
                    sooner_s, with_it = (stays_s, stays) if stays_s <= sooner_s else (sooner_s, with_it)
                if sooner_s < end_s[row]:
                    copies[row], end_s[row] = with_it, sooner_s
        return Allocation(np.zeros(state.rates.shape), devices=copies.astype(np.int64))

    def _end_s(self, job: int, num_steps: int, copies: NDArray[np.bool_]) -> float:
        """Seconds until a job is done on some devices, with what its slots cost."""
        run_s = num_steps / self.speeds[copies].sum()
        if copies.sum() > 1:
            return float(run_s + self.slot_cost_s * math.ceil(run_s / (self.slot_s - self.slot_cost_s)))
        moved = self.num_slots[job] > 0 and bool((copies != self.running[job]).any())
        return float(run_s + self.slot_cost_s * moved)

    def most(self, jobs: Indices) -> Indices:
        """[k] Most devices that each may have: all, with one copy on each."""
        return np.full(jobs.size, self.speeds.size)

    def speedup(self, jobs: Indices, num_hosts: Indices, num_devices: Indices, fair: int) -> Values:
        """[k, c] Steps/s on the fastest so many devices, over those on the fastest `fair` ones."""
        together = np.concatenate(([0.0], np.cumsum(np.sort(self.speeds)[::-1])))
        return np.tile(together[num_devices] / together[fair], (jobs.size, 1))

    def left_s(self, job: int, num_devices: int) -> float:
        """Seconds that a job still needs on the fastest so many devices."""
        return float(self.left[job] / np.sort(self.speeds)[::-1][:num_devices].sum())
