"""The pace of a recorded run: what a step takes in the middle of it, one-time costs of its loaders spread over all.

Remedies are held against it while they run (`data.runtime.following.withdrawal`): by the same formula, over 50 steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headway.core.units import NS_PER_S
from headway.trace.events.trace import Trace
from headway.trace.recording.pauses import without_pauses

CHUNK = 10
"""Steps whose mean is one value; their median passes over rare long steps."""


def step_seconds(ranks: Iterable[Trace]) -> float | None:
    """Return the pace of the first of `ranks`, a trace each, that has enough steps; None when none has. Seconds."""
    return next((pace for trace in ranks if (pace := _pace(without_pauses(trace))) is not None), None)


def _pace(trace: Trace) -> float | None:
    """Return the median of the mean times of `CHUNK` optimizer steps, None where there are too few.

    Time in `iter(loader)` is left out of the median and spread over all steps: it comes seldom, and counts all the
    same.
    """
    events, steps = trace.events, trace.named("optimizer.step")
    ends = np.sort((events["start_ns"] + events["duration_ns"])[steps])
    made = trace.named("input.iter")
    begun, taken = events["start_ns"][made], events["duration_ns"][made]
    bounds = ends[::CHUNK]
    if len(bounds) < 2:
        return None
    inside = (begun >= bounds[0]) & (begun < bounds[-1])
    making = np.zeros(len(bounds) - 1)
    np.add.at(making, np.searchsorted(bounds, begun[inside], side="right") - 1, taken[inside])
    step_ns = np.median(np.diff(bounds) - making) + making.mean()
    return max(float(step_ns) / CHUNK, 1.0) / NS_PER_S
