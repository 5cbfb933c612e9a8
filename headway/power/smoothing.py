"""What a device's firmware does to its power: a floor while it is in use, limited ramps, a hold before it lets go.

    asked     ----\\      /----        floor: the device burns up to it while work comes and goes
    floor     - - -\\- - /- - -        hold: how long after the last work it does so
    drawn     -----\\___/-----         ramps: how fast what it draws may rise and fall

Where the ramp keeps the output below what was asked for, work is lost; where the floor keeps it above, energy is added:

    energy drawn = energy asked x (1 - lost fraction) + energy added

>>> output_w, lost, added_j = smooth([100.0, 20.0, 100.0], 1.0, floor_w=50.0)
>>> output_w.tolist(), lost, added_j
([100.0, 50.0, 100.0], 0.0, 30.0)

A battery between site and grid: the grid sees a slow version of the power, the battery takes the difference.

    grid target   first-order low pass of the power (time constant tau), and a slow pull that recentres the charge
    battery       |power - grid| <= its power limit, charge within 0 .. capacity; where it is full or empty, the
                  grid takes the rest
    charge        + efficiency x charged - discharged / efficiency

It starts half full. The grid never takes power back.

>>> grid_w, charge_j = store([100.0, 0.0] * 50, 1.0, capacity_j=1e4, power_limit_w=1e3, tau_s=1e6, efficiency=1.0)
>>> grid_w[:2].round(1).tolist(), charge_j[:2].round(1).tolist()
([100.0, 100.0], [5000.0, 5100.0])

The power of a site over time: from the recorded ranks of a run, or from a file of samples.

Each rank's time is cut into kinds of work by what it recorded: a step computes, and what has a name inside it is
communication, a copy to the device, or idle (input, checkpoints, the host's own work). A run on an accelerator whose
work was timed by device events computes where the device is at work. Ranks keep their recorded skew and jitter; each
stands for an equal part of the site's devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from headway.core.errors import FormatError, InputError
from headway.core.files.inert import read_arrays
from headway.core.units import plural
from headway.cost.power import PowerModel
from headway.ledger.booking.rows import NAME_ID, NAMES, RankRows, rows_by_rank
from headway.power.grid_spec import Watts, checked_power
from headway.sim.graph.kernels import kernel
from headway.trace.events.intervals import Ints, sweep
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPANS


@kernel
def _smooth(power: Watts, floor: float, rise: float, fall: float, hold: int, output: Watts) -> tuple[float, float]:
    """Fill `output`; return the sums of what is asked and not drawn, and drawn and not asked."""
    lost = added = 0.0
    drawn, since = -1.0, hold + 1
    for index in range(len(power)):
        asked = power[index]
        since = 0 if asked > 0.5 * floor else since + 1
        target = floor if since <= hold and asked < floor else asked
        if drawn < 0.0:
            drawn = target
        elif target > drawn + rise:
            drawn += rise
        elif target < drawn - fall:
            drawn -= fall
        else:
            drawn = target
        output[index] = drawn
        if drawn < asked:
            lost += asked - drawn
        else:
            added += drawn - asked
    return lost, added


def smooth(
    power_w: ArrayLike, step_s: float, *, floor_w: float = 0.0, up_w_per_s: float = math.inf,
    down_w_per_s: float = math.inf, hold_s: float = math.inf, tdp_w: float = math.inf,
) -> tuple[Watts, float, float]:  # fmt: skip
    """Return the power drawn [t], the fraction of the energy asked for that was not drawn, and the joules added.

    The floor holds while the device is in use, until `hold_s` after power was last above half of it. Raises
    `InputError` on a floor below 0 or above `tdp_w`, ramps that are not above 0, or a waveform that is none.
    """
    power = checked_power(power_w, step_s)
    if not 0 <= floor_w <= tdp_w or not math.isfinite(floor_w):
        raise InputError(f"the floor is {floor_w:g} W and the TDP {tdp_w:g} W; pass 0 <= floor <= TDP.")
    if not (up_w_per_s > 0 and down_w_per_s > 0 and hold_s >= 0):
        raise InputError(f"ramps are {up_w_per_s} and {down_w_per_s} W/s, hold {hold_s} s; pass ramps > 0, hold >= 0.")
    output = np.empty_like(power)
    hold = round(min(hold_s / step_s, float(1 << 60)))
    lost, added = _smooth(power, float(floor_w), up_w_per_s * step_s, down_w_per_s * step_s, hold, output)
    asked = float(power.sum())
    return output, lost / asked if asked else 0.0, added * step_s


@kernel
def _slowed(power: Watts, floor: float, rise: float, fall: float, hold: int) -> int:
    """Return the steps of time that the work of a waveform takes where what is not drawn is made up for later."""
    done, taken = 0.0, 0
    drawn, since = -1.0, hold + 1
    while done < len(power) - 1e-9:
        asked = power[int(done)]
        since = 0 if asked > 0.5 * floor else since + 1
        target = floor if since <= hold and asked < floor else asked
        drawn = target if drawn < 0.0 else min(max(target, drawn - fall), drawn + rise)
        done += 1.0 if drawn >= asked else drawn / asked
        taken += 1
    return taken


def slowed(
    power_w: ArrayLike, step_s: float, *, floor_w: float = 0.0, up_w_per_s: float, down_w_per_s: float,
    hold_s: float = math.inf,
) -> float:  # fmt: skip
    """Return how many times as long the work takes under limited ramps: it advances in proportion to what is drawn.

    Waiting (power that falls) takes as long as before. Raises `InputError` as `smooth` does.
    """
    power = checked_power(power_w, step_s)
    if not (up_w_per_s > 0 and down_w_per_s > 0 and hold_s >= 0):
        raise InputError(f"ramps are {up_w_per_s} and {down_w_per_s} W/s, hold {hold_s} s; pass ramps > 0, hold >= 0.")
    hold = round(min(hold_s / step_s, float(1 << 60)))
    return _slowed(power, float(floor_w), up_w_per_s * step_s, down_w_per_s * step_s, hold) / len(power)


def fill(power_w: ArrayLike, step_s: float, *, level_w: float, on_after_s: float) -> tuple[Watts, float]:
    """Return the power [t] with a filler that raises idle gaps to `level_w`, and the joules that it adds.

    It begins `on_after_s` after power fell below the level, and yields at once. Raises `InputError` on numbers below 0.
    """
    power = checked_power(power_w, step_s)
    if not (level_w >= 0 and on_after_s >= 0):
        raise InputError(f"the filler's level is {level_w} W, on after {on_after_s} s; pass numbers >= 0.")
    below, index = power < level_w, np.arange(len(power))
    began = np.maximum.accumulate(np.where(below, -1, index))  # the last sample at or above the level
    output = np.where(below & (index - began > round(on_after_s / step_s)), level_w, power)
    return output, float((output - power).sum()) * step_s


# A battery between site and grid: the grid sees a slow version of the power, the battery takes the difference.

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


KIND_OF: dict[str, str] = {
    "step": "compute", "forward": "compute", "optimizer.step": "compute", "optimizer.closure": "compute",
    "eval": "compute", "host.sync": "compute", "input.transfer": "memcpy", "comm.init": "idle",
    **{name: "comm" for name, span in SPANS.items() if span.kind in ("COLL", "SEND", "RECV") and name != "comm.init"},
    **{name: "idle" for name, span in SPANS.items() if span.kind == "CKPT"},
    **dict.fromkeys(("input.next", "input.iter", "host.gc", "host.logging", "host.compile"), "idle"),
    **dict.fromkeys(("host.script", "host.recording"), "idle"),
}  # fmt: skip
"""Recorded name -> kind of work of the device while it lasts; inner names win over those around them."""

LAYER = {"compute": 0, "comm": 1, "idle": 2, "memcpy": 3}
"""Kind -> precedence where rows overlap; a step lies under everything."""


@dataclass(frozen=True, slots=True, eq=False)
class Waveform:
    """Power over time."""

    power_w: Watts
    """[t] Power of the site."""

    step_s: float
    """Seconds between samples."""

    basis: str
    """Where it comes from."""


def of_file(path: Path) -> Waveform:
    """Read `power_w` [t] and `step_s` of an NPZ file; raises `FormatError`."""
    watts, seconds = read_arrays(path, ("power_w", "step_s"))
    try:
        if np.iscomplexobj(watts):
            raise TypeError("power_w holds complex numbers")
        power, step_s = np.asarray(watts, np.float64), float(seconds)
    except (ValueError, TypeError) as fault:
        raise FormatError(f"{path} holds no power_w and step_s ({fault}). Write np.savez(FILE, ...) of both.") from None
    return Waveform(checked_power(power, step_s), step_s, f"{len(power):,} samples of {path}")


def of_run(
    source: Trace | Parts, model: PowerModel, *, devices: int, step_s: float = 0.01, overhead_fraction: float = 0.0,
    clock_offset_ns: Mapping[int, int] | None = None,
) -> Waveform:  # fmt: skip
    """Return the power of `devices` devices that work as the recorded ranks do.

    `overhead_fraction` is what hosts draw all the time, as a fraction of the devices' TDP. Raises `InputError` where
    no rank recorded a step or there are fewer devices than ranks.
    """
    ranks = [rows for rows in rows_by_rank(source, clock_offset_ns).values() if len(rows.of("step"))]
    if not ranks:
        raise InputError("no steps recorded. Record a run that trains.")
    if devices < len(ranks) or not overhead_fraction >= 0:
        given = f"{plural(devices, 'device')} for {plural(len(ranks), 'rank')}, overhead {overhead_fraction}"
        raise InputError(f"{given}; pass one device per rank, and no less than 0 of overhead.")
    bounds = [(rows.start_ns[rows.of("step")].min(), rows.end_ns[rows.of("step")].max()) for rows in ranks]
    window = int(min(low for low, _ in bounds)), int(max(high for _, high in bounds))
    total = np.zeros(math.ceil((window[1] - window[0]) / (step_s * 1e9) - 1e-9))
    for rows in ranks:
        total += model.synth(*activity(rows, window), step_s=step_s, window_ns=window)
    total *= devices / len(ranks)
    total += overhead_fraction * devices * model.tdp_w
    each = f"each stands for {devices / len(ranks):,.0f} devices" if devices != len(ranks) else "one device each"
    return Waveform(total, step_s, f"{len(ranks)} recorded ranks, skew and jitter as recorded, {each}")


def activity(rows: RankRows, window: tuple[int, int]) -> tuple[Ints, Ints, Sequence[str]]:
    """Return starts, ends and kinds [n] of what a rank's device did: disjoint pieces, idle ones left out."""
    work = rows.of("device.work", main=False)
    if len(work):
        return rows.start_ns[work], rows.end_ns[work], ["compute"] * len(work)
    picked = rows.of(*KIND_OF)
    layer = np.array([LAYER[KIND_OF[name]] if name in KIND_OF else 0 for name in NAMES], np.int64)
    layer[NAME_ID["step"]] = -1
    pieces = sweep(rows.start_ns[picked], rows.end_ns[picked], layer[rows.name[picked]], window=window)
    kinds = [KIND_OF.get(name, "idle") for name in NAMES] + ["idle"]
    name = np.append(rows.name[picked], len(NAMES))[pieces.row]
    found = np.array(kinds)[name]
    busy = found != "idle"
    return pieces.start_ns[busy], pieces.end_ns[busy], found[busy].tolist()
