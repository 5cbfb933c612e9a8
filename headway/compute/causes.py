"""Causes inside useful time: those of `by_hand`, and what looks at a run tell of loops, batches, gradients and cores.

    line in a loop     time that it was seen in, against what calling its operators takes, both of the forward
    gradients          of 64 backwards that were watched: those that no update used, calls that repeat, frozen modules
    cores              stayed free, while operators are large enough to share

Of most of them only a bound is known: `at_most`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

from headway.compute.by_hand import (
    LARGE,
    LINES,
    MOST,
    REHEARSED,
    REPEATS,
    ROOM,
    SHARE,
    at_most,
    line_to_copy,
    of_calls,
    updates_share,
)
from headway.compute.gains import Scale
from headway.core.units import NS_PER_S, format_fraction, plural
from headway.ledger.answers.causes import Predictor
from headway.ledger.answers.ledger import Ledger, booked_s, span_of
from headway.ledger.answers.script_causes import IN_LOOP, IN_ONE_CALL, looped_words, python_loops, updates_s
from headway.ledger.cause import Cause, SampledLine
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, GradientUse

INSIDE = ("useful.forward", "useful.backward", "useful.compute")
"""What a model and its loss take, without the updates."""

LARGE_RATE = 4e9
"""Operations per second and thread of a CPU from which on operators compute, and below which calls take the time."""

CALL_S = 5e-6
"""What calling an operator from Python takes on a CPU, about."""

BESIDE = 0.15
"""Share of the samples of forwards and losses from which on loops count beside operators that compute."""

MANY = 16
"""Calls of one layer in a forward, or of the model for one backward, from which on a loop is one over time steps."""

LONG_FORWARD_S = 0.008
"""A forward and its loss that take less are hundreds of operators: layer after layer, as models are."""

MANY_IN_LOOPS = 200
"""Operators that a forward calls in loops, from which on also a short one is no layer after the other."""

NEARLY_ALL = 0.98
"""Of the steps' time, what loops can be believed to take."""

PADDED, FEWEST_PADDED = 0.3, 4
"""Share of a batch's positions from which on padding is worth a word: what changes batches changes training."""

SPARSE = 0.1
"""Share of an embedding's rows that a batch looks up, below which gradients of all of them are worth a word."""

SCALED = Scale(1.0, 0.8, 0.4)
"""What more threads win / what as many times more cores would: at best, likely, at least."""

UNUSED, FEWEST = 0.1, 8
"""Share of a model's calls whose gradients nobody uses, and repeated calls, from which on they are told."""

PASSES = 1.5
"""Passes over the examples from which on what was computed in the first may be kept."""


def causes(ledger: Ledger, predict: Predictor | None = None) -> Iterator[Cause]:
    """Yield what the script may leave out or call by another name, with the device-seconds that it would win.

    `predict` replays edits; without it nothing is predicted.
    """
    compute, useful_s = ledger.facts.compute, ledger.ledger_ns["useful"] / NS_PER_S
    if compute is None or not useful_s:
        return
    for rule in (_larger_batch, _loops, _dense_rows, _padding, _repeated, _frozen):
        yield from rule(ledger, compute)
    for cause, shares in (*of_calls(ledger, compute), *_threads(ledger, compute), *_unused(ledger, compute)):
        yield _forecast(cause, shares, useful_s, predict)


def _forecast(cause: Cause, shares: Scale, useful_s: float, predict: Predictor | None) -> Cause:
    """Put in what a cause costs, and what a replay with a faster device says of its end."""
    cause = replace(cause, lost_device_s=shares.likely * useful_s)
    if predict is None:
        return cause
    fast, mid, slow = (predict((f"accelerator={1 / (1 - share):.4g}x",)) for share in shares)
    bounds = min(slow.interval[0], mid.interval[0]), max(fast.interval[1], mid.interval[1])
    return replace(cause, predicted_speedup=mid.speedup, interval=bounds)


def _larger_batch(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that a device waits for launches while its memory has room for more examples, which need no more of them.

    With k times the examples the device idles as long as before for k times as many: 1 - 1 / k of that is won.
    """
    peaks = [row for row in ledger.facts.memory.values() if row is not None and row.device_peak_bytes]
    if not peaks or len(compute.models) != 1 or not (compute.has_larger_batches and compute.models[0].batch_size):
        return
    [model] = compute.models
    fullest = max((row.device_peak_bytes or 0) / (row.device_total_bytes or 1) for row in peaks)
    times, idle_s = min(REPEATS, int(ROOM / fullest)), booked_s(ledger, "host.launch")
    share = _of_steps(ledger, idle_s)
    if times < 2 or share < LARGE:
        return
    won = min(MOST, share * (1 - 1 / times))
    evidence = f"a device waits for launches {format_fraction(share, 0)} of the steps' time, and at most "
    evidence += f"{format_fraction(fullest, 0)} of its memory was in use by batches of {model.batch_size}"
    yield Cause(
        "compute.batch", model.name, idle_s * (1 - 1 / times), evidence, LINES["batch"].fix, 1 / (1 - won),
        (1 / (1 - won / 2), 1 / (1 - min(MOST, share))),
        script=line_to_copy(ledger, "batch", times * (model.batch_size or 0)),
    )  # fmt: skip


def _of_steps(ledger: Ledger, seconds: float) -> float:
    """Return which share of the steps' time some device-seconds are."""
    return seconds * NS_PER_S / max(int(ledger.step_ns.sum()), 1)


def _rate(ledger: Ledger, compute: ComputeFacts) -> float | None:
    """Return the operations per second and thread of forwards and backwards on a CPU; None where none were counted."""
    counted = [call.flops for call in compute.calls if call.flops is not None]
    useful_s = booked_s(ledger, *INSIDE)
    if ledger.facts.device_type != "cpu" or len(counted) != len(compute.calls) or not counted or not useful_s:
        return None
    calls = max(span_of(ledger, "forward").count, ledger.steps * ledger.devices * len(counted))
    return sum(counted) / len(counted) * calls / useful_s / max(ledger.facts.threads.values(), default=1)


def _loops(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that forwards and losses go through Python loops whose operators are too small to take the time."""
    rate, backwards = _rate(ledger, compute), max(span_of(ledger, "segment.backward").count, 1)
    again = any(call.repeats >= MANY for call in compute.calls) or span_of(ledger, "forward").count >= MANY * backwards
    inside_s, forwards_s = booked_s(ledger, *INSIDE), booked_s(ledger, "useful.forward", "useful.compute")
    is_short = forwards_s / max(backwards, ledger.steps * ledger.devices, 1) < LONG_FORWARD_S
    counts = {line: count for call in compute.calls for line, count in call.loops.items()}
    called = sum(counts.get(line, 0) for line in {row.line for row in ledger.loop_lines})
    if rate is None or (is_short and called < MANY_IN_LOOPS):
        return
    forwards = max(span_of(ledger, "forward").count, ledger.steps * ledger.devices) / len(compute.calls)
    calling_s = {line: forwards * CALL_S * count for line, count in counts.items()}
    sampled_s = forwards_s / max(sum(row.ns for row in ledger.loop_lines), 1)  # what one ns of samples stands for

    def calls(row: SampledLine) -> bool:
        """Whether calling operators takes most of a line's time, not what they compute."""
        return 2 * calling_s[row.line] > row.ns * sampled_s if row.line in calling_s else rate < LARGE_RATE

    rows, share = python_loops(ledger, calls, with_layers=again, share_from=IN_LOOP if rate < LARGE_RATE else BESIDE)
    if not rows:
        return
    count = sum(row.count for row in ledger.loop_lines)
    upper = min(1.0, share + 2 * math.sqrt(share * (1 - share) / count))  # two standard errors of the samples above
    backward_s = booked_s(ledger, "useful.backward")  # at most all of it belongs to what the loops computed
    if rate >= LARGE_RATE:  # that of the rest of the model is the most of it
        backward_s = min(backward_s, 2 * upper * forwards_s)
    part = _of_steps(ledger, upper * forwards_s + backward_s)
    evidence = f"{looped_words(ledger, rows, share)}; their operators are small"
    evidence += f" ({rate / 1e9:.2g} GFLOP/s per thread)" if rate < LARGE_RATE else ": calling them takes the time"
    fix = f"{IN_ONE_CALL}; torch.compile where each pass needs the one before it"
    gain = 1 / (1 - min(part, NEARLY_ALL))
    yield Cause("compute.loop", rows[0].words, share * inside_s, evidence, fix, gain, (1.0, gain), at_most=True)


def _dense_rows(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that each update goes over all rows of embeddings, of which a batch looks up few."""
    if len(compute.models) != 1 or len(compute.optimizers) != 1 or ledger.facts.device_type != "cpu":
        return
    [model], [optimizer] = compute.models, compute.optimizers
    ratio = model.num_dense_elements / max(model.num_elements, 1)
    lost_s = ratio * (updates_s(ledger) + booked_s(ledger, "useful.backward"))  # which writes a gradient of all rows
    share = _of_steps(ledger, lost_s)
    if share < LARGE or not 0 < model.num_lookups < SPARSE * model.num_dense_rows:
        return
    evidence = f"each step computes gradients of all {model.num_dense_rows:,} rows of {model.name}'s embeddings, and "
    evidence += f"{optimizer.name} updates them: {format_fraction(share, 0)} of the steps' time at most, for "
    evidence += f"{model.num_lookups:,} rows that a batch looks up"
    fix, edit = "compute gradients of the rows that a batch looks up alone: nn.Embedding(..., sparse=True)", ""
    if optimizer.name in ("Adam", "AdamW"):
        fix += f", and torch.optim.SparseAdam for its weight in place of {optimizer.name}: it decays no weights, and "
        fix += "rows that no batch looks up stay as they are"
        edit = "nn.Embedding(..., sparse=True); torch.optim.SparseAdam([embedding.weight])"
    elif optimizer.name in ("SGD", "Adagrad"):
        edit = "nn.Embedding(..., sparse=True)"
    yield Cause("compute.embedding", model.name, lost_s, evidence, fix, script=edit)


def _padding(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that a model computes on positions that fill short examples up to the length of long ones."""
    if len(compute.calls) != 1:
        return
    [call], shares = compute.calls, compute.padding
    padded = statistics.mean(shares) if len(shares) >= FEWEST_PADDED else call.padded
    if padded < PADDED:
        return
    inside_s = booked_s(ledger, *INSIDE)
    share = _of_steps(ledger, padded * inside_s)
    evidence = f"{format_fraction(padded, 0)} of the positions of "
    if len(shares) >= FEWEST_PADDED:
        ends = " to ".join(format_fraction(end, 0) for end in (min(shares), max(shares)))
        evidence += f"{len(shares)} batches of {call.name} ({ends}) fill short examples up"
    else:
        evidence += f"the first batch of {call.name} fill short examples up; others may have more or fewer"
    fix = "batch examples of like length (sort within a few batches, shuffle the batches), pad to the longest of each "
    fix += "batch, or pack them (nn.utils.rnn.pack_padded_sequence, nested tensors): batches are others then"
    gain = 1 / (1 - min(share, MOST))
    yield Cause("compute.padding", call.name, padded * inside_s, evidence, fix, gain, (1.0, gain), at_most=True)


def _repeated(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that models are called again on what their gradients came of, for outputs that are there already."""
    repeats = compute.repeats
    share = min(repeats.repeated_ns / max(repeats.watched_ns, 1), NEARLY_ALL)
    if share < LARGE or repeats.repeated < FEWEST:
        return
    evidence = f"{repeats.repeated} of {repeats.calls} calls of models were given the tensor that the backward before "
    evidence += f"them had its gradients of, and no backward followed: {format_fraction(share, 0)} of the time"
    fix = "where outputs of the weights before the update will do (accuracy), keep those of the call that computes the "
    fix += "loss: outputs.detach()"
    name = compute.models[0].name if compute.models else "model"
    yield _spent(ledger, share, Cause("compute.repeat", name, 0.0, evidence, fix))


def _frozen(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that a module which does not learn computes the same of the same examples in each pass."""
    loaders = list(ledger.facts.effective_loaders.values())
    examples = ledger.steps * ledger.devices * max((row.batch_size or 0 for row in loaders), default=0)
    size = max((row.dataset_size or 0 for row in loaders), default=0)
    passes = examples / size if size else 0.0
    steady = all(row.draws == () and row.collate_draws in ((), None) and row.changes == "" for row in loaders)
    frozen = max(compute.frozen, key=lambda row: row.ns, default=None)
    if frozen is None or not steady or passes < PASSES or frozen.calls < FEWEST:
        return
    share = min(frozen.ns / max(compute.repeats.watched_ns, 1), NEARLY_ALL)
    again = share * (1 - 1 / passes)  # the first pass has to compute it
    if again < LARGE:
        return
    evidence = f"{frozen.name} has no trainable parameter, is in evaluation mode and was called on the batches: in "
    evidence += (
        f"each of {passes:.1f} passes it computes the same of the same examples, {format_fraction(share, 0)} of "
    )
    evidence += "the time"
    fix = "compute its outputs once, before training, and train on them: TensorDataset(torch.cat(outputs), labels)"
    yield _spent(ledger, again, Cause("compute.frozen", frozen.name, 0.0, evidence, fix))


def _spent(ledger: Ledger, share: float, cause: Cause) -> Cause:
    """Put in what a cause costs that takes a share of the steps' time, and that at most all of it is won."""
    lost_s, gain = share * int(ledger.step_ns.sum()) / NS_PER_S, 1 / (1 - share)
    return replace(cause, lost_device_s=lost_s, predicted_speedup=gain, interval=(1.0, gain), at_most=True)


def _unused(ledger: Ledger, compute: ComputeFacts) -> Iterator[tuple[Cause, Scale]]:
    """Yield the causes of gradients that no update uses, and the share of useful time that each takes."""
    flops = {call.model: call.flops or 0 for call in compute.calls}
    calls = {row.model: max(use.calls for use in compute.gradient_uses if use.model == row.model)
             for row in compute.gradient_uses}  # fmt: skip
    total = sum(flops.get(model, 0) * count for model, count in calls.items())
    updates = updates_share(ledger)
    for row in compute.gradient_uses:
        call = next((call for call in compute.calls if call.model == row.model), None)
        if call is None or row.unused < max(1, UNUSED * row.calls):
            continue
        weight = flops[row.model] * calls[row.model] / total if total else float(len(calls) == 1)
        is_whole = 2 * row.elements > sum(use.elements for use in compute.gradient_uses if use.model == row.model)
        if row.optimizer >= 0 and not is_whole:
            continue
        spared = _spared(call, row)
        shares = at_most(spared, (1 - updates) * weight * min(1.0, row.unused / max(row.calls, 1)))
        if shares.likely >= LARGE:
            yield _of_unused(call, row), shares


def _spared(call: CallFlops, row: GradientUse) -> Scale:
    """Return which share of a call the unused gradients take: by a rehearsed step, else by operations."""
    timed = call.rehearsed
    scale = REHEARSED[timed.examples >= timed.batch] if timed is not None else SHARE

    def spared(edit: str, by_operations: float) -> Scale:
        if timed is not None and edit in timed.edits:
            ratios = timed.edits[edit]
            return Scale(*(max(0.0, 1 - ratio) * factor for ratio, factor in zip(ratios, scale, strict=True)))
        return at_most(SHARE, by_operations)

    frozen = 1 - call.frozen_flops / call.flops if call.flops and call.frozen_flops is not None else 0.0
    if row.optimizer < 0:
        return spared("frozen", frozen) if call.frozen_elements == row.elements else Scale(0.0, 0.0, 0.0)
    given, without = spared("given", 1 / 3), spared("frozen", 2 / 3)
    of_given = min(1.0, row.given / row.unused)
    return Scale(*(of_given * share + (1 - of_given) * more for share, more in zip(given, without, strict=True)))


def _of_unused(call: CallFlops, row: GradientUse) -> Cause:
    """Return the cause of gradients that no update uses."""
    if row.optimizer < 0:
        evidence = f"backwards compute gradients of {row.elements:,} parameters of {call.name} that no optimizer has"
        fix = "where nothing else reads their gradients, freeze them before training, and the backward ends where "
        fix += "nothing learns (a norm over all gradients, as clip_grad_norm_ takes, then has fewer)"
        edit = "for parameter in backbone.parameters(): parameter.requires_grad_(False)  # what no optimizer has"
        return Cause("compute.unused", call.name, 0.0, evidence, fix, script=edit)
    evidence = f"behind {row.unused} of {row.calls} calls {call.name} ({row.elements:,} parameters) got gradients that "
    evidence += "were cleared before any update: the backward was that of another optimizer's loss"
    if 2 * row.given > row.unused:
        fix = "leave its weights out of the graph in these calls; its inputs get the same gradients"
        edit = "model.requires_grad_(False)  # before these calls, and (True) behind them"
        return Cause("compute.unused", call.name, 0.0, evidence, fix, script=edit)
    fix = "detach what it returns in these calls: nothing before that learns from them"
    return Cause("compute.unused", call.name, 0.0, evidence, fix, script="outputs = model(inputs).detach()")


def _threads(ledger: Ledger, compute: ComputeFacts) -> Iterator[tuple[Cause, Scale]]:
    """Yield the cause of operators that leave cores free, and the share of useful time that more threads win."""
    facts, rate = ledger.facts, _rate(ledger, compute)
    ranks = max(1, ledger.devices // max(1, len(facts.hosts)))
    threads = max(facts.threads.values(), default=0)
    others = facts.host_load.demand if facts.host_load is not None else 0.0
    workers = sum(loader.num_workers or 0 for loader in facts.effective_loaders.values())
    idle = int(((facts.cores or 0) - others) / ranks + 1 / 4) - threads - workers
    if rate is None or rate < LARGE_RATE or not threads or idle < 1:
        return
    times = (threads + idle) / threads
    evidence = f"torch computes with {plural(threads, 'thread')} per rank, and {plural(idle, 'core')} per rank stayed "
    evidence += f"free; its operators are large enough to share ({rate / 1e9:.2g} GFLOP/s per thread)"
    fix = "compute on the cores that are free (torchrun sets OMP_NUM_THREADS=1 for several ranks): sums are rounded in "
    fix += "another order"
    edit = f"torch.set_num_threads({threads + idle})"
    cause = Cause("compute.threads", plural(ranks, "rank"), 0.0, evidence, fix, script=edit)
    yield cause, Scale(*(min(MOST, factor * (1 - 1 / times)) for factor in SCALED))
