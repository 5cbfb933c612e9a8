"""Whether replicas that are averaged now and then would pay: the recorded run, without its collectives, and averages.

A step of 'fedavg:N' takes what it takes without communication; every N-th one is followed by an average of all weights,
which nothing hides:

    compute | compute | ... | compute | average of M bytes |        step = step without collectives + average / N

The bytes and the rate of the link are those of the deep windows. Without windows the average takes at least what was
exposed of a step's collectives, and at most a whole step. The edit `comm=Fx`, for combinations with other remedies, is
the factor on collectives under which the replayed run has that step. What it does to learning is not predicted: the
setting follows what models lose (`headway.comm.skew.controller`), and the tightest of those that are fast is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.comm.remedies import LADDERS
from headway.core.errors import BarMissedError, InputError
from headway.core.search import threshold
from headway.core.units import NS_PER_S, format_bytes, format_seconds
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import DdpModel

NAME, GRANT = "comm.loose", "lossy"

NEAR = 0.05
"""Of rungs predicted within this of a step without any communication, the tightest is proposed."""

PREFERRED = 0.9
"""Compressed gradients that win this share of it are preferred: they keep replicas equal."""

RUNGS = LADDERS["fedavg"][1:4]
"""Settings that are proposed: 5, where SkewScout begins, to 20, which its authors have for FedAvg."""


def propose_loose(
    program: Program, setup: Setup, models: Sequence[DdpModel], compressed: Proposal | Refusal
) -> Proposal | Refusal:
    """Return the tightest rung of FedAvg that is fast, or why none is proposed; `compressed` is what codecs win."""
    if GRANT not in setup.limits.allow:
        return Refusal(
            NAME, "comm", "replicas that drift apart change results: grant --allow lossy to have it predicted"
        )
    if not models:
        return Refusal(NAME, "comm", "the run noted no model in DistributedDataParallel: record it with deep windows")
    try:
        instant = program.predict(["comm=instant"])
    except (InputError, BarMissedError) as cause:
        return Refusal(NAME, "comm", f"a step without communication is not known: {cause}")
    model_bytes = sum(sum(model.parameter_bytes) for model in models)
    average_s, longest_s, note = _average_s(program, model_bytes, instant.base_step_s - instant.step_s)
    rungs = {steps: instant.step_s + average_s / steps for steps in RUNGS}
    steps = next(
        steps for steps, step_s in rungs.items() if step_s <= instant.step_s * (1 + NEAR) or steps == RUNGS[-1]
    )
    speedup = instant.base_step_s / rungs[steps]
    if isinstance(compressed, Proposal) and compressed.predicted_speedup >= PREFERRED * speedup:
        reason = f"comm.compress wins {compressed.predicted_speedup:.2f}x of {speedup:.2f}x, and keeps replicas equal"
        return Refusal(NAME, "comm", reason)
    if speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"averages every {steps:g} steps would win {speedup:.3f}x")
    slowest_s = instant.base_step_s / instant.interval[0] + longest_s / steps
    return Proposal(
        name=NAME,
        room="comm",
        edits=(f"comm={_factor(program, rungs[steps]):.4g}x",),
        predicted_speedup=speedup,
        interval=(min(speedup, instant.base_step_s / slowest_s), max(speedup, instant.interval[1])),
        applies=True,
        parameters={"rule": f"fedavg:{steps:g}", "control": True},
        cost="a copy of the model while it is averaged or travels",
        risk="replicas drift apart between averages: compare accuracy with that of a synchronous run, above all where "
        "ranks have unlike data, and swap BatchNorm (headway.comm.swap_norm)",
        allow=GRANT,
        conflicts=("comm.compress", "comm.bucket"),
        reason=f"An average every {steps:g} steps sends {format_bytes(model_bytes / steps)} per step in place of "
        f"{format_bytes(model_bytes)}: a step of {format_seconds(rungs[steps])} in place of "
        f"{format_seconds(instant.base_step_s)}. {note}",
    )


def _average_s(program: Program, model_bytes: int, exposed_s: float) -> tuple[float, float, str]:
    """Return the seconds of one average of all weights, the most that it can take, and what that stands on."""
    try:
        deep = program.windows()
        if deep.busy:
            raise InputError(f"{deep.busy}.")
        link = deep.links[0]
        seconds = (link.latency_ns + link.duration_ns(model_bytes)) / NS_PER_S
        return seconds, seconds, deep.words()
    except (InputError, BarMissedError) as cause:
        longest_s = max(program.measured_s, exposed_s)
        return exposed_s, longest_s, f"An average is taken for what all-reduces leave exposed: {cause}"


def _factor(program: Program, step_s: float) -> float:
    """Return the factor on collectives, 0..1, under which the replayed step takes `step_s`."""

    def is_slower(factor: float) -> bool:
        return program.predict([f"comm={factor}x"], interval=False).step_s >= step_s

    factor = threshold(is_slower, 0.0, 1.0, tolerance=1e-3)
    return 1.0 if factor is None else factor
