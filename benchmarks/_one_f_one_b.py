"""One 1F1B pipeline step as plain actions and as a Dag, for the replay benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headway.sim import Dag

Action = tuple[str, int]
"""("F" or "B", micro-batch)."""


def actions(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the order of each stage: warm-up forwards, then one forward and one backward in turn."""
    orders = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage, num_microbatches)
        order = [("F", microbatch) for microbatch in range(warm_up)]
        for microbatch in range(num_microbatches):
            order.append(("B", microbatch))
            if warm_up + microbatch < num_microbatches:
                order.append(("F", warm_up + microbatch))
        orders.append(order)
    return orders


def edges(orders: list[list[Action]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (src, dst): forwards go up the stages, backwards down. Action `i` of stage `s` is op `s * 2m + i`."""
    width = len(orders[0])
    index = {(kind, s, mb): s * width + i for s, order in enumerate(orders) for i, (kind, mb) in enumerate(order)}
    pairs = [
        pair
        for s in range(len(orders) - 1)
        for m in range(width // 2)
        for pair in ((index["F", s, m], index["F", s + 1, m]), (index["B", s + 1, m], index["B", s, m]))
    ]
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    return src, dst


def to_dag(orders: list[list[Action]]) -> Dag:
    """Build the Dag: one lane per stage, in the order of its actions."""
    width = len(orders[0])
    return Dag.from_edges(len(orders) * width, *edges(orders), lane=np.repeat(np.arange(len(orders)), width))


def cpu_seconds(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Return (CPU seconds per call, the answer): other processes on the machine do not count."""
    begin = time.process_time()
    for _ in range(repeats):
        answer = call()
    return (time.process_time() - begin) / repeats, answer
