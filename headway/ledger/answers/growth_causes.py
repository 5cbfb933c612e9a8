"""Causes that grow while a run goes on: steps that take longer and longer, and memory that fills.

Both are told from medians of blocks of the run (`headway.ledger.growth`). Neither has a line of its own in the ledger:
time that steps grew by is in the buckets already. Times are ns.
"""

from __future__ import annotations

import numpy as np

from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import Cause
from headway.ledger.growth import BLOCKS, LEAST_STEPS, rising, slowed

SETTLED = 0.4
"""Share of a run in which memory is filled for good: libraries, the state of optimizers, first batches."""

LEAST_BYTES, LEAST_SHARE = 64 << 20, 0.05
"""Memory grows where it grew by so much over the rest, and by this share of what it was."""


def steps_grow(ledger: Ledger) -> list[Cause]:
    """Steps that take longer and longer: something that is kept, searched or summed grows with them."""
    wall = np.asarray(ledger.step_wall_ns, np.float64)
    calm = np.ones(len(wall), bool) if ledger.undisturbed is None else np.array(ledger.undisturbed)
    calm[:1] = False  # it compiles, and fills caches
    if (ends := slowed(wall[calm])) is None:
        return []
    buckets = np.asarray(ledger.step_ns, np.float64)[:, calm]
    eighth = max(1, buckets.shape[1] // BLOCKS)
    more = np.median(buckets[:, -eighth:], axis=1) - np.median(buckets[:, :eighth], axis=1)
    bucket = BUCKETS[int(more.argmax())]
    # Code that takes longer and longer also waits longer for a core, where others want it too.
    waited_ns = ledger.sub_ns.get("host.cpu_wait", 0)
    by_host = ledger.sub_ns.get("host.script", 0) > (ledger.ledger_ns["host"] - waited_ns) / 2
    if bucket == "host" and not by_host:
        return []  # other processes, or collections: causes of their own
    lost_s = float(np.maximum(wall - ends[0], 0).sum()) / NS_PER_S * ledger.devices
    first, last = (format_seconds(end / NS_PER_S) for end in ends)
    share = format_fraction(more.max() / max(more[more > 0].sum(), 1.0), 0)
    where = ledger.script_lines[0].words if bucket == "host" and ledger.script_lines else PHASES.get(bucket, bucket)
    evidence = f"a step took {first} in the first eighth of the run and {last} in the last one, rising all the way; "
    evidence += f"{share} of the growth is {PHASES.get(bucket, bucket)}"
    fix = (
        "what is kept from step to step there grows with the run: bound it, sum it as it comes, or reset it each epoch"
    )
    return [Cause("steps.grow", where, lost_s, evidence, fix)]


PHASES = {
    "useful": "forward, backward and update",
    "host": "the script's own code between steps",
    "input": "waiting for input",
    "checkpoint": "saving",
    "eval": "evaluation",
    "comm": "communication",
    "straggler": "waiting for other ranks",
}
"""Bucket -> what of a step it is, in words."""


def memory_grows(ledger: Ledger) -> list[Cause]:
    """Memory of the host that fills: by the ranks, or by their loader workers."""
    series, steps = ledger.facts.host_series, int(ledger.steps)
    if series is None or not series.rank_bytes or steps < LEAST_STEPS or len(series.end_s) < 2 * BLOCKS:
        return []
    settled = int(SETTLED * len(series.end_s))
    last = len(series.end_s) - 2  # at the end processes go
    causes = []
    for who, size in (("the training process", series.rank_bytes), ("loader workers", series.worker_bytes)):
        behind = [value for value in size[settled:last] if value]  # before they start, workers have none
        of_workers = who == "loader workers"  # read so rarely that a few readings must do; they load no libraries late
        ends = rising(behind, 2, 1.0) if of_workers else rising(behind, BLOCKS // 2)
        if len(behind) < BLOCKS or ends is None:
            continue
        grown = ends[1] - ends[0]
        if grown < max(LEAST_BYTES, LEAST_SHARE * ends[0]):
            continue
        # The medians of the first and last quarter lie three quarters of the time apart.
        seconds = 0.75 * (series.end_s[last - 1] - series.end_s[settled])
        step_s = float(np.mean(ledger.step_wall_ns)) / NS_PER_S
        per_step = grown / max(seconds, 1e-9) * step_s
        evidence = f"{who} grew from {format_bytes(ends[0])} to {format_bytes(ends[1])} behind the start"
        evidence += f": {format_bytes(1000 * per_step)} per 1,000 steps"
        available = ledger.facts.memory_available_bytes
        evidence += f"; full after about {available / per_step:,.0f} steps" if available else ""
        causes.append(Cause("memory.grow", who, 0.0, evidence, FIXES[who]))
    return causes


FIXES = {
    "the training process": "something is kept from step to step: sums and lists of losses and outputs keep their "
    "graphs unless they are detached (loss.item(), .detach())",
    "loader workers": "each worker copies the pages of objects that it reads (reference counts are written): keep "
    "examples in one array or tensor in place of lists of objects",
}
"""Who grows -> what to do."""
