"""A day of power at 10 ms through smoothing, battery and check, against plain Python.

Claim: 24 h at 10 ms (8.64 million samples) take at most 5 s of CPU once compiled; smoothing and battery are at least
20x as fast as the same rules in plain Python on a tenth of it, with the same samples. Simulated: no device is used.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.power.grid_spec import GridSpec, check
from headway.power.smoothing import smooth, store
from tests.oracles import smoothed, stored

STEP_S, SAMPLES, ROUNDS = 0.01, 8_640_000, 3
FLOOR = {"floor_w": 450.0, "up_w_per_s": 2000.0, "down_w_per_s": 2000.0, "hold_s": 1.0}
BATTERY = {"capacity_j": 2000.0, "power_limit_w": 400.0, "tau_s": 5.0, "efficiency": 0.95}


def day() -> np.ndarray:
    """Return the power of one device: steps of 4 s that end in a collective, a checkpoint every ten minutes, noise."""
    time_s = np.arange(SAMPLES) * STEP_S
    power = np.where(time_s % 4 < 3.2, 700.0, 300.0)
    power[time_s % 600 > 590] = 90.0
    return np.maximum(power + np.random.default_rng(0).normal(0, 10, SAMPLES), 0.0)


def shaped(power: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smooth, then store."""
    output, _, _ = smooth(power, STEP_S, **FLOOR)
    return output, store(output, STEP_S, **BATTERY)[0]


def main() -> int:
    """Time both sides in turns and print one JSON line; 3 when the claim does not hold."""
    power, spec = day(), GridSpec(1e3, 1e3, 60.0, (0.1, 20.0))
    shaped(power[:1000])
    part, whole_s, ours_s, plain_s = power[: SAMPLES // 10], [], [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        check(shaped(power)[1], STEP_S, spec)
        whole_s.append(time.process_time() - began)
        began = time.process_time()
        output, grid = shaped(part)
        ours_s.append(time.process_time() - began)
        began = time.process_time()
        terms = (FLOOR["floor_w"], FLOOR["up_w_per_s"], FLOOR["down_w_per_s"], FLOOR["hold_s"])
        slow = smoothed(part.tolist(), STEP_S, *terms)
        terms = (BATTERY["capacity_j"], BATTERY["power_limit_w"], BATTERY["tau_s"], BATTERY["efficiency"])
        slow_grid, _ = stored(slow, STEP_S, *terms)
        plain_s.append(time.process_time() - began)
        assert output.tolist() == slow, "smoothing differs"
        assert grid.tolist() == slow_grid, "battery differs"
    ratio = sorted(b / a for a, b in zip(ours_s, plain_s, strict=True))
    ok = max(whole_s) <= 5.0 and ratio[0] >= 20
    print(json.dumps({
        "bench": "power_speed", "samples": SAMPLES, "cpu_s": round(max(whole_s), 2), "ours_s": round(min(ours_s), 4),
        "baseline": "plain Python, a tenth", "baseline_s": round(min(plain_s), 3), "ratio": round(ratio[1], 1),
        "ratio_range": [round(ratio[0], 1), round(ratio[-1], 1)], "claim": "<=5 s, >=20", "ok": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    raise SystemExit(main())
