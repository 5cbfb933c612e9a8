"""Scaling a fleet of workers: does the number follow demand, and settle, at the published rates?

Claim: over three steps of demand, in at most 5 periods the number of workers is within one of ceil(demand / rate), it
changes at most twice after that, and readers wait at most 2 % of the time. A simulation (`headway.sim.process`): rates
of 11.6, 8.0 and 36.9 thousand examples/s per worker and demands of 24, 9 and 55 workers' worth are DPP's RM1 to RM3
(Zhao et al., ISCA 2022, from memory), in batches that take a worker half a second; batches vary (log-normal). Peer:
the number that suffices. `--full` for more seeds; `--seed N` begins elsewhere.
"""

import itertools
import json
import math
import statistics
import sys

from headway.core.rng import stream
from headway.data.fleet.autoscale import Autoscaler
from headway.data.fleet.model import History, simulate

MODELS = {"RM1": (11_600.0, 24), "RM2": (8_000.0, 9), "RM3": (36_900.0, 55)}
"""Model -> examples/s that one worker makes, and workers that one training job needs."""
NOISES = (0.05, 0.3, 0.5)
"""Deviations of the logarithm of a batch's time: up to 53 % of its mean."""
BATCH_S = 0.5
"""Time of one batch in a worker; the batch size follows from the rate."""
PERIOD_S, STEP_PERIODS = 10.0, 60
MOST_PERIODS, MOST_LATER, MOST_WAITED = 5, 2, 0.02


def played(model: str, noise: float, seed: int) -> tuple[History, list[int]]:
    """Play three random steps of demand; returns what happened and the workers that each step needs."""
    rate, full = MODELS[model]
    batch = rate * BATCH_S
    # From below half to all of the published demand, never twice the same.
    fractions = stream(seed, "demand", model).permutation([0.45, 0.7, 1.0])
    demand = [(float(fraction) * full * rate / batch, STEP_PERIODS * PERIOD_S) for fraction in fractions]
    per_worker = rate / batch
    needed = [math.ceil(per_s / per_worker - 1e-9) for per_s, _ in demand]
    scaler = Autoscaler(least=1, most=2 * full)
    history = simulate(
        demand, rate_per_s=per_worker, scaler=scaler, seed=seed, noise=noise, period_s=PERIOD_S,
        first_workers=max(needed[0] // 2, 1),
    )  # fmt: skip
    return history, needed


def judged(history: History, needed: list[int]) -> tuple[int, int]:
    """Return the most periods until a step was within one of what it needs, and the most changes after that."""
    slowest = later = 0
    for step, suffices in enumerate(needed):
        part = history.num_workers[step * STEP_PERIODS : (step + 1) * STEP_PERIODS]
        near = [k for k, workers in enumerate(part) if abs(workers - suffices) <= 1]
        settled = near[0] if near and abs(part[-1] - suffices) <= 1 else STEP_PERIODS
        rest = part[settled:]
        slowest = max(slowest, settled + 1)
        later = max(later, sum(one != other for one, other in itertools.pairwise(rest)))
    return slowest, later


def main() -> int:
    """Play all models, noises and seeds; print one JSON line."""
    first = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 1000
    seeds = range(first, first + (20 if "--full" in sys.argv else 2))
    runs = [(model, noise, seed) for model in MODELS for noise in NOISES for seed in seeds]
    found = [(run, *judged(*(result := played(*run))), result[0]) for run in runs]
    waited = [history.waited_s / history.total_s for *_, history in found]
    missed = [
        run
        for (run, slowest, later, _), share in zip(found, waited, strict=True)
        if slowest > MOST_PERIODS or later > MOST_LATER or share > MOST_WAITED
    ]
    print(json.dumps({
        "bench": "worker_scaling", "runs": len(runs), "simulated": True, "periods_to_settle": max(f[1] for f in found),
        "later_changes": max(f[2] for f in found), "waited_fraction": round(max(waited), 4),
        "waited_fraction_median": round(statistics.median(waited), 4), "missed": missed,
        "peer": "ceil(demand / rate) workers", "claim": "<= 5 periods, <= 2 changes, <= 0.02 waited", "met": not missed,
    }))  # fmt: skip
    return 0 if not missed else 3


if __name__ == "__main__":
    sys.exit(main())
