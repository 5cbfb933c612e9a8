"""What a simulated or recorded queue amounted to, as figures over a window of its jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.cluster.model import Cluster, Indices, Jobs, Values


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One way in which a queue went; figures are means over the window, times in seconds."""

    jobs: Jobs
    """All jobs."""

    cluster: Cluster
    """The devices."""

    window: tuple[int, int]
    """First and last (excluded) job that the figures are of."""

    start_s: Values
    """[n] When each first ran; NaN = never."""

    finish_s: Values
    """[n] When each was done; NaN = not yet, or not known."""

    isolated_s: Values
    """[n] Time it would have taken with an equal share of the cluster for itself; 0 = not known."""

    alone_s: Values
    """[n] Time it would have taken alone on its fastest type."""

    moves: Indices
    """[n] Times it was moved or resumed."""

    used_s: Values
    """[W] Device-seconds in use, all jobs."""

    decide_s: float
    """Longest decision of the policy, wall time."""

    notes: tuple[str, ...] = ()
    """What the policy could not meet."""

    prices: tuple[tuple[float, tuple[float, ...]], ...] = ()
    """Time of each decision and prices per type after its last admission, for policies that have prices."""

    decisions_s: tuple[float, ...] = ()
    """Wall time of each decision."""

    @property
    def jct_s(self) -> Values:
        """[w] Completion less arrival of the jobs of the window."""
        part = slice(*self.window)
        return np.asarray(self.finish_s[part] - self.jobs.arrival_s[part])

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last completion of the window."""
        return float(np.nanmax(self.finish_s[slice(*self.window)]) - self.jobs.arrival_s[0])

    @property
    def rho(self) -> Values:
        """[w] Finish-time fairness: completion time over that with an equal share of one's own (NaN = not known)."""
        isolated = self.isolated_s[slice(*self.window)]
        return np.asarray(self.jct_s / np.where(isolated > 0, isolated, math.nan))

    @property
    def usd(self) -> float | None:
        """Dollars of the device-hours in use; None where a type has no price."""
        total = float((self.used_s / 3600 * self.cluster.usd_per_h)[self.used_s > 0].sum())
        return total if math.isfinite(total) else None

    def by_scale(self) -> dict[str, dict[str, float]]:
        """Gang size -> jobs, mean completion time, mean slowdown against alone on the fastest type."""
        part = slice(*self.window)
        scale, slowdown = self.jobs.scale[part], self.jct_s / self.alone_s[part]
        return {
            str(size): {
                "num_jobs": int((scale == size).sum()),
                "mean_jct_s": float(self.jct_s[scale == size].mean()),
                "mean_slowdown": float(slowdown[scale == size].mean()),
                "device_hours": float((self.alone_s[part] * scale)[scale == size].sum() / 3600),
            }
            for size in np.unique(scale).tolist()
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures that a policy is judged by."""
        jct_s, rho = self.jct_s, self.rho
        wall_s = float(np.nanmax(self.finish_s) - self.jobs.arrival_s[0])
        return {
            "num_jobs": len(jct_s),
            "mean_jct_s": float(jct_s.mean()),
            "p99_jct_s": float(np.quantile(jct_s, 0.99)),
            "max_jct_s": float(jct_s.max()),
            "makespan_s": self.makespan_s,
            "mean_rho": None if np.isnan(rho).all() else float(np.nanmean(rho)),
            "used_fraction": float(self.used_s.sum() / (self.cluster.count.sum() * wall_s)),
            "usd": self.usd,
            "moves": int(self.moves[slice(*self.window)].sum()),
            "decide_s": self.decide_s,
            "mean_slowdown": float((jct_s / self.alone_s[slice(*self.window)]).mean()),
            "by_scale": self.by_scale(),
            "notes": list(self.notes),
        }
