"""Is the chosen order the best one? Every legal order of a pipeline, measured.

Claim: the order that the planner chooses from one profile takes at most 3 % more CPU than the fastest of all legal
orders. Five operators behind the decoder, ten legal orders; each image runs through all of them in turn, its least CPU
time of several rounds counts. All orders must give equal pixels.
"""

import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from headway.data import Pipeline, SyntheticJpeg
from headway.data.pipeline.chain import Chain
from headway.data.pipeline.optimize import op_costs
from tests.oracles import legal_orders


def main() -> int:
    """Measure; print one JSON line."""
    rounds, images = (9, 48) if "--full" in sys.argv else (5, 24)
    source = SyntheticJpeg(images, 500, 375, seed=5)
    pipeline = Pipeline(source).decode().to_float().jitter().greyscale().crop(224, 224).flip()
    for index in range(images):
        source.read(index)  # made on first use, which is no cost of reading
    profile = pipeline.profile(2 * images)
    best = pipeline.plan(profile=profile)
    by_id = {stage.id: stage for stage in pipeline.stages}
    orders = list(legal_orders(pipeline.ops()))
    chains = {order: Chain(source, [by_id[op] for op in order if op]) for order in orders}
    spent = dict.fromkeys(orders, 0.0)
    for index in range(images):
        least = dict.fromkeys(orders, float("inf"))
        pixels = {order: chain.run(index, index).tobytes() for order, chain in chains.items()}
        assert len(set(pixels.values())) == 1, f"image {index} depends on the order"
        for _ in range(rounds):
            for order, chain in chains.items():
                start = time.thread_time()
                chain.run(index, index)
                least[order] = min(least[order], time.thread_time() - start)
        for order in orders:
            spent[order] += least[order] / images
    fastest = min(orders, key=lambda order: spent[order])
    ratio = spent[best.order] / spent[fastest]
    predicted = {order: sum(op_costs(profile, order).values()) for order in orders}
    errors = sorted(abs(predicted[order] / spent[order] - 1) for order in orders)
    print(json.dumps({
        "bench": "plan_choice", "orders": len(orders), "chosen": [pipeline.ops()[op].name for op in best.order],
        "chosen_ms": round(1000 * spent[best.order], 3), "best_ms": round(1000 * spent[fastest], 3),
        "worst_ms": round(1000 * max(spent.values()), 3), "written_ms": round(1000 * spent[orders[0]], 3),
        "best": [pipeline.ops()[op].name for op in fastest], "ratio": round(ratio, 4),
        "prediction_error_median": round(errors[len(errors) // 2], 3),
        "baseline": "every legal order, measured", "claim": "<=1.03", "met": ratio <= 1.03,
    }))  # fmt: skip
    return 0 if ratio <= 1.03 else 3


if __name__ == "__main__":
    sys.exit(main())
