"""What a plan means for whom: a plan file for `headway run --apply`, and what an operator sets on the devices.

The cheapest way to make a waveform keep to a specification: a floor or a filler, limited ramps, a battery.

A floor (or filler) bounds the amplitude and costs energy for ever; a battery takes what is left and costs once per
joule. For each kind and level, the smallest time constant of the battery that holds is found by bisection (a longer
one only smooths more); the battery is as large as what it is asked to move. The level is searched coarsely, then
around the best one; the least level that holds without a battery is found by bisection as well.
"""

from __future__ import annotations

import functools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headway.core.errors import FormatError, InputError
from headway.core.files.planfile import PlanFile, Remedy
from headway.core.files.safe_files import read_json, whole_file
from headway.core.search import threshold
from headway.core.tables import pick
from headway.plan.proposal import Proposal, Refusal
from headway.power.grid_spec import GridSpec, Watts, check, checked_power
from headway.power.smoothing import fill, slowed, smooth, store

J_PER_KWH = 3.6e6
YEAR_S = 365.25 * 86_400.0

SPOTS = 10
"""Time constants of a battery that are looked at beyond the least one."""

LEVELS = 13
"""Levels of the coarse search, from 0 to the rated power."""

MOST_FLOOR = 0.9
"""Largest floor that the firmware of devices takes, as a fraction of the TDP (arXiv 2508.14318)."""

HOLD_S = 10.0
"""Seconds for which a floor holds after the last work; what is exported to an operator."""

EFFICIENCY = 0.95
"""Fraction of energy that survives one direction of a battery."""

LONGEST = 100.0
"""Longest time constant of a battery that is tried, in lengths of the record."""


@dataclass(frozen=True, slots=True)
class PowerCosts:
    """What energy, lost work and batteries cost, in round numbers of 2025; each site has its own."""

    usd_per_kwh: float = 0.08
    """Energy that is added."""

    compute_usd_per_kwh: float = 3.0
    """Time that work takes longer, per energy that it draws meanwhile: 2 dollars an hour for 700 W."""

    storage_usd_per_kwh: float = 400.0
    """Capacity of the battery, installed."""

    storage_usd_per_kw: float = 150.0
    """Its converters."""

    life_years: float = 5.0
    """Time over which energy and lost work are counted."""


@dataclass(frozen=True, slots=True)
class PowerPlan:
    """A way to keep to a specification, or the nearest thing to one."""

    feasible: bool
    """The specification holds, and the battery is not larger than allowed."""

    kind: str
    """What raises low power: none, floor or filler."""

    level_w: float = 0.0
    """Power that it raises to; 0 without one."""

    ramps_w_per_s: float = math.inf
    """Limit of ramps in both directions; infinite without one."""

    tau_s: float = 0.0
    """Time constant of the battery; 0 without one."""

    capacity_j: float = 0.0
    """Its capacity."""

    power_limit_w: float = 0.0
    """Its power."""

    cost_usd: float = math.inf
    """Cost over the life of the site."""

    added_energy_fraction: float = 0.0
    """Energy added / energy asked for."""

    step_time_factor: float = 1.0
    """How many times as long the work takes."""

    least_storage_j: float = math.inf
    """Smallest battery with which the specification holds, whatever the rest costs; infinite where none does."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shaped:
    """A waveform after floor, filler and ramps."""

    kind: str
    level_w: float
    ramps_w_per_s: float
    power: Watts = field(repr=False)
    added_j: float
    step_time_factor: float


@dataclass(frozen=True, slots=True)
class _Battery:
    """A battery that is never full or empty."""

    tau_s: float
    capacity_j: float
    limit_w: float
    lost_j: float


MITIGATIONS: tuple[str, ...] = ("floor", "ramps", "filler", "battery")
"""What a plan may use. Floors and ramps are set by an operator; a filler runs beside the job."""


def optimise(
    power_w: ArrayLike, step_s: float, spec: GridSpec, *, rated_w: float | None = None,
    allowed: Sequence[str] = MITIGATIONS, costs: PowerCosts | None = None, on_after_s: float = 0.02,
    max_storage_j: float = math.inf,
) -> PowerPlan:  # fmt: skip
    """Return the cheapest plan that holds, or, where none does, the one with the least storage.

    `rated_w` is the largest level (default: the waveform's largest power). Raises `InputError` as `check` does, and
    on unknown mitigations.
    """
    for name in allowed:
        pick(dict.fromkeys(MITIGATIONS), name, "mitigation")
    search = _Search(checked_power(power_w, step_s), step_s, spec, costs or PowerCosts(), "battery" in allowed)
    if check(search.power, step_s, spec).ok:
        return PowerPlan(True, "none", cost_usd=0.0, least_storage_j=0.0)
    rated = float(search.power.max()) if rated_w is None else rated_w
    found: list[PowerPlan] = []
    for kind, shape in _shapes(search, spec, allowed, on_after_s):
        top_w = {"none": 0.0, "floor": MOST_FLOOR * rated, "filler": rated}[kind]
        found += search.along(shape, top_w, max_storage_j)
    least = min((plan.capacity_j for plan in found), default=math.inf)
    fitting = [plan for plan in found if plan.capacity_j <= max_storage_j]
    key: Callable[[PowerPlan], float] = (lambda p: p.cost_usd) if fitting else (lambda p: p.capacity_j)
    best = min(fitting or found, key=key, default=PowerPlan(False, "none", cost_usd=math.inf))
    return replace(best, feasible=bool(fitting), least_storage_j=least)


Shape = Callable[[float], _Shaped]
"""Level, W -> the waveform after it."""


def _shapes(search: _Search, spec: GridSpec, allowed: Sequence[str], on_after_s: float) -> Iterator[tuple[str, Shape]]:
    """Yield the kinds of shaping that are allowed: with a filler, or a floor, each with and without ramps."""
    power, step_s = search.power, search.step_s

    def shaped(kind: str, ramps: float, level_w: float) -> _Shaped:
        filler_j = 0.0
        filled = power
        if kind == "filler":
            filled, filler_j = fill(power, step_s, level_w=level_w, on_after_s=on_after_s)
        floor_w = level_w if kind == "floor" else 0.0
        terms = {"floor_w": floor_w, "up_w_per_s": ramps, "down_w_per_s": ramps, "hold_s": HOLD_S}
        output, _, added_j = smooth(filled, step_s, **terms)
        factor = slowed(filled, step_s, **terms) if math.isfinite(ramps) else 1.0
        return _Shaped(kind if level_w else "none", level_w, ramps, output, added_j + filler_j, factor)

    kinds = [kind for kind in ("floor", "filler") if kind in allowed] or ["none"]
    for ramps in [math.inf, *([spec.ramp_w_per_s] if "ramps" in allowed else [])]:
        for kind in kinds:
            yield kind, functools.partial(shaped, kind, ramps)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """What every evaluation needs."""

    power: Watts
    step_s: float
    spec: GridSpec
    costs: PowerCosts
    battery: bool

    def holds(self, power: Watts) -> bool:
        """Say whether a waveform keeps to the specification."""
        return check(power, self.step_s, self.spec).ok

    def along(self, shape: Shape, top_w: float, max_storage_j: float) -> list[PowerPlan]:
        """Search the levels of one shape: coarsely, then around the cheapest, and where no battery is needed."""
        fixed = top_w == 0.0
        levels = [0.0] if fixed else np.linspace(0.0, top_w, LEVELS).tolist()
        plans = {level: self.plan(shape(level), max_storage_j) for level in levels}
        alone = None if fixed else threshold(
            lambda level: self.holds(shape(level).power), 0.0, top_w, tolerance=top_w / 1000
        )  # fmt: skip
        if alone is not None:
            plans[alone] = self.plan(shape(alone), max_storage_j)
        width = top_w / (LEVELS - 1)
        for _ in range(0 if fixed else 5):
            width /= 2
            ways = [(level, plan) for level, made in plans.items() for plan in made]
            known = [(plan.cost_usd, level) for level, plan in ways if plan.capacity_j <= max_storage_j]
            known = known or [(plan.capacity_j, level) for level, plan in ways]
            if not known:
                break
            best = min(known)[1]
            for level in (best - width, best + width):
                if 0.0 <= level <= top_w and level not in plans:
                    plans[level] = self.plan(shape(level), max_storage_j)
        return [plan for made in plans.values() for plan in made]

    def plan(self, shaped: _Shaped, max_storage_j: float) -> list[PowerPlan]:
        """Return plans after a shape: with the smallest battery that holds, and a cheaper larger one; or none."""
        if self.holds(shaped.power):
            return [self.priced(shaped, _Battery(0.0, 0.0, 0.0, 0.0))]
        longest = math.log(LONGEST * len(self.power) * self.step_s)
        least = threshold(
            lambda log_tau: self.holds(self.sized(shaped.power, math.exp(log_tau))[0]),
            math.log(self.step_s), longest, tolerance=0.005,
        ) if self.battery else None  # fmt: skip
        if least is None:
            return []
        plans = {least: self.priced(shaped, self.sized(shaped.power, math.exp(least))[1])}
        # A longer one mostly costs more, but what it loses to efficiency may be less: look along the axis, then closer.
        spots, width = np.linspace(least, longest, SPOTS).tolist()[1:], (longest - least) / (SPOTS - 1)
        for _ in range(5):
            for spot in spots:
                grid, battery = self.sized(shaped.power, math.exp(spot))
                if least < spot <= longest and battery.capacity_j <= max_storage_j and self.holds(grid):
                    plans[spot] = self.priced(shaped, battery)
            best, width = min(plans, key=lambda spot: plans[spot].cost_usd), width / 2
            spots = [best - width, best + width]
        return [plans[least], plans[best]]

    def sized(self, power: Watts, tau_s: float) -> tuple[Watts, _Battery]:
        """Return what the grid delivers with a battery that is never full or empty, and that battery.

        Charge that is left over at the end is worth what it can deliver, charge that is missing what it takes to fill.
        """
        room = 4 * float(power.sum()) * self.step_s
        grid, charge = store(
            power, self.step_s, capacity_j=room, power_limit_w=room, tau_s=tau_s, efficiency=EFFICIENCY
        )
        left_j = float(charge[-1]) - room / 2
        worth_j = left_j * EFFICIENCY if left_j > 0 else left_j / EFFICIENCY
        return grid, _Battery(
            tau_s, 2 * float(np.abs(charge - room / 2).max()), float(np.abs(grid - power).max()),
            float((grid - power).sum()) * self.step_s - worth_j,
        )  # fmt: skip

    def priced(self, shaped: _Shaped, battery: _Battery) -> PowerPlan:
        """Price a plan over the life of the site."""
        costs, asked_j = self.costs, float(self.power.sum()) * self.step_s
        added_j = shaped.added_j + battery.lost_j
        times = costs.life_years * YEAR_S / (len(self.power) * self.step_s)
        slower_j = (shaped.step_time_factor - 1) * asked_j
        running = times * (added_j * costs.usd_per_kwh + slower_j * costs.compute_usd_per_kwh)
        usd = (running + battery.capacity_j * costs.storage_usd_per_kwh) / J_PER_KWH
        return PowerPlan(
            True, shaped.kind, shaped.level_w, shaped.ramps_w_per_s, battery.tau_s, battery.capacity_j, battery.limit_w,
            usd + battery.limit_w / 1e3 * costs.storage_usd_per_kw, added_j / asked_j if asked_j else 0.0,
            shaped.step_time_factor,
        )  # fmt: skip


SCHEMA = "headway.power-plan/1"

SMOOTHING_DEVICES = ("B200", "GB200", "B300", "GB300")
"""Devices whose firmware has a floor and ramps: Blackwell and later (docs.nvidia.com, NVML power smoothing)."""

OFF_WITHIN_S = 0.005
"""Seconds within which a filler sees that the rank works again."""


def propose(ledger: object, program: object, setup: object) -> Iterator[Proposal | Refusal]:
    """Yield nothing: a filler wins a job no time. What a site needs is asked for with `headway power plan`."""
    del ledger, program, setup
    yield from ()


def default_mitigations(device: str) -> tuple[str, ...]:
    """Return what can be done on a device: floors and ramps only where its firmware has them."""
    old = bool(device) and not device.upper().startswith(SMOOTHING_DEVICES)
    return tuple(name for name in MITIGATIONS if not (old and name in ("floor", "ramps")))


def mitigations(plan: PowerPlan, *, rated_w: float, on_after_s: float) -> list[dict[str, object]]:
    """Return what a plan consists of, one entry each."""
    rows: list[dict[str, Any]] = []
    level = {"level_w": plan.level_w, "level": plan.level_w / rated_w if rated_w else 0.0}
    if plan.kind == "floor":
        rows.append({"kind": "floor", **level})
    if plan.kind == "filler":
        rows.append({"kind": "filler", **level, "on_after_s": on_after_s, "off_within_s": OFF_WITHIN_S})
    if math.isfinite(plan.ramps_w_per_s):
        rows.append({"kind": "ramps", "up_w_per_s": plan.ramps_w_per_s, "down_w_per_s": plan.ramps_w_per_s})
    if plan.capacity_j:
        sizes = {"capacity_j": plan.capacity_j, "power_limit_w": plan.power_limit_w, "tau_s": plan.tau_s}
        rows.append({"kind": "battery", **sizes})
    return rows


def write_power_plan(answer: Mapping[str, Any], path: Path, baseline: str | None) -> None:
    """Write a plan file: the remedies that `headway run --apply` applies, and the whole answer under "power"."""
    fillers = [row for row in answer["mitigations"] if row["kind"] == "filler"]
    parameters = [{key: row[key] for key in ("on_after_s", "off_within_s", "level")} for row in fillers]
    remedies = tuple(Remedy("power.filler", each) for each in parameters)
    content = {**PlanFile(remedies, baseline=baseline).to_json(), "power": dict(answer)}
    with whole_file(path) as draft:
        draft.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_power_plan(path: Path) -> dict[str, object]:
    """Return the answer of a plan file; raises `FormatError` where it is none of `headway power plan`."""
    if not path.is_file():
        raise InputError(f"{path} does not exist. Write a plan with `headway power plan`, and name its file.")
    tree = read_json(path, fix="Write one with `headway power plan`.")
    answer = tree.get("power") if isinstance(tree, dict) else None
    if (
        not isinstance(answer, dict)
        or answer.get("schema") != SCHEMA
        or not isinstance(answer.get("mitigations"), list)
    ):
        raise FormatError(f"{path} is not a plan of `headway power plan`. Write one with it.")
    return answer


def operator_settings(answer: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the parameters of NVML's power smoothing that a plan needs on each device: name and value.

    Percent of the TDP for the floor, watts per second of one device for ramps, milliseconds for the hold.
    """
    rows = {row["kind"]: row for row in answer["mitigations"]}
    found: list[dict[str, Any]] = []
    if "floor" in rows:
        percent = 100 * rows["floor"]["level"]
        found.append({"parameter": "PERCENT_TMP_FLOOR", "value": round(percent, 2), "unit": "%"})
        found.append({"parameter": "RAMP_DOWN_HYSTERESIS", "value": 1000 * HOLD_S, "unit": "ms"})
    if "ramps" in rows:
        each = {name: rows["ramps"][f"{name}_w_per_s"] / answer["devices"] for name in ("up", "down")}
        found += [
            {"parameter": f"RAMP_{name.upper()}_RATE", "value": round(value, 3), "unit": "W/s"}
            for name, value in each.items()
        ]
    return found


def other_parts(content: Mapping[str, Any], path: Path) -> list[str]:
    """Return what is done about the parts of a plan that no device's setting holds: a filler, and a battery to buy."""
    lines = []
    for row in content["mitigations"]:
        if row["kind"] == "filler":
            command = f"headway run --apply {shlex.quote(str(path))} -- <your script and its arguments>"
            lines.append(f"A filler of {row['level']:.0%} of the devices' power in gaps, applied to the job: {command}")
        if row["kind"] == "battery":
            lines.append(
                f"A battery of {row['capacity_j'] / J_PER_KWH:,.4g} kWh that takes and gives "
                f"{row['power_limit_w']:,.4g} W, behind a low-pass filter of {row['tau_s']:.4g} s."
            )
    return lines or ([] if content["mitigations"] else ["The site keeps its limits as it is: the plan needs nothing."])


def operator_script(settings: Sequence[Mapping[str, object]]) -> str:
    """Return the Python script (nvidia-ml-py) that an operator runs as root on each host, for every device of it."""
    lines = [
        "import pynvml as nvml", "nvml.nvmlInit()", "for index in range(nvml.nvmlDeviceGetCount()):",
        "    device = nvml.nvmlDeviceGetHandleByIndex(index)",
    ]  # fmt: skip
    for row in settings:
        parameter = f"nvml.NVML_POWER_SMOOTHING_PROFILE_PARAM_{row['parameter']}"
        lines += [
            "    change = nvml.c_nvmlPowerSmoothingProfile_v1_t()",
            f"    change.profileId, change.paramId, change.value = 0, {parameter}, {row['value']}",
            "    nvml.nvmlDevicePowerSmoothingUpdatePresetProfileParam(device, change)",
        ]
    lines += [
        "    nvml.nvmlDevicePowerSmoothingActivatePresetProfile(device, change)",
        "    state = nvml.c_nvmlPowerSmoothingState_v1_t()", "    state.state = nvml.NVML_FEATURE_ENABLED",
        "    nvml.nvmlDevicePowerSmoothingSetState(device, state)",
    ]  # fmt: skip
    return "\n".join(lines)
