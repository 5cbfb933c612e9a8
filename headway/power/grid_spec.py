"""What a utility allows a site, and whether a waveform of power keeps to it.

Four limits: how fast power may change (over a second), how far it may swing within a window, and how much of it may
oscillate in a band of frequencies, as an amplitude (root mean square) and as a share of all oscillation.

>>> spec = GridSpec(ramp_w_per_s=50.0, range_w=200.0, window_s=10.0, band_hz=(0.1, 5.0))
>>> found = check(500 + 30 * np.sin(2 * np.pi * 0.5 * np.arange(0, 60, 0.01)), 0.01, spec)
>>> found.ok, round(found.band_rms_w, 1), round(found.peak_hz, 2), found.violations[0].limit
(False, 21.2, 0.5, 'ramp_w_per_s')
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import MOST, read_toml
from headway.core.tables import pick, suggestion

Watts = NDArray[np.float64]

PERIODS = 64
"""Periods of the band's lowest frequency in one segment of the spectrum: lines are told apart to 3 % of it."""

PROFILES = Path(__file__).with_name("specs.toml")
"""Profiles of our own."""


@dataclass(frozen=True, slots=True)
class GridSpec:
    """Limits of a site's power."""

    ramp_w_per_s: float
    """Largest change over one second."""

    range_w: float
    """Largest difference between two moments of one window."""

    window_s: float
    """Length of that window."""

    band_hz: tuple[float, float]
    """Band of frequencies that the grid is sensitive to: lowest and highest."""

    band_rms_w: float | None = None
    """Largest root mean square of what oscillates in the band; None = no limit."""

    band_share: float | None = None
    """Largest share of the band in the energy of all oscillation, 0..1; None = no limit."""

    def __post_init__(self) -> None:
        """Check the limits; raises `InputError`."""
        object.__setattr__(self, "band_hz", tuple(float(f) for f in self.band_hz))
        for name in ("ramp_w_per_s", "range_w", "window_s", "band_rms_w", "band_share"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}; pass a number above 0.")
        if len(self.band_hz) != 2 or not 0 < self.band_hz[0] < self.band_hz[1] < math.inf:
            raise InputError(f"band_hz is {list(self.band_hz)}; pass [lowest, highest] with 0 < lowest < highest.")

    @classmethod
    def read(cls, name: str | Path) -> GridSpec:
        """Read a TOML file of the same keys, or a profile of `specs.toml` by its name; raises `InputError`."""
        path = Path(name)
        profiles = read_toml(PROFILES)
        if not path.is_file():
            if path.suffix == ".toml":
                raise InputError(f"{path} does not exist. Pass a TOML file, or a profile: {', '.join(profiles)}.")
            table, where = pick(profiles, str(name), "profile"), str(name)
        else:
            table, where = read_toml(path), str(path)
        known = [f.name for f in fields(cls)]
        given: dict[str, Any] = {key: value for key, value in table.items() if key != "source"}
        unknown = [key for key in given if key not in known]
        missing = [key for key in known[:4] if key not in given]
        if unknown or missing:
            wrong = f"unknown key {unknown[0]!r}" if unknown else f"no key {missing[0]!r}"
            raise FormatError(f"{where} has {wrong}. {suggestion(known, (unknown or missing)[0])}")
        try:
            return cls(**given)
        except InputError:
            raise
        except (TypeError, ValueError) as fault:
            raise FormatError(f"{where}: {fault}. Write numbers, and band_hz as a list of two.") from None


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that does not hold."""

    limit: str
    """Name of the limit in `GridSpec`."""

    value: float
    """What the waveform does."""

    allowed: float
    """What the specification allows."""


@dataclass(frozen=True, slots=True)
class GridCompliance:
    """A waveform held against a specification."""

    ramp_w_per_s: float
    """Largest |P(t + 1 s) - P(t)| / 1 s."""

    range_w: float
    """Largest max - min within a window."""

    band_rms_w: float
    """Root mean square of what oscillates in the band."""

    band_share: float
    """Energy of the band / energy of all oscillation; 0 where nothing oscillates."""

    peak_hz: float
    """Frequency of the band with the most energy; 0 where nothing oscillates."""

    violations: tuple[Violation, ...]
    """Limits that do not hold, in the order of the specification."""

    @property
    def ok(self) -> bool:
        """Say whether every limit holds."""
        return not self.violations


def check(power_w: ArrayLike, step_s: float, spec: GridSpec) -> GridCompliance:
    """Hold a waveform [t], one sample every `step_s` seconds, against a specification.

    Raises `InputError` on negative or non-finite power, on a step too coarse for the band (Nyquist), and on a record
    shorter than the ramp's second. One of less than two periods of the band's lowest frequency shows less of the band.
    """
    power = checked_power(power_w, step_s)
    low_hz, high_hz = spec.band_hz
    if step_s > 1 / (2 * high_hz):
        raise InputError(
            f"a step of {step_s} s is too coarse for {high_hz:g} Hz: at most {1 / (2 * high_hz):g} s shows it. "
            "Sample more often, or lower the band."
        )
    if (len(power) - 1) * step_s < 1.0 - 1e-9:
        raise InputError(
            f"the record is {len(power) * step_s:g} s long; a ramp takes more than a second. Record longer."
        )
    frequency_hz, energy = spectrum(power, step_s, segment_s=PERIODS / low_hz)
    # Steps of the frequency axis are wide: a line near the band's edge counts by the bin of its centre.
    inside = (frequency_hz >= low_hz) & (frequency_hz <= high_hz)
    total, of_band = float(energy.sum()), float(energy[inside].sum())
    share = of_band / total if total > 0 else 0.0
    values = {
        "ramp_w_per_s": float(ramps(power, step_s).max()),
        "range_w": float(ranges(power, step_s, spec.window_s).max()),
        "band_rms_w": math.sqrt(of_band), "band_share": share,
    }  # fmt: skip
    violations = tuple(
        Violation(name, value, getattr(spec, name))
        for name, value in values.items() if getattr(spec, name) is not None and value > getattr(spec, name)
    )  # fmt: skip
    return GridCompliance(**values, peak_hz=_peak(frequency_hz, np.where(inside, energy, 0.0)), violations=violations)


def checked_power(power_w: ArrayLike, step_s: float) -> Watts:
    """Return a waveform as float64 [t]; raises `InputError` where it is none."""
    power = np.ascontiguousarray(power_w, np.float64)
    if not (math.isfinite(step_s) and step_s > 0):
        raise InputError(f"step_s is {step_s}; pass seconds above 0.")
    if power.ndim != 1 or not len(power):
        raise InputError(f"the waveform has shape {power.shape}; pass one power per step.")
    least = float(power.min())
    if not least >= 0 or not float(power.max()) <= MOST:
        index = int(np.argmax(~(power >= 0) | ~(power <= MOST)))
        raise InputError(f"power is {power[index]} W at sample {index}; pass finite powers >= 0, at most {MOST:g}.")
    return power


def ramps(power: Watts, step_s: float) -> Watts:
    """Return the change over the second from each sample on, W/s [t]; between samples power is linear.

    Of a record shorter than that, the largest one within it [1].
    """
    whole, part = divmod(1.0 / step_s, 1.0)
    shift = int(whole)
    if part > 1 - 1e-9:
        shift, part = shift + 1, 0.0
    last = len(power) - shift - (part > 1e-9)
    after = power[shift : shift + last]
    if part > 1e-9:
        after = (1 - part) * after + part * power[shift + 1 : shift + 1 + last]
    return np.asarray(np.abs(after - power[:last]) if last > 0 else np.ptp(power, keepdims=True))


def ranges(power: Watts, step_s: float, window_s: float) -> Watts:
    """Return the largest difference within the window from each sample on, W [t]; [1] of a record that is shorter.

    Blocks as long as the window, with the running extremes of each from both ends: a window reaches over the end of one
    block and the start of the next, and its extreme is the larger of the two running ones (van Herk, 1992).

        block   [ . . a . | . b . . ]      window from a to b: max(from the right at a, from the left at b)
    """
    size = round(window_s / step_s) + 1
    if size >= len(power):
        return np.asarray(np.ptp(power, keepdims=True))
    padded = np.concatenate([power, np.full(-len(power) % size, power[-1])]).reshape(-1, size)
    found = []
    for extreme in (np.maximum, np.minimum):
        left = extreme.accumulate(padded, axis=1).ravel()
        right = extreme.accumulate(padded[:, ::-1], axis=1)[:, ::-1].ravel()
        found.append(extreme(right[: len(power) - size + 1], left[size - 1 : len(power)]))
    return np.asarray(found[0] - found[1])


def spectrum(power: Watts, step_s: float, *, segment_s: float) -> tuple[Watts, Watts]:
    """Return frequencies [f] above 0 and the mean energy of oscillation at each, W^2: they sum to the variance.

    Welch's mean over segments that overlap by at least half, each less its mean and under Hann's window. The last
    segment ends with the record.
    """
    size = min(len(power), max(16, round(segment_s / step_s)))
    count = 1 if size == len(power) else math.ceil((len(power) - size) / (size / 2)) + 1
    starts = np.linspace(0, len(power) - size, count).round().astype(np.int64)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    energy = np.zeros(size // 2 + 1)
    for start in starts.tolist():
        part = power[start : start + size]
        part = (part - np.average(part, weights=window)) * window
        energy += np.abs(np.fft.rfft(part)) ** 2
    energy *= 2 / (count * size * float((window**2).sum()))
    if size % 2 == 0:
        energy[-1] /= 2
    return np.asarray(np.fft.rfftfreq(size, step_s)[1:], np.float64), energy[1:]


def _peak(frequency_hz: Watts, energy: Watts) -> float:
    """Return the frequency of the most energy; between bins by a parabola through the logarithms."""
    best = int(energy.argmax())
    if not energy[best] > 0:
        return 0.0
    bin_hz = frequency_hz[0]
    near = energy[max(best - 1, 0) : best + 2]
    if len(near) < 3 or not near.min() > 0 or best == 0:
        return float(frequency_hz[best])
    left, middle, right = np.log(near)
    curve = left - 2 * middle + right  # 0 where three bins are equally high
    return float(frequency_hz[best] + bin_hz * 0.5 * (left - right) / (curve or math.inf))
