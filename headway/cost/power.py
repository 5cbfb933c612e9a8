"""Power of a device while it works: idle power, and a weight per kind of work up to the thermal design power.

    P(t) = idle + (TDP - idle) x min(1, sum of the weights of what runs at t),   then a first-order filter of 30 ms

    kind      compute  -----|       |------|        weight 1.0
              comm          |-------|               weight 0.35
    power     TDP      =====\\       /======
              idle+.35       \\_____/                the filter rounds the corners

Weights are estimates until they are calibrated by samples of a meter; powers are watts, times nanoseconds.

>>> model = PowerModel(idle_w=100.0, tdp_w=500.0, weights={"compute": 1.0}, tau_s=0.0)
>>> model.synth([0, 30_000_000], [10_000_000, 40_000_000], ["compute", "compute"]).tolist()
[500.0, 100.0, 100.0, 500.0]
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.cost.specs import shipped

WEIGHTS: dict[str, float] = {"compute": 1.0, "comm": 0.35, "memcpy": 0.25, "idle": 0.0}
"""Kind of work -> share of (TDP - idle) that it draws: estimates, to be replaced by measured ones."""

IDLE_FRACTION = 0.1
"""Idle power as a fraction of the TDP where it was not measured: an H100 SXM of 700 W idles at 60 to 80 W."""

FAINT = 1e-12
"""What is left of a step when the filter's memory of it is cut off."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one device by what it does."""

    idle_w: float
    """Power while nothing runs."""

    tdp_w: float
    """Thermal design power: the most that it draws, averaged over milliseconds."""

    weights: Mapping[Any, float] = field(default_factory=lambda: WEIGHTS)
    """Kind of work -> share of (TDP - idle), 0..1; a sequence is by number of kind."""

    tau_s: float = 0.03
    """Time constant of the first-order filter: voltage regulators and the chip's own averaging; 0 = none."""

    def __post_init__(self) -> None:
        """Check the fields; raises `InputError`."""
        if not isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", dict(enumerate(self.weights)))
        if not (math.isfinite(self.tdp_w) and 0 <= self.idle_w <= self.tdp_w):
            raise InputError(f"idle power {self.idle_w} W and TDP {self.tdp_w} W; pass 0 <= idle <= TDP.")
        bad = {kind: weight for kind, weight in self.weights.items() if not 0 <= weight <= 1}
        if bad or not (math.isfinite(self.tau_s) and self.tau_s >= 0):
            raise InputError(f"weights {bad or 'are fine'}, tau_s {self.tau_s}; pass weights in 0..1, tau_s >= 0.")

    @classmethod
    def of(cls, device: str, *, idle_w: float | None = None) -> PowerModel:
        """Return the model of a device in the shipped tables; raises `UnknownNameError` where it has no row."""
        tdp_w = shipped().device(device).tdp_w
        return cls(IDLE_FRACTION * tdp_w if idle_w is None else idle_w, tdp_w)

    def synth(
        self, start_ns: ArrayLike, end_ns: ArrayLike, kind: Sequence[Hashable], *, step_s: float = 0.01,
        window_ns: tuple[int, int] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """[t] Power over time, of events [n] that may overlap; each sample is the mean over its `step_s` seconds.

        From the first start to the last end, or over `window_ns`. The device was in the state of the first sample
        before it. Raises `InputError` on unknown kinds, events that end before they start, or an empty time.
        """
        start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
        names = kind.tolist() if isinstance(kind, np.ndarray) else list(kind)
        unknown = sorted({str(name) for name in names if name not in self.weights})
        if unknown:
            raise InputError(f"work of kind {unknown[0]} has no weight. Use {', '.join(map(str, self.weights))}.")
        if not len(start) == len(end) == len(names) or bool((end < start).any()):
            raise InputError("starts, ends and kinds must be of one length, and no end before its start.")
        low, high = window_ns or (int(start.min(initial=0)), int(end.max(initial=0)))
        step_ns = step_s * NS_PER_S
        num_samples = math.ceil((high - low) / step_ns - 1e-9) if step_s > 0 else 0
        if num_samples < 1:
            raise InputError(f"{(high - low) / NS_PER_S} s make no sample of {step_s} s. Pass events, and step_s > 0.")
        weight = np.array([self.weights[name] for name in names], np.float64)
        share = _mean_load(start, end, weight, low, step_ns, num_samples)
        return np.asarray(self.idle_w + (self.tdp_w - self.idle_w) * self._filtered(share, step_s), np.float32)

    def _filtered(self, load: NDArray[np.float64], step_s: float) -> NDArray[np.float64]:
        """Pass a load [t] through the first-order filter, as a sum over the past that fades with tau."""
        if self.tau_s == 0:
            return load
        fade = math.exp(-step_s / self.tau_s)
        taps = min(len(load), math.ceil(math.log(FAINT) / math.log(fade)) + 1)
        impulse = (1 - fade) * fade ** np.arange(taps)
        before = np.full(taps - 1, load[0])
        return np.asarray(np.convolve(np.concatenate([before, load]), impulse / impulse.sum(), "valid"), np.float64)


def _mean_load(
    start: NDArray[np.int64], end: NDArray[np.int64], weight: NDArray[np.float64], low: int, step_ns: float, size: int
) -> NDArray[np.float64]:  # fmt: skip
    """[size] Mean over each sample of the summed weights, at most 1.

    The sum of weights is constant between bounds, so its integral is linear between them: the integral at the edges of
    the samples is read off by interpolation, and the mean is its difference.
    """
    times = np.concatenate([start, end]).astype(np.float64) - low
    order = np.argsort(times, kind="stable")
    at, change = times[order], np.concatenate([weight, -weight])[order]
    level = np.clip(np.cumsum(change), 0.0, 1.0)  # the device cannot draw more than its TDP
    integral = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(at))]) if len(at) else np.zeros(0)
    edges = np.arange(size + 1) * step_ns
    if not len(at):
        return np.zeros(size)
    return np.asarray(np.diff(np.interp(edges, at, integral)) / step_ns, np.float64)
