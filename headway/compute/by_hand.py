"""Causes inside useful time that only the script can mend: forwards computed twice, attention written by hand.

Both are told from the shapes of a call (`torch_flops.CallCount`), which a child of the recording counted.

    checkpointed      forward  -> backward: forward again, gradients      again / (flops + again) of the operations
    scores            q k -> [queries, keys] -> mask -> softmax -> v      each arrow passes over all scores in memory

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174); Dao et al., FlashAttention
(NeurIPS 2022). What a score costs was measured: see `SCORE_BYTES` and `SCORE_NS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.compute.gains import Scale
from headway.core.units import NS_PER_S, format_bytes, format_fraction
from headway.cost.ceilings import ceilings_of
from headway.ledger.answers.causes import Predictor
from headway.ledger.answers.evidence import span_of
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause
from headway.trace.recording.run_facts import memory_headroom
from headway.trace.rings.compute_facts import CallFlops

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


def causes(ledger: Ledger, predict: Predictor | None = None) -> Iterator[Cause]:
    """Yield what the script may leave out or call by another name, with the device-seconds that it would win.

    `predict` replays edits; without it nothing is predicted.
    """
    compute, useful_s = ledger.facts.compute, ledger.ledger_ns["useful"] / NS_PER_S
    counted = [call for call in (compute.calls if compute else ()) if call.flops]
    if not counted or not useful_s:
        return
    call = max(counted, key=lambda row: row.flops or 0)
    for pair in (_recomputed(ledger, call), _by_hand(ledger, call)):
        if pair is not None and pair[1].likely >= LARGE:
            yield _forecast(*pair, useful_s, predict)


def _recomputed(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
    """Return the cause of forwards that run twice, if memory has room, and the share of useful time that it is."""
    again, useful_ns = call.recomputed_flops, ledger.ledger_ns["useful"]
    outside = 1 - ledger.sub_ns.get("useful.optimizer", 0) / max(useful_ns, 1)
    share = again / max((call.flops or 0) + again, 1) * outside
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
    return Cause("compute.recompute", call.name, 0.0, evidence, fix, script=script), _at_most(SHARE, share)


def _by_hand(ledger: Ledger, call: CallFlops) -> tuple[Cause, Scale] | None:
    """Return the cause of attention that writes its scores to memory, and the share of useful time that it takes."""
    rates = ceilings_of(ledger.facts.device_type or "")
    threads = max(ledger.facts.threads.values(), default=0) or 1
    if rates is None and (ledger.facts.device_type != "cpu" or call.longest < LONG):
        return None
    per_score = SCORE_BYTES if rates else SCORE_NS[2 * call.masked > call.scores]
    unit_s = 1 / rates.bytes_per_s if rates else 1 / NS_PER_S / threads
    scores = call.scores * (span_of(ledger, "forward").count or ledger.steps * ledger.devices)
    share = scores * per_score.likely * unit_s / max(ledger.ledger_ns["useful"] / NS_PER_S, 1e-9)
    evidence = f"{call.name} writes attention out: each forward keeps {call.scores:,} scores in memory, up to "
    evidence += f"{call.longest:,} a row, and passes over them for scale, mask, softmax and products"
    script = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)"
    fix = "one fused call computes it without the scores; its sums are rounded in another order"
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
