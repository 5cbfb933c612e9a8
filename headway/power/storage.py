"""A battery between site and grid: the grid sees a slow version of the power, the battery takes the difference.

    grid target   first-order low pass of the power (time constant tau), and a slow pull that recentres the charge
    battery       |power - grid| <= its power limit, charge within 0 .. capacity; where it is full or empty, the
                  grid takes the rest
    charge        + efficiency x charged - discharged / efficiency

It starts half full. The grid never takes power back.

>>> grid_w, charge_j = store([100.0, 0.0] * 50, 1.0, capacity_j=1e4, power_limit_w=1e3, tau_s=1e6, efficiency=1.0)
>>> grid_w[:2].round(1).tolist(), charge_j[:2].round(1).tolist()
([100.0, 100.0], [5000.0, 5100.0])
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from headway.core.errors import InputError
from headway.power.grid_spec import Watts, checked_power
from headway.sim.graph.kernels import kernel

RECENTRE = 20.0
"""Time constants of the low pass in which the charge goes back to one half."""


@kernel
def _store(
    power: Watts, step: float, capacity: float, limit: float, keep: float, recentre: float, efficiency: float,
    grid: Watts, charge: Watts,
) -> None:  # fmt: skip
    """Fill `grid` and `charge`; `keep` is the low pass's memory of one step, `recentre` the pull per second."""
    slow, held, middle = power[0], 0.5 * capacity, 0.5 * capacity
    for index in range(len(power)):
        asked = power[index]
        slow = keep * slow + (1.0 - keep) * asked
        flow = slow + (middle - held) * recentre - asked  # into the battery
        flow = min(max(flow, -limit, -asked), limit)
        if flow > 0.0:
            flow = min(flow, (capacity - held) / (efficiency * step))
            held = min(held + efficiency * flow * step, capacity)
        else:
            flow = max(flow, -held * efficiency / step)
            held = max(held + flow * step / efficiency, 0.0)
        grid[index] = asked + flow
        charge[index] = held


def store(
    power_w: ArrayLike, step_s: float, *, capacity_j: float, power_limit_w: float, tau_s: float,
    efficiency: float = 0.95,
) -> tuple[Watts, Watts]:  # fmt: skip
    """Return what the grid delivers [t], W, and the battery's charge after each step [t], J.

    `efficiency` is that of each direction. Raises `InputError` on a battery without capacity or power, a time constant
    that is not above 0, an efficiency outside of 0..1, or a waveform that is none.
    """
    power = checked_power(power_w, step_s)
    for name, value in {"capacity_j": capacity_j, "power_limit_w": power_limit_w, "tau_s": tau_s}.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; a battery needs a finite number above 0. Leave it out otherwise.")
    if not 0 < efficiency <= 1:
        raise InputError(f"efficiency is {efficiency}; pass the fraction that survives one direction, in (0, 1].")
    grid, charge = np.empty_like(power), np.empty_like(power)
    keep, recentre = math.exp(-step_s / tau_s), 1 / (RECENTRE * tau_s)
    _store(power, step_s, capacity_j, power_limit_w, keep, recentre, efficiency, grid, charge)
    return grid, charge
