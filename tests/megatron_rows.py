"""The ten rows of Megatron-LM's weak scaling (SC 2021, table 1), and two constants fitted to two of them.

`python -m tests.megatron_rows` prints every pair of rows: the fit, and the errors of the other eight.
"""

import itertools
from dataclasses import replace

import numpy as np

from headway.cost.transformer import Transformer
from headway.parallel.planning.grid import Efficiency, GridChoice, GridCluster, closed_step_s

ROWS = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]  # fmt: skip
"""Parameters in 1e9, heads, hidden, layers, t, p, devices, batch, TFLOP/s per device; s = 2048, V = 51200."""


def case(row: int) -> tuple[Transformer, GridChoice, GridCluster]:
    """Return a row's model, its layout with microbatches of 1 and as many stages per rank as divide, and cluster."""
    _, heads, hidden, layers, t, p, devices, batch, _ = ROWS[row]
    d = devices // (t * p)
    m = batch // d
    v = max([v for v in (1, 2, 3, 4) if p > 1 and layers % (p * v) == 0 and (v == 1 or m % p == 0)], default=1)
    model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200)
    return model, GridChoice(t, p, d, v, 1, m, "full"), GridCluster.of("A100-SXM4-80GB", devices)


def flops(row: int) -> float:
    """Return the FLOPs of a step by the paper's equation, which counts full recomputation."""
    _, _, h, layers, _, _, _, batch, _ = ROWS[row]
    return 96 * batch * 2048 * layers * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))


def predicted(row: int, efficiency: Efficiency) -> float:
    """Return TFLOP/s per device."""
    model, choice, cluster = case(row)
    step_s = closed_step_s(model, choice, replace(cluster, efficiency=efficiency))
    return flops(row) / (cluster.num_devices * step_s) / 1e12


def fitted(first: int, second: int) -> Efficiency:
    """Return the constants under which two rows are exact: a step is linear in both."""
    rows, wanted = [], []
    for row in (first, second):
        model, choice, cluster = case(row)
        at = [
            closed_step_s(model, choice, replace(cluster, efficiency=Efficiency(constant, per_hidden)))
            for constant, per_hidden in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        ]
        rows.append([at[1] - at[0], at[2] - at[0]])
        wanted.append(flops(row) / (cluster.num_devices * ROWS[row][8] * 1e12) - at[0])
    return Efficiency(*np.linalg.solve(rows, wanted).tolist())


def errors(first: int, second: int) -> list[float]:
    """Return the relative errors of the rows that were not fitted."""
    constants = fitted(first, second)
    return [predicted(row, constants) / ROWS[row][8] - 1 for row in range(10) if row not in (first, second)]


if __name__ == "__main__":
    for first, second in itertools.combinations(range(10), 2):
        found, constants = np.abs(errors(first, second)), fitted(first, second)
        words = f"constant {constants.constant:6.3f} per_hidden {constants.per_hidden:7.0f}"
        print(f"rows {first + 1:2} {second + 1:2}: {words}  max {found.max():.3f} mean {found.mean():.3f}")
