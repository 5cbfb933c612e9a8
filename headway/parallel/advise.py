"""What the parallel room would change: the order in which the stages of a pipeline compute.

Every order of `SCHEDULES` that fits one stage per rank is replayed on the
recorded run, the searched one under the recorded times, with no more
activations than the run held on any rank.

>>> in_order((Action(B, 0, 0), Action(B, 0, 1))), in_order((Action(W, 0, 1), Action(W, 0, 0)))
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.core.errors import InputError
from headway.core.units import format_fraction
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.pipeline.actions import Action, B, I, PipelineProgram, W
from headway.sim.pipeline.check import peak_activations
from headway.sim.pipeline.lower import lower
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import MOST_STARVED, RecordedPipeline

NAME = "parallel.schedule"

CANDIDATES = ("1f1b", "gpipe", "zero_bubble")
"""Orders with one stage per rank, the plainest first: of equal ones it is taken."""

REPLACED = ("ScheduleGPipe", "Schedule1F1B")
"""Classes of torch whose order can be replaced."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield the order that wins most, or why there is none; nothing where the run is no pipeline."""
    del ledger, setup
    if not any(work is not None for work in program.recording.stages):
        return
    yield _schedule(program)


def _schedule(program: Program) -> Proposal | Refusal:
    try:
        known = RecordedPipeline.of(program.recording)
        bound = program.predict(["bubble=none"], interval=False).speedup
        others = [name for name in CANDIDATES if known.reordered(name) != known.orders]
        tried = {name: program.predict([f"schedule={name}"], interval=False).speedup for name in others}
    except InputError as cause:
        return Refusal(NAME, "parallel", str(cause))
    starved = float(program.recording.waiting.mean())
    if starved > MOST_STARVED:
        share = format_fraction(starved, 0)
        reason = f"ranks had no core for {share} of their compute: with less bubble they would wait more for cores"
        return Refusal(NAME, "parallel", reason)
    name = max(others, key=lambda one: (round(tried[one], 2), -CANDIDATES.index(one)))
    if tried[name] < MIN_SPEEDUP:
        reason = f"of {', '.join(others)}, {name} is predicted best: {tried[name]:.3f}x"
        if bound >= MIN_SPEEDUP:
            lost = format_fraction(1 - 1 / bound)
            reason += f"; the bubble costs {lost} of a step: take more microbatches, or stages of equal time"
        return Refusal(NAME, "parallel", reason)
    found, orders = program.predict([f"schedule={name}"]), known.reordered(name)
    rows = PipelineProgram.from_orders(orders).to_torch_csv().splitlines()
    other = _made_by(program)
    if other:
        return Refusal(NAME, "parallel", f"{name} is predicted {found.speedup:.3f}x, but the schedule is a {other}")
    before, after = (peak_activations(lower(one)).tolist() for one in (known.orders, orders))
    keeps = all(_gradient_order(a) == _gradient_order(b) for a, b in zip(known.orders, orders, strict=True))
    splits = any(action.op == I for actions in orders for action in actions)
    return Proposal(
        name=NAME,
        room="parallel",
        edits=(f"schedule={name}",),
        predicted_speedup=found.speedup,
        interval=found.interval,
        applies=True,
        parameters={"order": rows},
        cost=f"activations of at most {_listed(after)} microbatches on ranks 0, 1, ..; the run held {_listed(before)}",
        risk="a private interface of torch executes the order" + ("; backwards run in two parts" if splits else ""),
        allow=None if keeps else "result-equivalent",
        reason=f"{name} has less bubble; without any a step would be {bound:.2f}x as fast. {found.note}".strip(),
    )


def _made_by(program: Program) -> str:
    """Return the class of the recorded schedule where it cannot be replaced; '' where it can, or is not known."""
    facts = program.run.parts.ranks if program.run is not None else {}
    names = {row["pipeline"]["schedule"] for row in facts.values() if "pipeline" in row}
    return next((name for name in sorted(names) if name not in REPLACED), "")


def _gradient_order(actions: Sequence[Action]) -> list[int]:
    """Return the microbatches of a rank in the order in which it adds up their weight gradients."""
    return [action.microbatch for action in actions if action.op in (B, W)]


def in_order(actions: Sequence[Action], ops: tuple[int, ...] = (B, W)) -> bool:
    """Say whether a rank takes the microbatches in their order in these operations; those that add up gradients."""
    found = [action.microbatch for action in actions if action.op in ops]
    return found == sorted(found)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
