"""The bubble of a recorded pipeline: of which kind on which rank, and what it comes from.

Kinds are booked (`headway.ledger.booking.pipeline_waits`), reasons are replayed, one
edit after another, so that they and the work add up to the recorded step:

    transfers   recorded                     - without transfers
    unequal     without transfers            - with stages of the same mean time too
    order       with such stages too         - without any bubble too
    work        what is left
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.ledger.booking.pipeline_waits import KINDS
from headway.ledger.kinds.buckets import SUB_CODE
from headway.ledger.runs.attempts import book_run
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import RecordedPipeline
from headway.sim.whatif.edits import ResolvedEdits, scenario_of
from headway.trace.recording.runs import Run

REASONS = ("transfers", "unequal", "order", "work")
"""What a step is made of."""


@dataclass(frozen=True, slots=True)
class RecordedBubbles:
    """The bubble of a run's pipeline, per step."""

    step_s: float
    """Measured mean step."""

    kinds_s: dict[str, tuple[float, ...]]
    """Kind -> [stages] what the rank of each stage waits in a step, the mean over all steps but the first."""

    reasons_s: dict[str, float]
    """Entry of `REASONS` -> its seconds; they add up to `step_s`."""

    orders: tuple[str, ...]
    """[stages] What the rank of each stage computes in a pass, in order."""

    @classmethod
    def of(cls, run: Run, program: Program | None = None) -> RecordedBubbles:
        """Find it; raises `InputError` where no pipeline was recorded, `BarMissedError` where the replay misses it."""
        program = program or Program.from_run(run)
        known = RecordedPipeline.of(program.recording)
        book = book_run([run.parts], run.facts).attempts[-1]
        if book.num_steps < 2:
            raise InputError("the run has one step; record at least two, because a pipeline fills before the first.")
        kinds: dict[str, tuple[float, ...]] = {}
        for kind in KINDS:
            rows = [
                book.sheets[program.recording.lanes[at].rank].ns[SUB_CODE[f"bubble.{kind}"]] for at in known.rank_index
            ]
            # Column 0 is before the first step, the last one behind all.
            kinds[kind] = tuple(float(np.mean(row[2:-1])) / NS_PER_S for row in rows)
        orders = tuple(" ".join(map(str, actions)) for actions in known.orders)
        return cls(program.measured_s, kinds, reasons_of(program), orders)


def reasons_of(program: Program) -> dict[str, float]:
    """Return `RecordedBubbles.reasons_s` of a run that can be replayed; raises as `RecordedBubbles.of` does."""
    costs = RecordedPipeline.of(program.recording).costs
    program.predict(["comm=instant"], interval=False)  # refuses where the replay misses the run
    forward, backward = costs.forward_ns.astype(float), (costs.input_ns + costs.weight_ns).astype(float)
    ways = (forward.mean() / np.maximum(forward, 1), backward.mean() / np.maximum(backward, 1))
    equal = tuple((stage, *pair) for stage, pair in enumerate(zip(*(way.tolist() for way in ways), strict=True)))
    instant = scenario_of(["comm=instant"])
    steps = [ResolvedEdits(), instant, replace(instant, stages=equal), replace(instant, stages=equal, bubble=0.0)]
    replayed = [float(program.steps_ns(one).mean()) for one in steps]
    times = [program.measured_s * value / replayed[0] for value in replayed]
    found = [before - after for before, after in itertools.pairwise(times)]
    return dict(zip(REASONS, [*found, times[-1]], strict=True))
