"""The power of a site over time: from the recorded ranks of a run, or from a file of samples.

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

from headway.core.errors import FormatError, InputError
from headway.core.files.arrays import read_arrays
from headway.core.units import plural
from headway.cost.power import PowerModel
from headway.ledger.booking.rows import NAME_ID, NAMES, RankRows, rows_by_rank
from headway.power.grid_spec import Watts, checked_power
from headway.trace.events.parts import Parts
from headway.trace.events.sweep import Ints, sweep
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPANS

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
