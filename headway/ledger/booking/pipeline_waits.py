"""Which kind of pipeline bubble a wait for another stage is: three sub-lines, told by what the rank computes around it.

    fill_drain          before the first or after the last computation of a pass of the rank
    forward_backward    right before its first backward
    scattered           between other computations

A pass is one call of the schedule's step. The kinds are those of
`headway.sim.pipeline.bubbles`, there of a simulated order. A rank that
recorded no stage, such as one with a pipeline of its own, keeps `bubble.p2p`.
"""

from __future__ import annotations

import numpy as np

from headway.ledger.booking.rows import NAME_ID, RankRows
from headway.ledger.kinds.buckets import SUB_CODE
from headway.trace.events.sweep import Ints
from headway.trace.events.vocabulary import STAGE_PARTS

STAGES = tuple(f"stage.{part}" for part in STAGE_PARTS)
BACKWARDS = [NAME_ID[name] for name in ("stage.backward", "stage.input")]

KINDS = ("fill_drain", "forward_backward", "scattered")
FILL_DRAIN, FORWARD_BACKWARD, SCATTERED = (SUB_CODE[f"bubble.{kind}"] for kind in KINDS)


def bubble_subs(rows: RankRows, wait_ns: Ints) -> Ints:
    """Return [n] the sub-line that a wait which begins at `wait_ns` [n] goes to where it is a bubble."""
    parts = rows.of(*STAGES)
    if not len(parts):
        return np.full(len(wait_ns), SUB_CODE["bubble.p2p"], np.int64)
    name, stage, microbatch = rows.name[parts], rows.column("corr", parts), rows.column("seq", parts)
    opens = (name == NAME_ID["stage.forward"]) & (microbatch == 0) & (stage == stage.min())
    passes = np.cumsum(opens)
    backward = np.isin(name, BACKWARDS)
    before: Ints = np.cumsum(backward) - backward  # backwards before each computation, all passes
    first_of_pass = np.searchsorted(passes, passes)
    first_backward = backward & (before == before[first_of_pass])
    # The computation that follows each wait; a wait inside one, which torch has none of, counts to the next one too.
    after = np.searchsorted(rows.start_ns[parts], wait_ns, side="left")
    outer = (after == 0) | (after == len(parts))
    after = np.clip(after, 1, len(parts) - 1) if len(parts) > 1 else np.zeros(len(wait_ns), np.int64)
    outer |= passes[after] != passes[after - 1]
    return np.where(outer, FILL_DRAIN, np.where(first_backward[after], FORWARD_BACKWARD, SCATTERED))
