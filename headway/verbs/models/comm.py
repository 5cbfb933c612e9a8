"""`headway comm plan`: the best buckets for a recorded data-parallel job, searched on its replayed step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.comm import EXACT_RANKS
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, granted, write_plan
from headway.plan.optimiser import optimise
from headway.plan.proposal import MIN_SPEEDUP
from headway.report.alignment import render_optimised
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.training.moves import recorded_step
from headway.sim.training.training_step import TrainingStep
from headway.sim.whatif import ResolvedEdits
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import run_at

EQUIVALENT = "result-equivalent"
"""The grant under which gradients are summed in another order."""


def plan(
    run: Path | None = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    ranks: int | None = None,
    allow: str | None = None,
    json: bool = False,
) -> int:
    """Search for the gradient buckets under which RUN's step is shortest, and write a plan that `run --apply` takes.

    Example: `headway comm plan headway-runs/train-1 -o comm-plan.json`

    Parameters
    ----------
    run
        A run folder with deep windows; the newest one by default.
    out
        The plan file; RUN/comm-plan.json by default.
    ranks
        Plan for so many ranks on equal links instead of the recorded ones (simulated).
    allow
        'result-equivalent' admits what more than two ranks need: they add gradients in the order of their buckets.
    json
        Print one JSON object (schema headway.comm-plan/1) instead of text.
    """
    grant = EQUIVALENT if EQUIVALENT in granted(allow) else None
    recorded = run_at(run)
    replay = DdpReplay.from_run(recorded)
    step = recorded_step(replay)
    found = optimise(step if ranks is None else on_ranks(step, ranks))
    made, note = found.plan_file(), f"Simulated: {ranks} ranks on links like the recorded one."
    if ranks is None:
        made, note = confirmed(made, replay, str(recorded.path.resolve()))
    made = replace(made, remedies=tuple(replace(remedy, allow=grant) for remedy in made.remedies))
    if made.remedies and grant is None and found.after.network.num_ranks > EXACT_RANKS:
        note += " More than two ranks add gradients in another order: plan with --allow result-equivalent to apply it."
    path = out or recorded.path / "comm-plan.json"
    worth = bool(made.remedies) and (made.predicted_speedup or 1.0) >= MIN_SPEEDUP
    if worth:
        write_plan(made, path)
    answer: dict[str, Any] = {
        **found.to_json(),
        "schema": "headway.comm-plan/1",
        "ranks": found.after.network.num_ranks,
        "path": str(path) if worth else None,
        "confirmed_speedup": made.predicted_speedup if ranks is None else None,
        "interval": None if made.interval is None else list(made.interval),
        "note": note,
    }
    emit(
        answer,
        lambda screen: render_optimised(
            answer, source=str(recorded.path), plan_path=str(path) if worth else "", **screen
        ),
        as_json=json,
    )
    return 0


def confirmed(made: PlanFile, replay: DdpReplay, baseline: str) -> tuple[PlanFile, str]:
    """Return the plan with what the replay of all threads predicts for it, and that in words.

    The search sees one worker's mean step; the replay sees every thread of every window, but knows one size for all
    buckets only. So what it gives for the best such size is what the plan promises.
    """
    sizes = [remedy.parameters["bucket_mb"] for remedy in made.remedies if remedy.name == "comm.bucket"]
    if not sizes:
        return replace(made, baseline=baseline), ""
    ratio, (low, high) = replay.ratio(ResolvedEdits(bucket_mb=sizes[0]))
    speedup, interval = 1 / ratio, (1 / high, 1 / low)
    remedies = tuple(
        replace(remedy, predicted_speedup=speedup, interval=interval) if remedy.name == "comm.bucket" else remedy
        for remedy in made.remedies
    )
    note = (
        f"The replay of all threads gives {speedup:.2f}x ({interval[0]:.2f} to {interval[1]:.2f}) for buckets of "
        f"{sizes[0]:.3g} MiB: that is what the plan promises."
    )
    return PlanFile(remedies, predicted_speedup=speedup, interval=interval, baseline=baseline), note


def on_ranks(step: TrainingStep, ranks: int) -> TrainingStep:
    """Return the step on more or fewer ranks, each hop as before. Raises `InputError` below 2."""
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; gradients are summed over at least 2. Pass 2 or more.")
    return replace(step, network=replace(step.network, num_ranks=ranks))
