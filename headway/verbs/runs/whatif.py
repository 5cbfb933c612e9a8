"""`headway whatif`: predict the step time after edits, by replaying the recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.core.errors import InputError
from headway.report.terminal import render_whatif
from headway.sim.recorded.program import Program
from headway.sim.whatif import EDITS
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import run_at


def whatif(
    run: Path | None = None,
    /,
    *,
    set_: Annotated[list[str], Parameter(name="--set", negative=())] | None = None,
    json: bool = False,
) -> int:
    """Predict the step time of RUN after edits; several edits are replayed together.

    Example: `headway whatif headway-runs/train-1 --set input=instant --set workers=4`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    set_
        EDIT, as target=value. A factor on durations, none, instant or 0.5x: straggler, input (input.fetch, input.prep,
        input.transfer), comm, checkpoint, host (host.gc, host.logging, script), op:GLOB. A speed, 2x: bandwidth,
        storage (or shared, parallel), accelerator. The loader: workers=4, threads=true, prefetch=4,
        persistent=true, cache_fraction=0.5, cache_cold=1, cache_shards=2, cores=8, other=0.5. The
        rest: bucket_mb=25 (or default), compress=topk:0.01, logging=buffered, gc=frozen:100. A pipeline: schedule=1f1b,
        bubble=none, stage:NUMBER=0.5x.
    json
        Print one JSON object instead of text.
    """
    if not set_:
        raise InputError(f"no edit was given. Pass --set target=value with one of: {', '.join(sorted(EDITS))}.")
    found = Program.from_run(run_at(run)).predict(set_)
    emit(found.to_json(), lambda screen: render_whatif(found, **screen), as_json=json)
    return 0
