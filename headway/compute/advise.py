"""What the compute room would change: precision, memory format, fused kernels, the form of an optimizer's update.

On a CPU the fused update is predicted by replay with the time of the updates scaled by what the fused form takes of
torch's loop (`headway.cost.fused`). On a device a profiler window shows the kernels of a step: `gains` says what an
edit makes of them, and the replay with a device so many times as fast says what the host lets the job win of that.

What was measured of each candidate on the same batches from the same state, and the best set of them.

    plain | channels_last | fused_optimizer | compile | ...     one after the other, each a few steps from one state
    plain | channels_last | ...                          plain  and again: what drifts on the host meets all of them
    plain | channels_last + compile | ...                plain  then sets: the fastest, with the next one added

A gain compares a branch with what ran just before and just behind it. Of each branch the lower quartile of its steps
counts: what else runs on a host makes steps longer, never shorter. Times are seconds.

>>> before, behind = TryBranch(step_s=[2.0] * 4), TryBranch(step_s=[2.2] * 4)
>>> low, mid, high = gain([before, TryBranch(("compute.compile",), step_s=[1.0] * 4), behind], ("compute.compile",))
>>> low < mid < high, round(mid, 3)
(True, 2.1)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import msgspec

from headway.compute.by_hand import LINES, rehearsed_shares
from headway.compute.gains import (
    PASSES,
    PRODUCTS,
    Scale,
    StepKernels,
    channels_last,
    fused_update,
    gains_of,
    step_kernels,
    update_bound_s,
)
from headway.compute.remedies import REMEDIES
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_fraction
from headway.cost.fused import Share
from headway.cost.specs import Ceilings, ceilings_of
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.script_causes import fused_share_of
from headway.ledger.cause import Cause
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import ComputeFacts, OptimizerFacts

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
    """Yield what useful time is spent on that a few lines would shorten, with the seconds that they would win.

    Of a trace the script's settings are not known: what its kernels show by themselves.
    """
    compute, step = ledger.facts.compute, step_kernels(ledger.kernels)
    if step is None or (compute is not None and len(compute.models) != 1):
        return
    useful_s = ledger.ledger_ns["useful"] / NS_PER_S
    ceilings = ceilings_of(ledger.facts.device_type or "")
    effects: dict[str, Scale | str] = {}
    if compute is not None:
        effects = dict(_effects(step, ceilings, compute)) if ceilings else {}
    elif step.share("convolution") >= LARGE:
        effects = {"compute.channels_last": channels_last(step)}
    for cause, remedy, names, what, script in _LINES:
        scale, share = effects.get(remedy), step.share(*names)
        if not isinstance(scale, Scale) or share < LARGE or 1 / scale.likely < MIN_SPEEDUP:
            continue
        if remedy in ledger.facts.in_force:
            continue
        count = sum(step.count.get(name, 0) for name in names)
        evidence = f"{what} take {format_fraction(share)} of the kernels' time ({_launches(count, ledger)}); "
        evidence += (
            f"with the edit the kernels take {scale.likely:.2f} ({scale.fast:.2f} to {scale.slow:.2f}) of it all"
        )
        script = script.format(optimizer=compute.optimizers[0].name if compute and compute.optimizers else "")
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
    return f"the kernels of useful time: {', '.join(shares)} ({_launches(sum(step.count.values()), ledger)})"


def _launches(count: int, ledger: Ledger) -> str:
    """Return a mean step's count in words; of a trace without steps that of all."""
    return f"{count} launches{' a step' if ledger.steps else ''}"


def fused_optimizer(program: Program, optimizers: tuple[OptimizerFacts, ...]) -> Proposal | Refusal:
    """Propose fused updates where all optimizers of the run may have them, and the replay says that it pays."""
    shares = []
    for optimizer in optimizers:
        share_or_reason = fused_share_of(optimizer)
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


CANDIDATES: dict[str, str] = {record.name: record.allow or "" for record in REMEDIES}
"""Remedy -> the grant without which it is not applied; the cheapest to try come first."""

Interval = tuple[float, float, float]
"""A gain: low end, middle, high end."""

WORTH = 1.02
"""A candidate whose gain is below it is not worth another line."""

NO_LOSS = 0.95
"""A candidate whose gain alone is below it is not tried on top of others."""

QUARTILE_ERROR = 2.0
"""Standard error of the lower quartile, in distances of the median from the fastest step / sqrt(steps)."""


class TryBranch(msgspec.Struct):
    """Steps with one set of remedies, from the state that all branches begin at."""

    remedies: tuple[str, ...] = ()
    """The empty set is the script as it is."""
    step_s: list[float] = []
    """Its steps behind the first ones, without the time in which they wait for batches."""
    wait_s: float = 0.0
    """Median time in which a step waited for its batch: of the first branch it is the loader's."""
    loss: float | None = None
    """Of the last step; None where no backward of a scalar was seen."""
    memory_bytes: int | None = None
    """Peak memory on the device; None on a CPU."""
    same_batches: bool = True
    """Whether the model was given what the first branch gave it."""
    refused: str | None = None
    """Why it could not be tried."""


class Tries(msgspec.Struct):
    """What a rank writes: RUN/try/r<rank>.json."""

    branches: list[TryBranch] = []
    """In the order in which they ran."""
    ended: str = "the script ended before all was tried"
    """Why there are no more of them; '' when all were tried."""
    state_bytes: int = 0
    """Memory that the copy of the training state takes."""

    @property
    def wait_s(self) -> float:
        """What a step waits for its batch, as the first branch did: those after it have their batches in memory."""
        return self.branches[0].wait_s if self.branches else 0.0

    @property
    def step_s(self) -> float:
        """A step of the script as it is; 0 where none was measured."""
        steps = [seconds for branch in self.branches if not branch.remedies for seconds in branch.step_s]
        return quiet_s(steps) + self.wait_s if steps else 0.0


class TryRow(msgspec.Struct, frozen=True):
    """One set of remedies, as the command says it."""

    remedies: tuple[str, ...]
    predicted: Interval | None
    """Gain (low, middle, high); None where nothing predicts it."""
    measured: Interval | None
    loss_difference: float | None
    """|loss - that of the script as it is| behind the same steps."""
    noise: float | None
    """The same between two branches of the script as it is."""
    memory_bytes: int | None
    refused: str | None


def gain(
    order: Sequence[TryBranch], remedies: tuple[str, ...], *, over: tuple[str, ...] = (), wait_s: float = 0.0
) -> Interval | None:  # fmt: skip
    """Return the gain (low, middle, high) of a set over another one, the script as it is; None where one has no steps.

    `order` is how the branches ran, and `wait_s` what a step waits for its batch. Each branch of the set is compared
    with the one of `over` before it and the one behind it. The gain is the median of these ratios; the interval is the
    median's of 95 % (order statistics: half -+ sqrt(n) of n sorted ratios), with the error of their steps.
    """
    ratios, errors = [], []
    for index, branch in enumerate(order):
        if branch.remedies != remedies or not branch.step_s:
            continue
        before = next((base for base in reversed(order[:index]) if base.remedies == over and base.step_s), None)
        after = next((base for base in order[index:] if base.remedies == over and base.step_s), None)
        for base in (before, after):
            if base is not None:
                ratios.append((quiet_s(base.step_s) + wait_s) / (quiet_s(branch.step_s) + wait_s))
                errors.append(_relative_error(branch.step_s) + _relative_error(base.step_s))
    if not ratios:
        return None
    ratios.sort()
    left_out = max(0, int(len(ratios) / 2 - math.sqrt(len(ratios))))
    spread = 1 + statistics.median(errors)
    return ratios[left_out] / spread, statistics.median(ratios), ratios[-1 - left_out] * spread


def quiet_s(step_s: Sequence[float]) -> float:
    """Return the lower quartile of steps.

    >>> quiet_s([1.0, 1.0, 3.0, 9.0, 1.2])
    1.0
    """
    return sorted(step_s)[len(step_s) // 4]


def _relative_error(step_s: Sequence[float]) -> float:
    """Return the standard error of the lower quartile / it, from the distance of the steps below the median."""
    ordered = sorted(step_s)
    return QUARTILE_ERROR * (statistics.median(ordered) - ordered[0]) / ordered[0] / math.sqrt(len(ordered))


def schedule(names: Iterable[str], rounds: int) -> Generator[tuple[str, ...], TryBranch, None]:
    """Yield the set of the next branch, and take what was measured of it: singles first, then the greedy sets.

    What wins little alone may win much behind another: once precision has made the products short, what is left are
    launches and passes through memory, which torch.compile and fused updates shorten. So each candidate that is not
    refused and does not lose is tried on top of the best set, those that win most first. A set is tried beside the
    script as it is, in as many rounds; a candidate that is refused is not tried again.
    """
    singles = [(name,) for name in names]
    order = yield from _measured([(), *singles], rounds)
    gains = {key: gain(order, key) for key in singles}
    ranked = sorted((-measured[1], key) for key, measured in gains.items() if measured and measured[1] >= NO_LOSS)
    best: tuple[str, ...] = ()
    for negative, key in ranked:
        if not best:
            best = key if -negative >= WORTH else ()
            continue
        more = (*best, *key)
        order = yield from _measured([(), best, more], rounds)
        measured = gain(order, more, over=best)
        best = more if measured and measured[1] >= WORTH else best


def _measured(
    sets: Sequence[tuple[str, ...]], rounds: int
) -> Generator[tuple[str, ...], TryBranch, list[TryBranch]]:  # fmt: skip
    """Return a branch of each set per round, and one more of the first set; what is refused once gets no more."""
    order: list[TryBranch] = []
    refused: set[tuple[str, ...]] = set()
    for key in [*list(sets) * rounds, sets[0]]:
        if key not in refused:
            order.append((yield key))
            if order[-1].refused:
                refused.add(key)
    return order


def rows_of(tries: Tries, predicted: Mapping[str, Interval] | None = None) -> list[TryRow]:
    """Return a row per set of remedies, in the order of their first branches.

    `predicted` has what a plan says of single remedies, (low, likely, high).
    """
    order = tries.branches
    plain = [branch.loss for branch in order if not branch.remedies and branch.same_batches and branch.loss is not None]
    noise = max(plain) - min(plain) if len(plain) > 1 else None
    rows = []
    for remedies in dict.fromkeys(branch.remedies for branch in order if branch.remedies):
        branches = [branch for branch in order if branch.remedies == remedies]
        losses = [branch.loss for branch in branches if branch.loss is not None and branch.same_batches]
        rows.append(TryRow(
            remedies,
            predicted=(predicted or {}).get(remedies[0]) if len(remedies) == 1 else None,
            measured=gain(order, remedies, wait_s=tries.wait_s),
            loss_difference=abs(losses[-1] - plain[-1]) if losses and plain else None,
            noise=noise,
            memory_bytes=max((branch.memory_bytes or 0 for branch in branches), default=0) or None,
            refused=next((branch.refused for branch in branches if branch.refused), None),
        ))  # fmt: skip
    return rows


def best_of(rows: Iterable[TryRow], allowed: Iterable[str]) -> TryRow | None:
    """Return the fastest set of which every remedy is allowed, if any is worth its lines.

    `allowed` names grants; 'lossy' remedies stay out without theirs.
    """
    grants = set(allowed)
    may = [row for row in rows if row.measured and all(CANDIDATES[name] in grants for name in row.remedies)]
    best = max(may, key=lambda row: row.measured[1] if row.measured else 0.0, default=None)
    return best if best and best.measured and best.measured[1] >= WORTH and best.measured[0] > 1.0 else None


def chosen(only: Sequence[str]) -> list[str]:
    """Return the candidates by name, 'compile' for 'compute.compile' too. Raises `UnknownNameError`.

    >>> chosen(["compile", "compute.tf32"]), len(chosen([])) == len(CANDIDATES)
    (['compute.compile', 'compute.tf32'], True)
    """
    table = {name.removeprefix("compute."): name for name in CANDIDATES} | {name: name for name in CANDIDATES}
    return [pick(table, name, "candidate of --only") for name in only] or list(CANDIDATES)
