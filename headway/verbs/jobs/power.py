"""`headway power check|plan|export`: a job's power over time, what a utility allows, and what makes it fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.text import Text

from headway.core.errors import InputError, UnknownNameError
from headway.core.units import format_fraction, format_seconds, magnitude
from headway.cost.power import PowerModel
from headway.power.advise import (
    SCHEMA,
    PowerCosts,
    default_mitigations,
    mitigations,
    operator_script,
    operator_settings,
    optimise,
    other_parts,
    read_power_plan,
    write_power_plan,
)
from headway.power.grid_spec import GridSpec, ramps, ranges
from headway.power.grid_spec import check as hold_against
from headway.power.smoothing import Waveform, of_file, of_run
from headway.report.page.plots import Line, picture_page, write_page
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.trace.recording.runs import is_run
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import OutPath, RunPath, run_at

ROWS = {"ramp_w_per_s": "ramp, W/s", "range_w": "range, W", "band_rms_w": "band, W rms", "band_share": "band, share"}

FILLER = "headway applies a filler beside ranks on CPUs only; leave it out on accelerators: --use floor,ramps,battery"
"""What a plan with a filler has to say."""


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """A site, and the limits that its power is held against."""

    spec: str
    """TOML file of ramp_w_per_s, range_w, window_s, band_hz, band_rms_w, band_share; or moderate, strict."""
    device: str = ""
    """Name in the table of devices that the ranks stand for; the run's own by default."""
    devices: int = 0
    """Devices of the site; those recorded by default."""
    step_s: float = 0.01
    """Seconds between samples of a run's power."""
    idle_w: float | None = None
    """Idle power of a device where it was measured; a tenth of its TDP by default."""
    overhead_fraction: float = 0.0
    """What hosts draw all the time, as a fraction of the devices' TDP."""


def check(
    source: RunPath | None = None, /, *, site: Annotated[SiteOptions, Parameter(name="*")], out: OutPath | None = None,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Hold the power of a site against a specification; exit 3 when a limit does not hold.

    Example: `headway power check headway-runs/train-1 --device H100-SXM5-80GB --devices 20000 --spec moderate`

    Args:
      source: A run folder (the newest one by default), or an NPZ file with power_w (watts) and step_s (seconds).
      out: Also write a page of the power over time, and of its ramps and ranges beside the limits: -o page.html.
    """
    limits = GridSpec.read(site.spec)
    wave, _, _ = _waveform(source, site)
    found = hold_against(wave.power_w, wave.step_s, limits)
    result: dict[str, Any] = {
        "schema": "headway.power-check/1", "ok": found.ok,
        "violations": [{"limit": v.limit, "value": v.value, "allowed": v.allowed} for v in found.violations],
        **{name: getattr(found, name) for name in ROWS}, "peak_hz": found.peak_hz, "basis": wave.basis,
        "mean_w": float(wave.power_w.mean()), "length_s": len(wave.power_w) * wave.step_s, "notes": [],
    }  # fmt: skip
    if result["length_s"] < 2 / limits.band_hz[0]:
        lowest = f"{2 / result['length_s']:.2g} Hz"
        result["notes"] = [f"the record is short: nothing of the band below {lowest} is seen, record two periods of it"]
    if out is not None:
        result["page"] = write_page(out, _power_page(wave, limits, str(source or "newest run")))
    emit(result, lambda screen: _check_screen(result, limits, screen), as_json=json)
    return 0 if found.ok else 3


def _power_page(wave: Waveform, limits: GridSpec, name: str) -> str:
    """Return a page of a site's power, its ramps and its ranges over time, the last two beside their limits."""
    power_w, step_s = wave.power_w, wave.step_s
    both = ramps(power_w, step_s), ranges(power_w, step_s, limits.window_s)
    # Of a second or window that reaches past the end nothing is known; one that is longer than the record is all of it.
    ramp, window = (
        np.pad(values, (0, len(power_w) - len(values)), constant_values=np.nan) if len(values) > 1 else values
        for values in both
    )
    ends = "0 s", format_seconds(len(power_w) * step_s)
    charts = [
        Line(f"Power, up to {magnitude(power_w.max())}W", power_w, ends),
        Line(
            f"Change over one second, up to {magnitude(both[0].max())}W; allowed {magnitude(limits.ramp_w_per_s)}W "
            "(dashed)",
            ramp, ends, limits.ramp_w_per_s,
        ),
        Line(
            f"Range within {limits.window_s:g} s, up to {magnitude(both[1].max())}W; allowed "
            f"{magnitude(limits.range_w)}W (dashed)",
            window, ends, limits.range_w,
        ),
    ]  # fmt: skip
    return picture_page(name, "power over time", charts, lead=wave.basis)


def plan(
    source: RunPath | None = None, /, *, site: Annotated[SiteOptions, Parameter(name="*")], use: str = "",
    max_storage_j: float = math.inf, usd_per_kwh: float = 0.08, storage_usd_per_kwh: float = 400.0,
    storage_usd_per_kw: float = 150.0, compute_usd_per_kwh: float = 3.0, on_after_s: float = 0.02,
    out: OutPath | None = None, json: AsJson = False,
) -> int:  # fmt: skip
    """Find the cheapest of floor, ramps, filler and battery with which a specification holds; exit 3 without one.

    Where nothing holds, it says which storage would. `headway run --apply` takes the plan file where a filler is in
    it; `headway power export` prints what an operator sets.

    Example: `headway power plan headway-runs/train-1 --device H100-SXM5-80GB --devices 20000 --spec moderate`

    Args:
      source: A run folder (the newest one by default), or an NPZ file with power_w (watts) and step_s (seconds).
      use: What the plan may use, separated by commas: floor, ramps, filler, battery; what the device can do by default.
      max_storage_j: Largest battery, in joules.
      usd_per_kwh: Dollars per kWh that is added.
      storage_usd_per_kwh: Dollars per kWh of battery.
      storage_usd_per_kw: Dollars per kW of its converters.
      compute_usd_per_kwh: Dollars per kWh that slowed devices do not draw: what their work is worth.
      on_after_s: Seconds of idling after which a filler begins.
      out: The plan file; power-plan.json in the run folder, or in this directory.
    """
    limits = GridSpec.read(site.spec)
    wave, name, count = _waveform(source, site)
    rated_w = PowerModel.of(name).tdp_w * count if name and count else float(wave.power_w.max())
    allowed = tuple(word.strip() for word in use.split(",") if word.strip()) or default_mitigations(name)
    costs = PowerCosts(usd_per_kwh, compute_usd_per_kwh, storage_usd_per_kwh, storage_usd_per_kw)
    found = optimise(
        wave.power_w, wave.step_s, limits, rated_w=rated_w, allowed=allowed, costs=costs, on_after_s=on_after_s,
        max_storage_j=max_storage_j,
    )  # fmt: skip
    path = out or (source if source is not None and source.is_dir() else Path()) / "power-plan.json"
    result = {
        "schema": SCHEMA, "feasible": found.feasible,
        "mitigations": mitigations(found, rated_w=rated_w, on_after_s=on_after_s),
        "cost_usd": _finite(found.cost_usd), "added_energy_fraction": found.added_energy_fraction,
        "step_time_factor": found.step_time_factor, "least_storage_j": _finite(found.least_storage_j),
        "path": str(path), "basis": wave.basis, "devices": count or 1, "device": name or None, "used": list(allowed),
        "notes": [FILLER] if found.kind == "filler" else [],
    }  # fmt: skip
    write_power_plan(result, path, str(source.resolve()) if source is not None and source.is_dir() else None)
    emit(result, lambda screen: _plan_screen(result, screen), as_json=json)
    return 0 if found.feasible else 3


def export(plan: Path, /, *, json: AsJson = False) -> int:
    """Print what an operator sets on the devices of a plan: as root, on Blackwell and later. Nothing is applied.

    Example: `headway power export power-plan.json`

    Args:
      plan: A file that `headway power plan` wrote.
    """
    content = read_power_plan(plan)
    settings, others = operator_settings(content), other_parts(content, plan)
    script = operator_script(settings) if settings else ""
    result = {"schema": "headway.power-export/1", "settings": settings, "script": script, "others": others}
    text = "\n".join([*(f"# {line}" for line in others), *([script] if script else [])])
    return emit(result, lambda _: text, as_json=json)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _waveform(source: Path | None, site: SiteOptions) -> tuple[Waveform, str, int]:
    """Return the waveform of a run or a file, the name of its devices where known, and their number; 0 = unknown."""
    if site.devices < 0:
        raise InputError(f"--devices is {site.devices}; pass the number of devices of the site.")
    if source is not None and not is_run(source):
        return of_file(source), site.device, site.devices
    recorded = run_at(source)
    name = site.device or recorded.facts.device_type
    try:
        model = PowerModel.of(name, idle_w=site.idle_w)
    except UnknownNameError as fault:
        raise InputError(f"{fault} Pass --device: the device type that the recorded ranks represent.") from None
    count = site.devices or len([rank for rank in recorded.parts.numbers if rank >= 0])
    wave = of_run(
        recorded.parts, model, devices=count, step_s=site.step_s, overhead_fraction=site.overhead_fraction,
        clock_offset_ns=recorded.clock_offset_ns,
    )  # fmt: skip
    return wave, name, count


def _check_screen(result: Mapping[str, Any], limits: GridSpec, screen: ScreenOptions) -> str:
    rows = headed("", "site", "allowed", "", align="left right right left")
    broken = {violation["limit"] for violation in result["violations"]}
    for name, words in ROWS.items():
        allowed = getattr(limits, name)
        said = "-" if allowed is None else f"{allowed:,.4g}"
        verdict = "broken" if name in broken else "" if allowed is None else "holds"
        add_row(rows, words, f"{result[name]:,.4g}", said, verdict, style="bold" if name in broken else "")
    low, high = limits.band_hz
    head = Text(f"  {result['mean_w']:,.4g} W on average over {result['length_s']:,.1f} s")
    note = f"Band {low:g} to {high:g} Hz, most at {result['peak_hz']:.3g} Hz. Range within {limits.window_s:g} s."
    notes = [paragraph(text, style="yellow") for text in result["notes"]]
    return draw([head, "", uncut(rows), "", paragraph(note), *notes, paragraph(result["basis"], style="dim")], **screen)


def _plan_screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = grid("left", "left")
    for row in result["mitigations"]:
        add_row(rows, row["kind"], ", ".join(f"{key} {value:,.4g}" for key, value in row.items() if key != "kind"))
    least = result["least_storage_j"]
    storage = "no battery makes it hold" if least is None else f"the least storage that would do is {least:,.4g} J"
    if result["feasible"]:
        added = format_fraction(result["added_energy_fraction"])
        said = (
            f"It holds for {result['cost_usd']:,.0f} USD over 5 years: energy {added} more, "
            f"steps {result['step_time_factor']:.3f} times as long."
        )
    else:
        said = f"Nothing of {', '.join(result['used'])} makes the specification hold; {storage}."
    parts: list[Any] = [uncut(rows), "", paragraph(said)] if result["mitigations"] else [paragraph(said)]
    parts += [paragraph(text, style="yellow") for text in result["notes"]]
    return draw([*parts, paragraph(result["basis"], style="dim"), paragraph(result["path"])], **screen)
