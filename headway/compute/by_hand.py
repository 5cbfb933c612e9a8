"""Causes inside useful time that a line mends: checkpoints, attention by hand, precision, layout, batches.

The first two are told from the shapes of a call (`torch_flops.CallCount`), the others from steps of the model with the
line and without (`torch_rehearsal.rehearse`): a child of the recording counted and timed them.

    checkpointed      forward  -> backward: forward again, gradients      again / (flops + again) of the operations
    scores            q k -> [queries, keys] -> mask -> softmax -> v      each arrow passes over all scores in memory
    rehearsed         step with the edit / step without = r               1 - r of the time of forward and backward

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Dao et al., FlashAttention
(NeurIPS 2022). What a score costs was measured: see `SCORE_BYTES` and `SCORE_NS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from headway.compute.gains import Scale
from headway.core.units import NS_PER_S, format_bytes, format_fraction
from headway.cost.specs import ceilings_of
from headway.ledger.answers.ledger import Ledger, span_of
from headway.ledger.cause import Cause
from headway.trace.recording.run_facts import memory_headroom
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts

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


def of_calls(ledger: Ledger, compute: ComputeFacts) -> Iterator[tuple[Cause, Scale]]:
    """Yield the causes that a call's shapes or a rehearsed step tell, and the share of useful time that each takes."""
    counted = [call for call in compute.calls if call.flops]
    for rule in (_recomputed, _attention) if counted else ():
        pair = rule(ledger, max(counted, key=lambda row: row.flops or 0))
        if pair is not None and pair[1].likely >= LARGE:
            yield pair
    for edit, shares in rehearsed_shares(ledger).items():
        if shares.likely >= (FEW if edit == "batch" else LARGE):
            [call] = (call for call in compute.calls if call.rehearsed is not None)
            yield _of_edit(ledger, call, edit), shares


def updates_share(ledger: Ledger) -> float:
    """Return the share of useful time that updates take."""
    return ledger.sub_ns.get("useful.optimizer", 0) / max(ledger.ledger_ns["useful"], 1)


def rehearsed_shares(ledger: Ledger, edits: Collection[str] = tuple(LINES)) -> dict[str, Scale]:
    """Return edit -> shares of useful time that it wins (at best, likely, at least), of those that won each time."""
    compute = ledger.facts.compute
    counted = [call for call in (compute.calls if compute else ()) if call.rehearsed is not None]
    if compute is None or len(counted) != 1 or counted[0].rehearsed is None or ledger.facts.device_type != "cpu":
        return {}
    timed = counted[0].rehearsed
    scale, updates = REHEARSED[timed.examples >= timed.batch], updates_share(ledger)
    shares = {}
    for edit, ratios in timed.edits.items():
        fewer, remedy = UPDATES.get(edit, 0.0), LINES[edit].remedy if edit in LINES else ""
        settled = edit == "batch" and not compute.has_larger_batches
        if edit not in edits or remedy in ledger.facts.in_force or settled or ratios[2] >= 1:
            continue
        won = ((1 - updates) * (1 - ratio) + updates * fewer for ratio in ratios)
        shares[edit] = Scale(*(min(MOST, share * factor) for share, factor in zip(won, scale, strict=True)))
    return shares


def line_to_copy(ledger: Ledger, edit: str, num_examples: int) -> str:
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
    script = line_to_copy(ledger, edit, REPEATS * timed.examples)
    return Cause(line.cause, call.name, 0.0, evidence, line.fix, script=script)


def _recomputed(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
    """Return the cause of forwards that run twice, if memory has room, and the share of useful time that it is."""
    again = call.recomputed_flops
    if not call.recomputed_bytes:
        return None
    share = again / max((call.flops or 0) + again, 1) * (1 - updates_share(ledger))
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
    timed, shares, step = rehearsed_shares(ledger, (STRAIGHT,)).get(STRAIGHT), at_most(SHARE, share), call.rehearsed
    if timed is not None and step is not None:
        evidence += f"; a step of {step.examples} examples took {step.edits[STRAIGHT][1]:.2f} of its time without"
        is_cut = step.examples < step.batch
        likely = shares.likely if is_cut else timed.likely  # operations tell more of many examples than a few do
        shares = Scale(max(timed.fast, likely), likely, min(timed.slow, shares.slow if is_cut else likely))
    return Cause("compute.recompute", call.name, 0.0, evidence, fix, script=script), shares


def _attention(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
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
    return cause, at_most(per_score, share / per_score.likely)


def at_most(scale: Scale, factor: float) -> Scale:
    """Return the shares of useful time, none above what can be believed."""
    return Scale(*(min(MOST, share * factor) for share in scale))
