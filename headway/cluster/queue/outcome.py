"""What a simulated or recorded queue amounted to, as figures over a window of its jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster.model import Cluster, Indices, Jobs, Values
from headway.core.errors import HeadwayError


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

    mixed_s: Values
    """[n] Time it would have taken alone on a mixture of all types, each by its number of devices; 0 = not known."""

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

    sizes: tuple[tuple[float, int], ...] = ()
    """From when on the cluster had how many devices, where that changed."""

    @property
    def jct_s(self) -> Values:
        """[w] Completion less arrival of the jobs of the window."""
        part = slice(*self.window)
        return np.asarray(self.finish_s[part] - self.jobs.arrival_s[part])

    @property
    def done(self) -> NDArray[np.bool_]:
        """[w] Which jobs of the window were done: not those that lost the last devices they could run on."""
        return np.isfinite(self.finish_s[slice(*self.window)])

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last completion of the window."""
        return float(np.nanmax(self.finish_s[slice(*self.window)]) - self.jobs.arrival_s[0])

    @property
    def rho(self) -> Values:
        """[w] Finish-time fairness, T_shared / T_independent (Themis, NSDI 2020, section 3); NaN = not known.

        T_independent is the time on 1 / N of the cluster, N the mean number of jobs in the queue from the arrival of
        the job to its completion: mixed_s x max(N scale / devices, 1).
        """
        window, end_s = slice(*self.window), np.where(np.isfinite(self.finish_s), self.finish_s, math.inf)
        # Jobs in the queue over time, integrated: `area` [2n] up to each arrival and completion.
        at_s = np.concatenate((self.jobs.arrival_s, end_s))
        order = np.argsort(at_s, kind="stable")
        order = order[np.isfinite(at_s[order])]
        number = np.cumsum(np.where(order < len(self.jobs), 1.0, -1.0))
        area = np.concatenate(([0.0], np.cumsum(number[:-1] * np.diff(at_s[order]))))
        spans_s = np.stack((self.jobs.arrival_s, self.finish_s))[:, window]
        mean = np.diff(np.interp(spans_s, at_s[order], area), axis=0)[0] / np.maximum(self.jct_s, 1e-9)
        share = np.maximum(np.maximum(mean, 1.0) * self.jobs.scale[window] / self.cluster.count.sum(), 1.0)
        alone_s = np.where(self.mixed_s[window] > 0, self.mixed_s[window], math.nan)
        return np.asarray(self.jct_s / (alone_s * share))

    @property
    def usd(self) -> float | None:
        """Dollars of the device-hours in use; None where a type has no price."""
        total = float((self.used_s / 3600 * self.cluster.usd_per_h)[self.used_s > 0].sum())
        return total if math.isfinite(total) else None

    def price_rows(self) -> list[dict[str, float]]:
        """Return a row per decision: its time, and the price of each type."""
        names = self.cluster.names
        return [{"time_s": at_s, **dict(zip(names, prices, strict=True))} for at_s, prices in self.prices]

    def over_time(self, end_s: Values) -> tuple[Values, Values]:
        """Return how many jobs are submitted and not done at each moment [b], and how many have not started."""
        arrived, began, ended = (
            np.searchsorted(np.sort(times), end_s, "right")  # NaN is sorted to the end
            for times in (self.jobs.arrival_s, self.start_s, self.finish_s)
        )
        return (arrived - ended).astype(np.float64), (arrived - began).astype(np.float64)

    def by_scale(self) -> dict[str, dict[str, float]]:
        """Gang size -> jobs, mean completion time, mean slowdown against alone on the fastest type."""
        part, done = slice(*self.window), self.done
        scale, alone_s, jct_s = self.jobs.scale[part][done], self.alone_s[part][done], self.jct_s[done]
        slowdown = jct_s / alone_s
        return {
            str(size): {
                "num_jobs": int((scale == size).sum()),
                "mean_jct_s": float(jct_s[scale == size].mean()),
                "mean_slowdown": float(slowdown[scale == size].mean()),
                "device_hours": float((alone_s * scale)[scale == size].sum() / 3600),
            }
            for size in np.unique(scale).tolist()
        }

    def offered_s(self) -> float:
        """Device-seconds that the cluster had, from the first arrival to the last completion."""
        first_s, last_s = float(self.jobs.arrival_s[0]), float(np.nanmax(self.finish_s))
        sizes = self.sizes or ((first_s, int(self.cluster.count.sum())),)
        edges = [first_s, *(min(max(at_s, first_s), last_s) for at_s, _ in sizes[1:]), last_s]
        return sum(count * (end - start) for (_, count), start, end in zip(sizes, edges, edges[1:], strict=False))

    def figures(self) -> dict[str, object]:
        """Return the figures that a policy is judged by, over the jobs that were done.

        Raises `HeadwayError` where none was.
        """
        done = self.done
        if not done.any():
            raise HeadwayError("no job of the window was done on the devices that were left. Leave it more of them.")
        jct_s, rho = self.jct_s[done], self.rho
        return {
            "num_jobs": len(jct_s),
            "mean_jct_s": float(jct_s.mean()),
            "p99_jct_s": float(np.quantile(jct_s, 0.99)),
            "max_jct_s": float(jct_s.max()),
            "makespan_s": self.makespan_s,
            "mean_rho": None if np.isnan(rho).all() else float(np.nanmean(rho)),
            "used_fraction": float(self.used_s.sum() / self.offered_s()),
            "usd": self.usd,
            "moves": int(self.moves[slice(*self.window)].sum()),
            "decide_s": self.decide_s,
            "mean_slowdown": float((jct_s / self.alone_s[slice(*self.window)][done]).mean()),
            "by_scale": self.by_scale(),
            "unfinished": int((~done).sum()),
            "notes": list(self.notes),
        }
