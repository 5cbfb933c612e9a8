"""Replay an order of operations: two pipeline stages, three micro-batches, forward 3 ms and backward 6 ms each."""

import numpy as np

from headway.sim.graph.attribution import critical_path
from headway.sim.graph.dag import Dag, replay

# Operations in the order of each lane (stage): 1F1B with one warm-up forward on stage 0.
ops = ["F0", "F1", "B0", "F2", "B1", "B2", "F0", "B0", "F1", "B1", "F2", "B2"]
lane = [0] * 6 + [1] * 6
ms = [3 if op[0] == "F" else 6 for op in ops]

on = {(op, stage): index for index, (op, stage) in enumerate(zip(ops, lane, strict=True))}
forward = [(on[f"F{m}", 0], on[f"F{m}", 1]) for m in range(3)]  # activations go down
backward = [(on[f"B{m}", 1], on[f"B{m}", 0]) for m in range(3)]  # gradients come back
src, dst = zip(*forward, *backward, strict=True)

dag = Dag.from_edges(len(ops), src=src, dst=dst, lane=lane)
times = replay(dag, np.array(ms) * 1_000_000)
for stage in (0, 1):
    row = [f"{op}@{times.start_ns[i] // 1_000_000}" for i, op in enumerate(ops) if lane[i] == stage]
    print(f"stage {stage}: {' '.join(row)}")
print("makespan", times.makespan_ns // 1_000_000, "ms; (m + p - 1)(f + b) =", (3 + 2 - 1) * (3 + 6))
print("critical path", " ".join(f"{ops[i]}/{lane[i]}" for i in critical_path(dag, np.array(ms) * 1_000_000)))
