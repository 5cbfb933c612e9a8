"""Replay speed against SimPy, on one 1F1B step of 64 stages x 256 micro-batches.

Claim: replaying a built Dag is at least 100x faster than the same step as SimPy processes (CPU time). Both return the
same makespan, or the run fails. `ratio_with_build` counts compiling the Dag as well, as if it were used only once.
"""

import json
import statistics

import numpy as np
import simpy
from _one_f_one_b import Action, cpu_seconds, edges, to_dag
from _one_f_one_b import actions as one_f_one_b

from headway.sim import Dag, replay

STAGES, MICROBATCHES, ROUNDS = 64, 256, 5
CLAIM = 100


def simulate(orders: list[list[Action]], duration_ns: list[list[int]]) -> int:
    """Run the step in SimPy: a process per stage, an event per action that another stage waits for."""
    env = simpy.Environment()
    done = [{action: env.event() for action in order} for order in orders]

    def stage(index: int):
        for action, took in zip(orders[index], duration_ns[index], strict=True):
            peer = index - 1 if action[0] == "F" else index + 1
            if 0 <= peer < len(orders) and not done[peer][action].processed:
                yield done[peer][action]
            yield env.timeout(took)
            done[index][action].succeed()

    for index in range(len(orders)):
        env.process(stage(index))
    env.run()
    return int(env.now)


def main() -> None:
    """Run interleaved rounds and print one JSON line."""
    orders = one_f_one_b(STAGES, MICROBATCHES)
    duration = np.random.default_rng(0).integers(900_000, 1_100_000, (STAGES, 2 * MICROBATCHES))
    flat, nested = duration.reshape(-1), duration.tolist()
    src, dst = edges(orders)
    lane = np.repeat(np.arange(STAGES), 2 * MICROBATCHES)
    dag = to_dag(orders)
    replay(dag, flat)  # compiles the kernels, or loads them from the cache
    rounds = []
    for _ in range(ROUNDS):
        ours = cpu_seconds(lambda: replay(dag, flat).makespan_ns, repeats=50)
        build = cpu_seconds(lambda: Dag.from_edges(flat.size, src, dst, lane=lane), repeats=5)
        theirs = cpu_seconds(lambda: simulate(orders, nested))
        assert ours[1] == theirs[1], f"makespans differ: {ours[1]} and {theirs[1]}"
        rounds.append((ours[0], build[0], theirs[0]))
    ratios = sorted(theirs / ours for ours, _, theirs in rounds)
    result = {
        "bench": "replay_vs_simpy", "ops": flat.size, "baseline": f"simpy {simpy.__version__}",
        "ours_s": statistics.median(ours for ours, _, _ in rounds),
        "baseline_s": statistics.median(theirs for _, _, theirs in rounds),
        "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]],
        "ratio_with_build": statistics.median(theirs / (ours + build) for ours, build, theirs in rounds),
        "claim": f">={CLAIM}", "met": statistics.median(ratios) >= CLAIM,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
