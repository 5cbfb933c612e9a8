"""What the compute room would change: the form of an optimizer's update.

Predicted by replay with the time of the updates scaled by what the fused form takes of torch's loop
(`headway.cost.fused`); the interval holds both the range of that share and the error of the replay.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.units import format_fraction
from headway.cost.fused import Share
from headway.ledger.answers.compute_causes import share_of
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.compute_facts import OptimizerFacts

NAME = "compute.fused_optimizer"


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield the fused form of the optimizer, where torch loops over its tensors on a CPU, or why not."""
    del ledger, setup
    compute = program.facts.compute
    if compute is not None and compute.optimizers:
        yield fused_optimizer(program, compute.optimizers)


def fused_optimizer(program: Program, optimizers: tuple[OptimizerFacts, ...]) -> Proposal | Refusal:
    """Propose fused updates where all optimizers of the run may have them, and the replay says that it pays."""
    shares = []
    for optimizer in optimizers:
        share_or_reason = share_of(optimizer)
        if isinstance(share_or_reason, str):
            return Refusal(NAME, "compute", share_or_reason)
        shares.append(share_or_reason)
    share = Share(*(max(values) for values in zip(*shares, strict=True)))
    mid = program.predict([_edit(share.mid)])
    if mid.speedup < MIN_SPEEDUP:
        fastest = program.predict([_edit(share.low)], interval=False)
        won = format_fraction(max(0.0, 1 - fastest.step_s / fastest.base_step_s))
        return Refusal(NAME, "compute", f"fused updates win at most {won} of a step: too little to pay for a change")
    slow, fast = (program.predict([_edit(factor)]) for factor in (share.high, share.low))
    names = " and ".join(dict.fromkeys(optimizer.name for optimizer in optimizers))
    return Proposal(
        name=NAME,
        room="compute",
        edits=(_edit(share.mid),),
        predicted_speedup=mid.speedup,
        interval=(min(slow.interval[0], mid.interval[0]), max(fast.interval[1], mid.interval[1])),
        applies=True,
        risk="sums are rounded in another order, so losses differ in their last bits",
        reason=f"{names} loops over its tensors, several operators for each; fused, it takes {share.low:.2f} to "
        f"{share.high:.2f} of that time. {mid.note}".strip(),
        allow="result-equivalent",
    )


def _edit(factor: float) -> str:
    """Return the edit that scales the updates."""
    return f"op:optimizer.step={factor:g}x"
