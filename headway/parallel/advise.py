"""What the parallel room would change: the order in which the stages of a pipeline compute.

Every order of `SCHEDULES` that fits one stage per rank is replayed on the
recorded run, the searched one under the recorded times, with no more
activations than the run held on any rank.

>>> in_order((Action(B, 0, 0), Action(B, 0, 1))), in_order((Action(W, 0, 1), Action(W, 0, 0)))
(True, False)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, format_fraction
from headway.ledger.booking.waits import KINDS
from headway.parallel.fill.gaps import lent
from headway.parallel.fill.queue import FILLED, RecordedGaps, booked_waits
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.pipeline.actions import Action, B, I, PipelineProgram, W
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import MOST_STARVED, RecordedPipeline
from headway.sim.whatif import ResolvedEdits, scenario_of
from headway.trace.recording.runs import Run

NAME = "parallel.schedule"

CANDIDATES = ("1f1b", "gpipe", "zero_bubble")
"""Orders with one stage per rank, the plainest first: of equal ones it is taken."""

GRAPH_CANDIDATES = ("graph_1f1b", "gpipe", "zero_bubble")
"""The same where stages form a graph, which only headway's own runner has."""

RUNNER = "PipelineRunner"
"""Class of headway's own pipelines, which run without a flush too."""

REPLACED = ("ScheduleGPipe", "Schedule1F1B", RUNNER)
"""Classes whose order can be replaced."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield the order that wins most, or why there is none; nothing where the run is no pipeline.

    On headway's own runner it is `two_buffer` where that is granted, or no other order wins.
    """
    del ledger
    if not any(work is not None for work in program.recording.stages):
        return
    row, stream = _schedule(program), _without_flush(program)
    preferred = isinstance(row, Refusal) or LOSSY in setup.limits.allow
    yield stream if stream is not None and preferred else row
    yield from _filled(program)


FILL, LEAST_LENT = "parallel.fill", 0.05
"""The proposal of chunks of another job in the gaps, and the share of a step that ranks have to lend for it."""


def _filled(program: Program) -> Iterator[Proposal]:
    """Say what the large gaps would lend to another job, which the script starts: the plan has no job to run there."""
    if program.run is None or _classes(program) != {RUNNER}:
        return
    try:
        recorded = RecordedGaps.of(program.run, program)
    except InputError:
        return
    lent_s = sum(gap.duration_ns for gap in lent(recorded.gaps)) / NS_PER_S
    share = lent_s / (program.measured_s * len(program.recording.lanes))
    if share < LEAST_LENT:
        return
    large_s, path = sum(gap.duration_ns for gap in recorded.gaps) / NS_PER_S, program.run.path
    gains = (
        f"this job 1.00x; another one up to {lent_s:.2f} device seconds of each step, {format_fraction(share)} of the "
        f"devices' time ({format_fraction(lent_s / large_s)} of the large gaps)"
    )
    yield Proposal(
        FILL, "parallel", (), 1.0, (1.0, 1.0), applies=False,
        cost=f"{gains}; an idle process beside each rank. headway parallel fill --jobs JOBS.json --run {path}",
        risk="a chunk that takes longer than its gap makes one step late, then fewer are run",
        reason=f"{gains}: what is lent ends inside the gaps. headway parallel fill --jobs JOBS.json --run {path} says "
        f'what fits. In the script: headway.parallel.fill_gaps(runner, "JOBS.json", run="{path}")',
    )  # fmt: skip


LOSSY = "lossy"


def _without_flush(program: Program) -> Proposal | None:
    """Return the schedule with two versions of the weights; None where it cannot run or wins nothing."""
    if _classes(program) != {RUNNER} or float(program.recording.waiting.mean()) > MOST_STARVED:
        return None
    try:
        recorded = RecordedPipeline.of(program.recording)
        predicted = program.predict(["schedule=two_buffer"])
    except InputError:
        return None
    if predicted.speedup < MIN_SPEEDUP:
        return None
    activations = _listed(peak_activations(lower(recorded.orders, recorded.graph)).tolist())
    return Proposal(
        name=NAME,
        room="parallel",
        edits=("schedule=two_buffer",),
        predicted_speedup=predicted.speedup,
        interval=predicted.interval,
        applies=True,
        parameters={"schedule": "two_buffer"},
        cost=f"the weights twice; activations of p - rank microbatches on ranks 0, 1, ..; the run held {activations}",
        risk="each step's gradient is of the weights one step before",
        allow=LOSSY,
        reason=f"without a flush between steps the pipeline neither fills nor drains. {predicted.note}".strip(),
    )


def _schedule(program: Program) -> Proposal | Refusal:
    try:
        known = RecordedPipeline.of(program.recording)
        bound = program.predict(["bubble=none"], interval=False).speedup
        candidates = CANDIDATES if known.graph is None else GRAPH_CANDIDATES
        others = [name for name in candidates if known.reordered(name) != known.orders]
        tried = {name: program.predict([f"schedule={name}"], interval=False).speedup for name in others}
    except InputError as cause:
        return Refusal(NAME, "parallel", str(cause))
    starved = float(program.recording.waiting.mean())
    if starved > MOST_STARVED:
        share = format_fraction(starved, 0)
        reason = f"ranks had no core for {share} of their compute: with less bubble they would wait more for cores"
        return Refusal(NAME, "parallel", reason)
    name = max(others, key=lambda one: (round(tried[one], 2), -candidates.index(one)))
    plain = max((one for one in others if one != "zero_bubble"), key=lambda one: round(tried[one], 2), default=name)
    if name == "zero_bubble" and tried[plain] >= MIN_SPEEDUP:
        # The two parts of a backward were not measured apart: split, it has to win more at the worst share.
        worst, _ = program.predict(["schedule=zero_bubble"]).interval
        name = name if worst >= MIN_SPEEDUP * tried[plain] else plain
    if tried[name] < MIN_SPEEDUP:
        reason = f"of {', '.join(others)}, {name} is predicted best: {tried[name]:.3f}x"
        if bound >= MIN_SPEEDUP:
            lost = format_fraction(1 - 1 / bound)
            reason += f"; the bubble costs {lost} of a step: take more microbatches, or stages of equal time"
        return Refusal(NAME, "parallel", reason)
    found, orders = program.predict([f"schedule={name}"]), known.reordered(name)
    rows = PipelineProgram.from_orders(orders, known.graph).to_torch_csv().splitlines()
    other = _made_by(program)
    if other:
        return Refusal(NAME, "parallel", f"{name} is predicted {found.speedup:.3f}x, but the schedule is a {other}")
    before, after = (peak_activations(lower(one, known.graph)).tolist() for one in (known.orders, orders))
    keeps = all(_gradient_order(a) == _gradient_order(b) for a, b in zip(known.orders, orders, strict=True))
    splits = any(action.op == I for actions in orders for action in actions)
    return Proposal(
        name=NAME,
        room="parallel",
        edits=(f"schedule={name}",),
        predicted_speedup=found.speedup,
        interval=found.interval,
        applies=True,
        parameters={"order": rows, **({} if known.graph is None else {"preds": list(map(list, known.graph.preds))})},
        cost=f"activations of at most {_listed(after)} microbatches on ranks 0, 1, ..; the run held {_listed(before)}",
        risk=("the runner" if _classes(program) == {RUNNER} else "a private interface of torch")
        + " executes the order"
        + ("; backwards run in two parts" if splits else ""),
        allow=None if keeps else "result-equivalent",
        reason=f"{name} has less bubble; without any a step would be {bound:.2f}x as fast. {found.note}".strip(),
    )


def _classes(program: Program) -> set[str]:
    """Return the classes of the recorded schedules; none where they are not known."""
    facts = program.run.parts.ranks if program.run is not None else {}
    return {row["pipeline"]["schedule"] for row in facts.values() if "pipeline" in row}


def _made_by(program: Program) -> str:
    """Return the class of the recorded schedule where it cannot be replaced; '' where it can, or is not known."""
    return next((name for name in sorted(_classes(program)) if name not in REPLACED), "")


def _gradient_order(actions: Sequence[Action]) -> list[int]:
    """Return the microbatches of a rank in the order in which it adds up their weight gradients."""
    return [action.microbatch for action in actions if action.op in (B, W)]


def in_order(actions: Sequence[Action], ops: tuple[int, ...] = (B, W)) -> bool:
    """Say whether a rank takes the microbatches in their order in these operations; those that add up gradients."""
    found = [action.microbatch for action in actions if action.op in ops]
    return found == sorted(found)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


# The bubble of a recorded pipeline: of which kind on which rank, and what it comes from.
#
# Kinds are booked (`headway.ledger.booking.waits`), reasons are replayed, one
# edit after another, so that they and the work add up to the recorded step:
#
#     transfers   recorded                     - without transfers
#     unequal     without transfers            - with stages of the same mean time too
#     order       with such stages too         - without any bubble too
#     work        what is left

REASONS = ("transfers", "unequal", "order", "work")
"""What a step is made of."""


@dataclass(frozen=True, slots=True)
class RecordedBubbles:
    """The bubble of a run's pipeline, per step."""

    step_s: float
    """Measured mean step."""

    kinds_s: dict[str, tuple[float, ...]]
    """Kind -> [stages] what the rank of each stage waits in a step, the mean over all steps but the first.

    'filled' is what of the large gaps ran chunks of another job, where any did.
    """

    reasons_s: dict[str, float]
    """Entry of `REASONS` -> its seconds; they add up to `step_s`."""

    orders: tuple[str, ...]
    """[stages] What the rank of each stage computes in a pass, in order."""

    @classmethod
    def of(cls, run: Run, program: Program | None = None) -> RecordedBubbles:
        """Find it; raises `InputError` where no pipeline was recorded, `BarMissedError` where the replay misses it."""
        program = program or Program.from_run(run)
        known = RecordedPipeline.of(program.recording)
        waits = booked_waits(run, program, known)
        subs = [f"bubble.{name}" for name in KINDS] + [FILLED] * bool(waits[FILLED].any())
        seconds = {sub.partition(".")[2]: tuple((waits[sub].mean(axis=1) / NS_PER_S).tolist()) for sub in subs}
        orders = tuple(" ".join(map(str, actions)) for actions in known.orders)
        return cls(program.measured_s, seconds, reasons_of(program), orders)


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
