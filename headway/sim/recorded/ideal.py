"""The timeline of a recorded run as it would have been without its losses: a trace to look at beside the real one.

The same replay as a prediction's, written out as rows: per rank the segments
of the training thread, end to end, in int64 ns from the recorded start.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headway.sim.graph.dag import greedy
from headway.sim.recorded.lane import LABEL, LABELS
from headway.sim.recorded.program import Program
from headway.sim.whatif import Edit
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, SPANS

LOSSLESS: tuple[str, ...] = ("input=instant", "straggler=none", "checkpoint=none", "host=none")
"""Edits that leave compute and communication as they are and take everything else away."""


def replayed_trace(program: Program, edits: Iterable[Edit | str] = LOSSLESS) -> Trace:
    """Return the run's training threads as they run under `edits`; segments that vanish have no row."""
    unrolled = program.unrolled(edits)
    end_ns = greedy(unrolled.dag, unrolled.duration_ns, capacity=unrolled.capacity).end_ns
    lanes = program.recording.lanes
    origin_ns = min(int(lane.start_ns[0]) for lane in lanes)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("rank", "step", "name", "start_ns", "duration_ns")}
    for lane, last in zip(lanes, unrolled.last_op, strict=True):
        # Segments tile the thread: each begins where the latest of those before it ended. One that ends no later has
        # vanished.
        end = np.maximum.accumulate(end_ns[last])
        start = np.concatenate([[0], end[:-1]])
        kept = end > start
        columns["rank"].append(np.full(int(kept.sum()), lane.rank))
        columns["step"].append(lane.step[kept])
        columns["name"].append(lane.label[kept])
        columns["start_ns"].append(origin_ns + start[kept])
        columns["duration_ns"].append((end - start)[kept])
    kinds = np.array([KIND[SPANS[label].kind if label in SPANS else "COMPUTE"] for label in LABELS])
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    rows["name"] = np.where(rows["name"] == LABEL["host.collect"], LABEL["host.gc"], rows["name"])
    return Trace.from_columns(
        {**rows, "kind": kinds[rows["name"]]}, names=LABELS, meta={"source": "replay", "device_type": "cpu"}
    )
