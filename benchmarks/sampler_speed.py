"""Joader's dependent sampling at full size: 16 jobs of 1.28 M items each.

Claim: at most 40 us of CPU per step (one item for each of the 16 jobs), the periodic rebuild included; a job joins in
at most 1 s of CPU. Three overlaps: all jobs on one set, on 1.6 M and on 2.56 M items. Peer: the coupling on plain sets,
as the paper states it, on a thousandth of the items: both must give every job one item per step.
"""

import json
import statistics
import sys
import time

import numpy as np
from _command import ROOT

sys.path.insert(0, str(ROOT))

from _one_f_one_b import cpu_seconds

from headway.data.orders.job_order import BUILD_STEPS
from headway.data.orders.random_orders import Dependent
from tests.coupling import chain

JOBS, ITEMS, STEPS, ROUNDS = 16, 1_280_000, 2000, 3
STEP_US, JOIN_S = 40.0, 1.0


def steps(order: Dependent) -> None:
    """Take some steps; every job must receive an item in each."""
    for _ in range(STEPS):
        given = order.step()
        assert sum(len(jobs) for jobs in given.values()) == JOBS, "a job was left out"


def measured(universe: int) -> dict[str, float]:
    """Return what the sampler takes when 16 random subsets come from `universe` items."""
    rng = np.random.default_rng(universe)
    order, joins = Dependent({}, 1, size=universe), []
    for number in range(JOBS):
        items = rng.permutation(universe)[:ITEMS]
        # The work of joining is done at the next step: both count.
        joins.append(cpu_seconds(lambda items=items, number=number: (order.add(f"j{number}", items), order.step()))[0])
    rounds = [cpu_seconds(lambda: steps(order))[0] / STEPS for _ in range(ROUNDS)]
    # A mask and its end build anew, as every so many steps do.
    order.step(["j0"])
    rebuild_s = cpu_seconds(order.step)[0]
    groups = statistics.mean(len(order.step()) for _ in range(100))
    amortised = min(rounds) + rebuild_s / BUILD_STEPS
    return {
        "step_us": round(1e6 * amortised, 1), "range_us": [round(1e6 * s, 1) for s in (min(rounds), max(rounds))],
        "join_s": round(max(joins), 3), "rebuild_s": round(rebuild_s, 3), "groups_per_step": round(groups, 1),
    }  # fmt: skip


def plain_us(universe: int) -> float:
    """Return the CPU of one step of the chain on plain sets, a thousandth of the size."""
    rng = np.random.default_rng(1)
    sets = {f"j{i}": set(rng.permutation(universe // 1000)[: ITEMS // 1000].tolist()) for i in range(JOBS)}

    def step() -> None:
        given = chain(sets, lambda a, b: rng.random() < a / b, lambda items: list(items)[int(rng.integers(len(items)))])
        assert sum(len(jobs) for _, jobs in given) == JOBS, "a job was left out"

    return round(1e6 * cpu_seconds(step, 10)[0], 1)


def main() -> int:
    """Measure and print one JSON line."""
    begin = time.process_time()
    found = {str(universe): measured(universe) for universe in (ITEMS, 1_600_000, 2_560_000)}
    met = all(row["step_us"] <= STEP_US and row["join_s"] <= JOIN_S for row in found.values())
    print(json.dumps({
        "bench": "sampler_speed", "jobs": JOBS, "items_per_job": ITEMS, "universe": found,
        "ours_us": max(row["step_us"] for row in found.values()),
        "baseline": "the chain on plain sets, 1280 items per job", "baseline_us": plain_us(1_600_000),
        "cpu_s": round(time.process_time() - begin, 1), "claim": f"<= {STEP_US} us a step, <= {JOIN_S} s a join",
        "met": bool(met),
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
