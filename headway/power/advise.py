"""What a plan means for whom: a plan file for `headway run --apply`, and what an operator sets on the devices."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import FormatError, InputError
from headway.core.files.planfile import PlanFile, Remedy
from headway.core.files.safe_files import read_json, whole_file
from headway.plan.proposal import Proposal, Refusal
from headway.power.search import HOLD_S, J_PER_KWH, MITIGATIONS, PowerPlan

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


def mitigations(plan: PowerPlan, *, rated_w: float, on_after_s: float) -> list[dict[str, Any]]:
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


def read_power_plan(path: Path) -> dict[str, Any]:
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


def operator_settings(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
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
