"""What the compute room would change: precision, memory format, fused kernels, the form of an optimizer's update.

On a CPU the fused update is predicted by replay with the time of the updates scaled by what the fused form takes of
torch's loop (`headway.cost.fused`). On a device a profiler window shows the kernels of a step: `gains` says what an
edit makes of them, and the replay with a device so many times as fast says what the host lets the job win of that.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.compute.by_hand import LINES, rehearsed_shares
from headway.compute.gains import (
    PASSES,
    PRODUCTS,
    Scale,
    StepKernels,
    fused_update,
    gains_of,
    step_kernels,
    update_bound_s,
)
from headway.compute.remedies import REMEDIES
from headway.core.units import NS_PER_S, format_fraction
from headway.cost.ceilings import Ceilings, ceilings_of
from headway.cost.fused import Share
from headway.ledger.answers.compute_causes import share_of
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.compute_facts import ComputeFacts, OptimizerFacts

NAME = "compute.fused_optimizer"

LARGE = 0.03
"""Share of the kernels' time from which on a class of them is a cause."""

WINDOW = (
    "a profiler window tells which kernels its steps are made of, and this run has none: headway run --window-at 50"
)

RECORD = {record.name: record for record in REMEDIES}


def propose(ledger: Ledger, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what a few lines would win of the run's kernels, or why not."""
    compute = program.facts.compute
    if compute is None:
        return
    if not setup.accelerated:
        if compute.optimizers:
            yield fused_optimizer(program, compute.optimizers)
        for edit, shares in rehearsed_shares(ledger).items():
            if name := LINES[edit].remedy:
                behind = Scale(*(1 - share for share in shares))
                yield _replayed(name, behind, program, "a step was timed with it and without")
        return
    step, ceilings = step_kernels(ledger.kernels), ceilings_of(setup.device_type)
    if not compute.models:
        return
    if step is None or ceilings is None:
        reason = WINDOW if step is None else f"what {setup.device_type} reaches is not known: headway doctor --device"
        yield Refusal("compute.autocast", "compute", reason)
        return
    for name, effect in _effects(step, ceilings, compute):
        yield _from_kernels(name, effect, program, step)


def _effects(step: StepKernels, ceilings: Ceilings, compute: ComputeFacts) -> Iterator[tuple[str, Scale | str]]:
    """Yield each remedy with what it makes of a step, those of the model and that of the optimizer, or why nothing."""
    yield from gains_of(step, ceilings, compute)
    if len(compute.optimizers) == 1 and step.share("optimizer"):
        yield NAME, _fused(step, ceilings, compute.optimizers[0])


def _fused(step: StepKernels, ceilings: Ceilings, optimizer: OptimizerFacts) -> Scale | str:
    """Return what a fused update makes of a step, or why there is none."""
    if optimizer.is_fused is not None or optimizer.is_foreach is not None:
        return f"the script says itself which form of {optimizer.name} it wants"
    if not optimizer.is_plain:
        return f"{optimizer.name} updates sparse or complex numbers, or tensors that lie unlike their gradients"
    return fused_update(step, ceilings, optimizer) or f"{optimizer.name} has no fused form that was measured"


def _from_kernels(name: str, effect: Scale | str, program: Program, step: StepKernels) -> Proposal | Refusal:
    """Propose a remedy whose kernels take `effect` times what they took: replayed with a device as much faster."""
    if isinstance(effect, str):
        return Refusal(name, "compute", effect)
    if 1 / effect.likely < MIN_SPEEDUP:
        won = format_fraction(max(0.0, 1 - effect.fast))
        return Refusal(name, "compute", f"it wins at most {won} of the kernels' time: too little to pay for a change")
    reason = f"its kernels would take {effect.likely:.2f} ({effect.fast:.2f} to {effect.slow:.2f}) of "
    return _replayed(name, effect, program, f"{reason}{1000 * step.total_s:.3g} ms a step")


def _replayed(name: str, effect: Scale, program: Program, reason: str) -> Proposal:
    """Propose a remedy behind which computing takes `effect` times as long, as a replay says."""
    fast_edit, edit, slow_edit = (f"accelerator={1 / factor:.4g}x" for factor in effect)
    low, mid, high = (program.predict([row]) for row in (slow_edit, edit, fast_edit))
    record = RECORD[name]
    return Proposal(
        name=name, room="compute", edits=(edit,), predicted_speedup=mid.speedup,
        interval=(min(low.interval[0], mid.interval[0]), max(high.interval[1], mid.interval[1])),
        applies=True, risk=record.changes, allow=record.allow,
        conflicts=tuple(rival for rival in RECORD if rival != name),
        reason=f"{reason}; what several of them win together: headway try. {mid.note}".strip(),
    )  # fmt: skip


def causes(ledger: Ledger) -> Iterator[Cause]:
    """Yield what useful time is spent on that a few lines would shorten, with the seconds that they would win."""
    compute, step = ledger.facts.compute, step_kernels(ledger.kernels)
    if compute is None or step is None or len(compute.models) != 1:
        return
    useful_s = ledger.ledger_ns["useful"] / NS_PER_S
    ceilings = ceilings_of(ledger.facts.device_type or "")
    effects = dict(_effects(step, ceilings, compute)) if ceilings else {}
    for cause, remedy, names, what, script in _LINES:
        scale, share = effects.get(remedy), step.share(*names)
        if not isinstance(scale, Scale) or share < LARGE or 1 / scale.likely < MIN_SPEEDUP:
            continue
        if remedy in ledger.facts.in_force:
            continue
        count = sum(step.count.get(name, 0) for name in names)
        evidence = f"{what} take {format_fraction(share)} of the kernels' time ({count} launches a step); "
        evidence += (
            f"with the edit the kernels take {scale.likely:.2f} ({scale.fast:.2f} to {scale.slow:.2f}) of it all"
        )
        script = script.format(optimizer=compute.optimizers[0].name if compute.optimizers else "")
        yield Cause(cause, what, useful_s * (1 - scale.likely), evidence, script, script=script)
    if step.unaligned_s / step.total_s >= LARGE:
        evidence = (
            f"products whose sizes are no multiples of 8 take {format_fraction(step.unaligned_s / step.total_s)} "
        )
        evidence += "of the kernels' time: the library falls back to kernels that read single numbers"
        fix = "pad the vocabulary, and other odd sizes of layers, to a multiple of 64: 50,257 to 50,304"
        yield Cause(
            "compute.alignment", "matrix products", useful_s * step.unaligned_s / step.total_s / 2, evidence, fix
        )


_LINES = (
    ("compute.precision", "compute.autocast", PRODUCTS, "products in float32 or TF32",
     "with torch.autocast('cuda', torch.bfloat16): outputs = model(inputs)"),
    ("compute.unfused", "compute.compile", (*PASSES, "copy"), "passes over memory", "model.compile()"),
    ("compute.layout", "compute.channels_last", ("layout",), "conversions of layout",
     "model.to(memory_format=torch.channels_last)"),
    ("compute.autotune", "compute.cudnn_benchmark", ("convolution",), "convolutions",
     "torch.backends.cudnn.benchmark = True"),
    ("compute.optimizer", NAME, ("optimizer",), "updates", "torch.optim.{optimizer}(..., fused=True)"),
)  # fmt: skip
"""Cause, remedy, classes of kernels, what they are in words, and the line to write."""


def classes_json(ledger: Ledger, flops_per_step: float | None = None, dtype: str = "") -> list[dict[str, object]]:
    """Return the classes of kernels of `headway why --json`; their device-seconds add up to those of `useful`.

    `bound` says what limits a class at best; `fraction_of_bound` how much of that it reaches, where operations or bytes
    are known: of products together (`flops_per_step` in `dtype`), and of updates.
    """
    step, compute = step_kernels(ledger.kernels), ledger.facts.compute
    if step is None:
        return []
    ceilings, useful_s = ceilings_of(ledger.facts.device_type or ""), ledger.ledger_ns["useful"] / NS_PER_S
    products_s = sum(step.seconds.get(name, 0.0) for name in PRODUCTS)
    rate = ceilings.flops_per_s.get(dtype, 0.0) if ceilings else 0.0
    rows = list[dict[str, object]]()
    for name, seconds in step.seconds.items():
        fraction = None
        if name in PRODUCTS and flops_per_step and rate:
            fraction = flops_per_step / products_s / rate
        if name == "optimizer" and ceilings and compute and len(compute.optimizers) == 1:
            bound_s = update_bound_s(ceilings, compute.optimizers[0])
            fraction = None if bound_s is None else min(1.0, bound_s / seconds)
        share = seconds / step.total_s
        rows.append({
            "name": name, "device_s": share * useful_s, "share": share,
            "bound": "compute" if name in PRODUCTS else "memory", "fraction_of_bound": fraction,
        })  # fmt: skip
    return rows


def words(ledger: Ledger) -> str:
    """Return the classes in a sentence without an end, those of a few per cent and more; '' without a window."""
    step = step_kernels(ledger.kernels)
    if step is None:
        return ""
    shares = [f"{name} {format_fraction(step.share(name), 0)}" for name in step.seconds if step.share(name) >= 0.02]
    return f"the kernels of useful time: {', '.join(shares)} ({sum(step.count.values())} launches a step)"


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
