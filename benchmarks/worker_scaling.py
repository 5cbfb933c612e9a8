"""Scaling a fleet of workers: does the number follow demand and the rate of workers, and settle?

Claim: over three steps of demand, of what a worker makes, of both, or with nobody reading in between, in at most 5
periods the number of workers is within one of ceil(demand / rate) (1 while nobody reads), it changes at most twice
after that, and readers wait at most 2 % of the time in a whole run, and at most 2 % in each step after its first 5
periods. A simulation (`sim.graph.process`): rates of 11.6, 8.0 and 36.9 thousand examples/s per worker and demands of
24, 9 and 55 workers' worth are DPP's RM1 to RM3 (Zhao et al., ISCA 2022, from memory), in batches that take a worker
half a second; batches vary (log-normal). Peer: the number that suffices. `--full` for more seeds; `--seed N` begins
elsewhere.
"""

import itertools
import json
import math
import statistics
import sys
from typing import NamedTuple

from headway.core.rng import stream
from headway.data.fleet.autoscale import Autoscaler
from tests.made.fleet_model import History, simulate

MODELS = {"RM1": (11_600.0, 24), "RM2": (8_000.0, 9), "RM3": (36_900.0, 55)}
"""Model -> examples/s that one worker makes, and workers that one training job needs."""
CHANGES = ("demand", "rate", "both", "idle")
"""What a run's steps change: demand, the rate of workers, or both; "idle": both, and nobody reads in the second."""
NOISES = (0.05, 0.3, 0.5)
"""Deviations of the logarithm of a batch's time: up to 53 % of its mean."""
BATCH_S = 0.5
"""Time of one batch in a worker; the batch size follows from the rate."""
PERIOD_S, STEP_PERIODS = 10.0, 60
MOST_PERIODS, MOST_LATER, MOST_WAITED = 5, 2, 0.02


def steps_of(change: str, seed: int, model: str) -> list[tuple[float, float]]:
    """Return three steps: the fraction of the published demand, and the factor on the published rate of a worker."""
    rng = stream(seed, change, model)
    # From below half to all of the published demand, never twice the same.
    demands = [float(fraction) for fraction in rng.permutation([0.45, 0.7, 1.0])]
    rates = [float(factor) for factor in rng.permutation([1.0, 1.4, 2.0])]
    if change == "idle":
        demands[1] = 0.0
    if change == "rate":
        demands = [1.0] * 3
    return list(zip(demands, [1.0] * 3 if change == "demand" else rates, strict=True))


def played(change: str, model: str, noise: float, seed: int) -> tuple[History, list[int]]:
    """Play three random steps; returns what happened and the workers that each step needs."""
    full, per_worker = MODELS[model][1], 1 / BATCH_S
    steps = steps_of(change, seed, model)
    needed = [max(math.ceil(fraction * full / factor - 1e-9), 1) for fraction, factor in steps]
    history = simulate(
        [(fraction * full * per_worker, STEP_PERIODS * PERIOD_S) for fraction, _ in steps],
        rate_per_s=[(factor * per_worker, STEP_PERIODS * PERIOD_S) for _, factor in steps],
        scaler=Autoscaler(least=1, most=4 * full), seed=seed, noise=noise, period_s=PERIOD_S,
        first_workers=max(needed[0] // 2, 1),
    )  # fmt: skip
    return history, needed


class Judged(NamedTuple):
    """One run."""

    periods_to_settle: int
    """Most periods until a step was within one of what it needs."""
    later_changes: int
    """Most changes of a step after that."""
    waited_fraction: float
    """Of the whole run."""
    steady_waited_fraction: float
    """The most of a step, its first `MOST_PERIODS` periods left out."""

    @property
    def met(self) -> bool:
        """Whether the run keeps all bars."""
        waited = max(self.waited_fraction, self.steady_waited_fraction)
        return self.periods_to_settle <= MOST_PERIODS and self.later_changes <= MOST_LATER and waited <= MOST_WAITED


def judged(history: History, needed: list[int]) -> Judged:
    """Return the figures of one run."""
    slowest = later = 0
    steady = 0.0
    for step, suffices in enumerate(needed):
        periods = slice(step * STEP_PERIODS, (step + 1) * STEP_PERIODS)
        part = history.num_workers[periods]
        near = [k for k, workers in enumerate(part) if abs(workers - suffices) <= 1]
        settled = near[0] if near and abs(part[-1] - suffices) <= 1 else STEP_PERIODS
        slowest = max(slowest, settled + 1)
        later = max(later, sum(one != other for one, other in itertools.pairwise(part[settled:])))
        waited_s = history.waited_per_period_s[periods][MOST_PERIODS:]
        steady = max(steady, statistics.mean(waited_s) / PERIOD_S)
    return Judged(slowest, later, history.waited_s / history.total_s, steady)


def main() -> int:
    """Play all changes, models, noises and seeds; print one JSON line."""
    first = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 1000
    seeds = range(first, first + (10 if "--full" in sys.argv else 1))
    runs = list(itertools.product(CHANGES, MODELS, NOISES, seeds))
    found = {run: judged(*played(*run)) for run in runs}
    missed = [run for run, result in found.items() if not result.met]
    worst = {name: round(max(getattr(result, name) for result in found.values()), 4) for name in Judged._fields}
    print(json.dumps({
        "bench": "worker_scaling", "runs": len(runs), "simulated": True, **worst,
        "waited_fraction_median": round(statistics.median(result.waited_fraction for result in found.values()), 4),
        "missed": missed, "peer": "ceil(demand / rate) workers",
        "claim": "<= 5 periods, <= 2 changes, <= 0.02 waited, in steady state too", "met": not missed,
    }))  # fmt: skip
    return 0 if not missed else 3


if __name__ == "__main__":
    sys.exit(main())
