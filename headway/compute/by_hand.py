"""Causes inside useful time that a line mends: checkpoints, attention by hand, precision, layout, batches.

The first two are told from the shapes of a call (`torch_flops.CallCount`), the others from steps of the model with the
line and without (`torch_calls.rehearse`): a child of the recording counted and timed them.

    checkpointed      forward  -> backward: forward again, gradients      again / (flops + again) of the operations
    scores            q k -> [queries, keys] -> mask -> softmax -> v      each arrow passes over all scores in memory
    rehearsed         step with the edit / step without = r               1 - r of the time of forward and backward

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Dao et al., FlashAttention
(NeurIPS 2022). What a score costs was measured: see `SCORE_BYTES` and `SCORE_NS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from headway.compute.gains import Scale
from headway.core.units import NS_PER_S, format_bytes, format_fraction, plural
from headway.cost.specs import ceilings_of
from headway.ledger.answers.causes import Predictor
from headway.ledger.answers.ledger import Ledger, booked_s, span_of
from headway.ledger.answers.script_causes import IN_ONE_CALL, looped_words, python_loops, updates_s
from headway.ledger.cause import Cause
from headway.trace.recording.run_facts import memory_headroom
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, GradientUse

LARGE = 0.05
"""Share of useful time from which on either is worth a word."""

SHARE = Scale(1.2, 1.0, 0.7)
"""Time of recomputed forwards / their share of the operations: what comes of it at best, likely, at least."""

ROOM = 0.8
"""Of the memory that is free, what activations may take."""

SCORE_BYTES = Scale(170.0, 137.0, 70.0)
"""Bytes that attention by hand moves per score, forward and backward, beyond what the fused kernels do: GPT-2 124M in
bfloat16 with a mask, 8 x 1,024 on an H200, took 34 ms more a step (1.2 G scores, 4.8 TB/s)."""

SCORE_NS = {True: Scale(32.0, 26.0, 16.0), False: Scale(16.0, 11.0, 6.0)}
"""Whether scores are masked -> ns per score of one thread of a CPU, the same: heads of 32 and 64, 1,024 keys."""

LONG = 512
"""Keys from which on a CPU's caches do not hold the scores; with fewer, fused attention is hardly faster there."""

MOST = 0.8
"""Of useful time, what either can be believed to take."""

REHEARSED = {True: Scale(1.1, 1.0, 0.7), False: Scale(1.3, 1.0, 0.4)}
"""Whether a rehearsed step had all examples of the batch -> what comes of the time that it won: it ran on one thread,
beside the job, and fewer examples leave more of the time to what a call costs by itself."""

STRAIGHT = "straight"
"""Edit of `Rehearsed` that leaves checkpointing out."""

REPEATS = 4
"""How many times as many examples a rehearsed batch has."""

UPDATES = {"batch": 1 - 1 / REPEATS, "float32": 0.5}
"""Edit -> share of the updates' time that it wins besides, per example."""

INSIDE = ("useful.forward", "useful.backward", "useful.compute")
"""What a model and its loss take, without the updates."""

LARGE_RATE = 4e9
"""Operations per second and thread of a CPU from which on operators compute, and below which calls take the time."""

MANY = 16
"""Calls of one layer in a forward, or of the model for one backward, from which on a loop is one over time steps."""

LONG_FORWARD_S = 0.008
"""A forward and its loss that take less are hundreds of operators: layer after layer, as models are."""

NEARLY_ALL = 0.98
"""Of the steps' time, what loops can be believed to take."""

PADDED = 0.3
"""Share of a batch's positions from which on padding is worth a word: what changes batches changes training."""

SPARSE = 0.1
"""Share of an embedding's rows that a batch looks up, below which gradients of all of them are worth a word."""

SCALED = Scale(1.0, 0.8, 0.4)
"""What more threads win / what as many times more cores would: at best, likely, at least."""

UNUSED, FEWEST = 0.1, 8
"""Share of a model's calls whose gradients nobody uses, and repeated calls, from which on they are told."""

PASSES = 1.5
"""Passes over the examples from which on what was computed in the first may be kept."""

FEW = 0.25
"""Share of useful time that a larger batch wins, per example, from which on it is worth a word: it changes training."""


class ScriptHint(NamedTuple):
    """What is said of a rehearsed edit: its cause, what the script does now, what to do and what that risks, the line
    to copy, and the remedy that does it ('' where only the script can)."""

    cause: str
    what: str
    fix: str
    script: str
    remedy: str


LINES = {
    "float32": ScriptHint(
        "compute.precision", "computes in float64",
        "compute in float32: half the memory, twice the numbers per instruction, 7 digits in place of 16",
        "model.float(); torch.set_default_dtype(torch.float32); inputs = inputs.float()", "",
    ),
    "bfloat16": ScriptHint(
        "compute.precision", "computes in float32 on a processor with units for bfloat16",
        "compute products in bfloat16, losses and updates in float32 as before: 8 bits of mantissa",
        'with torch.autocast("cpu", torch.bfloat16): outputs = model(inputs).float()', "compute.autocast",
    ),
    "channels_last": ScriptHint(
        "compute.layout", "convolves images that lie with their channels first",
        "let images and weights lie with their channels last: sums are rounded in another order",
        "model.to(memory_format=torch.channels_last); images = images.to(memory_format=torch.channels_last)",
        "compute.channels_last",
    ),
    "unchecked": ScriptHint(
        "compute.anomaly", "computes with anomaly detection",
        "leave it out once the fault that it looked for is found: each operator keeps its traceback, and each gradient "
        "is searched for nan", "torch.autograd.set_detect_anomaly(False)", "",
    ),
    "batch": ScriptHint(
        "compute.batch", "has so few examples in a batch that calls take the time, not numbers",
        "more examples in a batch: that changes training, so scale the learning rate with it, and look at the loss",
        "DataLoader(..., batch_size={size})", "",
    ),
}  # fmt: skip
"""Edit of `Rehearsed` -> what is said of it."""


def causes(ledger: Ledger, predict: Predictor | None = None) -> Iterator[Cause]:
    """Yield what the script may leave out or call by another name, with the device-seconds that it would win.

    `predict` replays edits; without it nothing is predicted.
    """
    compute, useful_s = ledger.facts.compute, ledger.ledger_ns["useful"] / NS_PER_S
    if compute is None or not useful_s:
        return
    counted = [call for call in compute.calls if call.flops]
    for rule in (_recomputed, _by_hand) if counted else ():
        pair = rule(ledger, max(counted, key=lambda row: row.flops or 0))
        if pair is not None and pair[1].likely >= LARGE:
            yield _forecast(*pair, useful_s, predict)
    yield from _larger_batch(ledger, compute)
    yield from _loops(ledger, compute)
    yield from _dense_rows(ledger, compute)
    yield from _padding(ledger, compute)
    yield from _repeated(ledger, compute)
    yield from _frozen(ledger, compute)
    for pair in (_threads(ledger, compute), *_unused(ledger, compute)):
        if pair is not None:
            yield _forecast(*pair, useful_s, predict)
    for edit, shares in rehearsed_shares(ledger).items():
        if shares.likely >= (FEW if edit == "batch" else LARGE):
            [call] = (call for call in compute.calls if call.rehearsed is not None)
            yield _forecast(_of_edit(ledger, call, edit), shares, useful_s, predict)


def _larger_batch(ledger: Ledger, compute: ComputeFacts) -> Iterator[Cause]:
    """Yield that a device waits for launches while its memory has room for more examples, which need no more of them.

    With k times the examples the device idles as long as before for k times as many: 1 - 1 / k of that is won.
    """
    peaks = [row for row in ledger.facts.memory.values() if row is not None and row.device_peak_bytes]
    if not peaks or len(compute.models) != 1 or compute.models[0].acts or not compute.models[0].batch_size:
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
        script=_line(ledger, "batch", times * (model.batch_size or 0)),
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
    rows, share = python_loops(ledger, with_layers=again)
    inside_s = booked_s(ledger, *INSIDE)
    forward_s = booked_s(ledger, "useful.forward", "useful.compute") / max(backwards, ledger.steps * ledger.devices, 1)
    if rate is None or rate >= LARGE_RATE or not rows or forward_s < LONG_FORWARD_S:
        return
    count = sum(row.count for row in ledger.loop_lines)
    upper = min(1.0, share + 2 * math.sqrt(share * (1 - share) / count))  # two standard errors of the samples above
    backward_s = booked_s(ledger, "useful.backward")  # at most all of it belongs to what the loops computed
    most_s = upper * (inside_s - backward_s) + backward_s
    part = _of_steps(ledger, most_s)
    evidence = f"{looped_words(ledger, rows, share)}; their operators are small ({rate / 1e9:.2g} GFLOP/s per thread)"
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
    if len(compute.calls) != 1 or compute.calls[0].padded < PADDED:
        return
    [call] = compute.calls
    inside_s = booked_s(ledger, *INSIDE)
    share = _of_steps(ledger, call.padded * inside_s)
    evidence = f"{format_fraction(call.padded, 0)} of the positions of a batch of {call.name} fill short examples up"
    fix = "batch examples of like length (sort within a few batches, shuffle the batches), pad to the longest of each "
    fix += "batch, or pack them (nn.utils.rnn.pack_padded_sequence, nested tensors): batches are others then"
    gain = 1 / (1 - min(share, MOST))
    yield Cause("compute.padding", call.name, call.padded * inside_s, evidence, fix, gain, (1.0, gain), at_most=True)


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


def _updates(ledger: Ledger) -> float:
    """Return the share of useful time that updates take."""
    return ledger.sub_ns.get("useful.optimizer", 0) / max(ledger.ledger_ns["useful"], 1)


def _unused(ledger: Ledger, compute: ComputeFacts) -> Iterator[tuple[Cause, Scale]]:
    """Yield the causes of gradients that no update uses, and the share of useful time that each takes."""
    flops = {call.model: call.flops or 0 for call in compute.calls}
    calls = {row.model: max(use.calls for use in compute.gradient_uses if use.model == row.model)
             for row in compute.gradient_uses}  # fmt: skip
    total = sum(flops.get(model, 0) * count for model, count in calls.items())
    updates = _updates(ledger)
    for row in compute.gradient_uses:
        call = next((call for call in compute.calls if call.model == row.model), None)
        if call is None or row.unused < max(1, UNUSED * row.calls):
            continue
        weight = flops[row.model] * calls[row.model] / total if total else float(len(calls) == 1)
        is_whole = 2 * row.elements > sum(use.elements for use in compute.gradient_uses if use.model == row.model)
        if row.optimizer >= 0 and not is_whole:
            continue
        spared = _spared(call, row)
        shares = _at_most(spared, (1 - updates) * weight * min(1.0, row.unused / max(row.calls, 1)))
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
        return _at_most(SHARE, by_operations)

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


def _threads(ledger: Ledger, compute: ComputeFacts) -> tuple[Cause, Scale] | None:
    """Return the cause of operators that leave cores free, and the share of useful time that more threads win."""
    facts, rate = ledger.facts, _rate(ledger, compute)
    ranks = max(1, ledger.devices // max(1, len(facts.hosts)))
    threads = max(facts.threads.values(), default=0)
    others = facts.host_load.demand if facts.host_load is not None else 0.0
    workers = sum(loader.num_workers or 0 for loader in facts.effective_loaders.values())
    idle = int(((facts.cores or 0) - others) / ranks + 1 / 4) - threads - workers
    if rate is None or rate < LARGE_RATE or not threads or idle < 1:
        return None
    times = (threads + idle) / threads
    evidence = f"torch computes with {plural(threads, 'thread')} per rank, and {plural(idle, 'core')} per rank stayed "
    evidence += f"free; its operators are large enough to share ({rate / 1e9:.2g} GFLOP/s per thread)"
    fix = "compute on the cores that are free (torchrun sets OMP_NUM_THREADS=1 for several ranks): sums are rounded in "
    fix += "another order"
    edit = f"torch.set_num_threads({threads + idle})"
    cause = Cause("compute.threads", plural(ranks, "rank"), 0.0, evidence, fix, script=edit)
    return cause, Scale(*(min(MOST, factor * (1 - 1 / times)) for factor in SCALED))


def rehearsed_shares(ledger: Ledger, edits: Collection[str] = tuple(LINES)) -> dict[str, Scale]:
    """Return edit -> shares of useful time that it wins (at best, likely, at least), of those that won each time."""
    compute = ledger.facts.compute
    counted = [call for call in (compute.calls if compute else ()) if call.rehearsed is not None]
    if compute is None or len(counted) != 1 or counted[0].rehearsed is None or ledger.facts.device_type != "cpu":
        return {}
    timed = counted[0].rehearsed
    scale, updates = REHEARSED[timed.examples >= timed.batch], _updates(ledger)
    shares = {}
    for edit, ratios in timed.edits.items():
        fewer, remedy = UPDATES.get(edit, 0.0), LINES[edit].remedy if edit in LINES else ""
        acts = edit == "batch" and any(model.acts for model in compute.models)
        if edit not in edits or remedy in ledger.facts.in_force or acts or ratios[2] >= 1:
            continue
        won = ((1 - updates) * (1 - ratio) + updates * fewer for ratio in ratios)
        shares[edit] = Scale(*(min(MOST, share * factor) for share, factor in zip(won, scale, strict=True)))
    return shares


def _line(ledger: Ledger, edit: str, num_examples: int) -> str:
    """Return the line to copy; '' for a batch that no DataLoader makes."""
    by_loader = bool(ledger.facts.effective_loaders)
    return LINES[edit].script.format(size=num_examples) if by_loader or edit != "batch" else ""


def _of_edit(ledger: Ledger, call: CallFlops, edit: str) -> Cause:
    """Return the cause that a rehearsed edit takes away."""
    line, timed = LINES[edit], call.rehearsed
    assert timed is not None, "it was rehearsed"
    low, mid, high = timed.edits[edit]
    evidence = f"{call.name} {line.what}: a step of {timed.examples} examples took {mid:.2f} ({low:.2f} to {high:.2f}) "
    evidence += "of its time with the edit" if edit != "batch" else f"per example with {REPEATS} times as many"
    script = _line(ledger, edit, REPEATS * timed.examples)
    return Cause(line.cause, call.name, 0.0, evidence, line.fix, script=script)


def _recomputed(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
    """Return the cause of forwards that run twice, if memory has room, and the share of useful time that it is."""
    again = call.recomputed_flops
    if not call.recomputed_bytes:
        return None
    share = again / max((call.flops or 0) + again, 1) * (1 - _updates(ledger))
    memory = memory_headroom(ledger.facts)
    room = memory.get("host_headroom_bytes" if ledger.facts.device_type == "cpu" else "device_headroom_bytes")
    narrow = call.autocast is not None or call.dtype in ("bfloat16", "float16")
    needed = call.recomputed_bytes // (2 if narrow else 1)
    if room is None or needed > ROOM * room:
        return None
    evidence = f"checkpointing in {call.name} has its backward compute {format_fraction(share, 0)} of the operations a "
    evidence += f"second time; without it activations take up to {format_bytes(needed)}, and {format_bytes(room)} "
    evidence += "of memory stayed free"
    fix = "leave torch.utils.checkpoint out, or checkpoint fewer layers: memory has room"
    script = "model.gradient_checkpointing_disable()  # or layer(x) in place of checkpoint(layer, x)"
    timed, shares, step = rehearsed_shares(ledger, (STRAIGHT,)).get(STRAIGHT), _at_most(SHARE, share), call.rehearsed
    if timed is not None and step is not None:
        evidence += f"; a step of {step.examples} examples took {step.edits[STRAIGHT][1]:.2f} of its time without"
        is_cut = step.examples < step.batch
        likely = shares.likely if is_cut else timed.likely  # operations tell more of many examples than a few do
        shares = Scale(max(timed.fast, likely), likely, min(timed.slow, shares.slow if is_cut else likely))
    return Cause("compute.recompute", call.name, 0.0, evidence, fix, script=script), shares


def _by_hand(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
    """Return the cause of attention that writes its scores to memory, and the share of useful time that it takes."""
    rates = ceilings_of(ledger.facts.device_type or "")
    threads = max(ledger.facts.threads.values(), default=0) or 1
    if rates is None and (ledger.facts.device_type != "cpu" or call.longest < LONG):
        return None
    per_score = SCORE_BYTES if rates else SCORE_NS[2 * call.masked > call.scores]
    unit_s = 1 / rates.bytes_per_s if rates else 1 / NS_PER_S / threads
    models = max(len(ledger.facts.compute.calls), 1) if ledger.facts.compute else 1  # forwards count for all of them
    scores = call.scores * (span_of(ledger, "forward").count / models or ledger.steps * ledger.devices)
    share = scores * per_score.likely * unit_s / max(ledger.ledger_ns["useful"] / NS_PER_S, 1e-9)
    how = "asks nn.MultiheadAttention for weights" if call.attentions else "writes attention out"
    evidence = f"{call.name} {how}: each forward keeps {call.scores:,} scores in memory, up to "
    evidence += f"{call.longest:,} a row, and passes over them for scale, mask, softmax and products"
    script = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)"
    fix = "one fused call computes it without the scores; its sums are rounded in another order"
    if call.attentions:
        fix = (
            "ask nn.MultiheadAttention for no weights: it then takes the fused call, whose sums are rounded in another "
        )
        fix += "order"
        script = "outputs, _ = attention(q, k, v, need_weights=False)"
    cause = Cause("compute.attention", call.name, 0.0, evidence, fix, script=script)
    return cause, _at_most(per_score, share / per_score.likely)


def _at_most(scale: Scale, factor: float) -> Scale:
    """Return the shares of useful time, none above what can be believed."""
    return Scale(*(min(MOST, share * factor) for share in scale))


def _forecast(cause: Cause, shares: Scale, useful_s: float, predict: Predictor | None) -> Cause:
    """Put in what a cause costs, and what a replay with a faster device says of its end."""
    cause = replace(cause, lost_device_s=shares.likely * useful_s)
    if predict is None:
        return cause
    fast, mid, slow = (predict((f"accelerator={1 / (1 - share):.4g}x",)) for share in shares)
    bounds = min(slow.interval[0], mid.interval[0]), max(fast.interval[1], mid.interval[1])
    return replace(cause, predicted_speedup=mid.speedup, interval=bounds)
