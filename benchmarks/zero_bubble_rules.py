"""The searched zero-bubble order against the eight orders of the paper's rules, and the time of a large search.

Claim: on 100 drawn cases (60 of equal stages, 40 of unequal ones, p 4 to 8, m 2p to 4p, caps p to 2p) the span is never
longer than that of the shortest of the eight, and p = 32 with m = 128 is searched in at most 20 s of CPU. Peer: the
rules (`rule_orders`) in the same process, under the same caps and simulated times.
"""

import json
import sys
import time
from collections.abc import Iterator

import numpy as np

from headway.core.rng import stream
from headway.sim.pipeline.actions import Orders
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.simulate import StageCosts, simulate
from headway.sim.pipeline.split_backward import rule_orders, zero_bubble

CASES, LARGE = 100, PipelineShape(32, 128, 1, 100, 110, 90, cap=32)


def cases() -> Iterator[tuple[PipelineShape, StageCosts]]:
    """Draw them: six of ten have equal stages."""
    rng = stream(0, "zero_bubble_rules")
    for case in range(CASES):
        p = int(rng.integers(4, 9))
        m, cap, comm_ns = (int(rng.integers(*ends)) for ends in ((2 * p, 4 * p + 1), (p, 2 * p + 1), (0, 11)))
        times = [np.resize(rng.integers(50, 151, 1 if case % 10 < 6 else p), p) for _ in range(3)]
        yield PipelineShape(p, m, 1, *(int(each.mean()) for each in times), comm_ns, cap), StageCosts(*times, comm_ns)


def span_ns(orders: Orders, costs: StageCosts, cap: float) -> int:
    """Return the longest time from a rank's first computation to its last; the cap is checked."""
    program = lower(orders)
    assert peak_activations(program).max() <= cap
    times = simulate(program, costs)
    return int((times.last_ns - times.first_ns).max())


def main() -> int:
    """Search all cases and print one JSON line; 3 where the claim is missed."""
    worse = better = 0
    ours_s = rules_s = 0.0
    for shape, costs in cases():
        assert shape.cap is not None
        times = [each.tolist() for each in (costs.forward_ns, costs.input_ns, costs.weight_ns)]
        begin = time.process_time()
        rules = rule_orders(*times, num_microbatches=shape.num_microbatches, cap=int(shape.cap), comm_ns=shape.comm_ns)
        least = min(span_ns(orders, costs, shape.cap) for orders in rules)
        middle = time.process_time()
        ours = span_ns(zero_bubble(shape, costs), costs, shape.cap)
        rules_s, ours_s = rules_s + middle - begin, ours_s + time.process_time() - middle
        worse, better = worse + (ours > least), better + (ours < least)
    begin = time.process_time()
    zero_bubble(LARGE)
    large_s = time.process_time() - begin
    result = {
        "bench": "zero_bubble_rules", "cases": CASES, "worse": worse, "better": better, "cpu_s": round(ours_s, 1),
        "rules_cpu_s": round(rules_s, 2), "large_cpu_s": round(large_s, 1),
        "claim": "no case worse; p 32, m 128 in <= 20 s of CPU", "met": worse == 0 and large_s <= 20,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if result["met"] else 3


if __name__ == "__main__":
    sys.exit(main())
