"""Whether compressed gradients would pay: this host's codecs are measured, the recorded windows replayed with each.

Measured once per run, in a child process, and kept in RUN/codecs.json: neither torch nor the measurement's load is in
the command's process. Nothing is measured without the grant.

>>> CANDIDATES[0]
'half'
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.comm.compression.options import StageChains
from headway.comm.compression.strategy_search import Pricing, search
from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json
from headway.core.machine.child import run_measurement
from headway.core.units import NS_PER_S
from headway.cost.codecs import MIN_BYTES, CodecTimes, partitions
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.ddp import ddp_link as ddp_buckets
from headway.sim.ddp.ddp_edits import FLOAT_BYTES, Compression, GradientOrder, gradients_of, message_bytes
from headway.sim.ddp.ddp_link import CollectiveLink
from headway.sim.ddp.ddp_replay import CODECS_FILE, DdpReplay
from headway.sim.ddp.ddp_thread import CALL, WAIT, Thread
from headway.sim.recorded.program import Program
from headway.sim.whatif import ResolvedEdits

# Which codec each gradient of a recorded job should have: Espresso's search over its tensors and measured stages.
#
# The recorded window says how long the training thread computes before each bucket is ready, and what the link carries;
# the measured codecs say what a rank's second thread needs for each tensor. A gradient's option is raw or a codec:
#
#     raw     link: its bytes
#     codec   thread: encode;  link: to the owners;  thread: sum, encode;  link: to all;  thread: decode
#
# Chains of such stages are scored for many plans at once (`options.StageChains`). That takes tensors one by one, where
# a bucket travels as one: the plan found, and one codec for all, are replayed on the windows as they would run, and the
# best is improved there bucket by bucket.
#
# Source: Wang et al., "Hi-Speed DNN Training with Espresso", EuroSys 2023 (the search); stages and times are this
# host's.

TRAINING, SECOND, LINK = 0, 1, 3
"""Lanes; where both threads of a rank share a core, the second one works on the first lane."""

RAW = ""
"""The option that compresses nothing."""


MOST_BUCKETS = 12
"""Buckets whose codec is tried on the replayed windows; each takes a replay per codec."""


@dataclass(frozen=True, slots=True)
class Table:
    """Codecs by parameter, and what they win."""

    codecs: dict[str, str]
    """Pattern over parameter names -> codec; a parameter that is not listed travels raw."""

    speedup: float
    """Replayed time of the recorded windows without it / with it."""


def best_table(deep: DdpReplay, codecs: Sequence[str]) -> Table:
    """Return the best choice of a codec or none for each gradient of the recorded job.

    Raises `InputError` where the run did not note its gradients' names and order, or a codec was not measured.
    """
    gradients = gradients_of(deep.models)
    names = deep.models[0].parameter_names
    if len(names) != len(gradients.size) or deep.codecs is None:
        raise InputError("the run did not note the names of its parameters. Record it again, with deep windows.")
    plan = search(pricing(deep, gradients, deep.codecs, codecs)).options
    large = iter(plan.tolist())
    chosen = [(RAW, *codecs)[next(large)] if size >= MIN_BYTES else RAW for size in gradients.size]
    starts = [chosen, *([codec] * len(chosen) for codec in codecs)]
    chosen, after_ns = _settled(deep, gradients, starts, codecs)
    patterns = {
        glob.escape(names[at]): codec
        for at, codec, size in zip(deep.models[0].order, chosen, gradients.size, strict=True)
        if codec and size >= MIN_BYTES
    }
    before_ns = deep.makespans_ns(ResolvedEdits()).sum()
    return Table(patterns, float(before_ns / max(after_ns, 1)))


def _settled(
    deep: DdpReplay, gradients: GradientOrder, starts: Sequence[list[str]], codecs: Sequence[str]
) -> tuple[list[str], int]:
    """Return the best of `starts` on the replayed windows, improved bucket by bucket, and its time in ns.

    It is never worse than one of them.
    """
    least, best = min(((_replayed_ns(deep, plan), plan) for plan in starts), key=lambda pair: pair[0])
    for bucket in ddp_buckets.assign(gradients.size, gradients.kind, gradients.limit)[:MOST_BUCKETS]:
        for codec in (RAW, *codecs):
            plan = [codec if at in bucket else own for at, own in enumerate(best)]
            ns = _replayed_ns(deep, plan) if plan != best else least
            if ns < least:
                best, least = plan, ns
    return best, least


def _replayed_ns(deep: DdpReplay, plan: Sequence[str]) -> int:
    return int(deep.compressed_ns(plan).sum())


def pricing(deep: DdpReplay, gradients: GradientOrder, times: CodecTimes, codecs: Sequence[str]) -> Pricing:
    """Return what plans cost: an option of raw and `codecs` for each gradient that is not too small, as it is ready."""
    step, link = deep.steps[0], deep.links[0]
    ranks = len(step.threads)
    lane = TRAINING if 0 < deep.cores < 2 * ranks else SECOND
    buckets = ddp_buckets.assign(gradients.size, gradients.kind, gradients.limit)
    gaps = gaps_ns(step.threads[0], len(buckets))
    sizes, segments, durations = [], [], []
    for bucket, gap in zip(buckets, gaps, strict=True):
        large = [gradients.size[at] for at in bucket if gradients.size[at] >= MIN_BYTES]
        for number, size in enumerate(large):
            share = link.latency_ns / len(large)  # they travel together
            sizes.append(size // FLOAT_BYTES)
            segments.append(0 if number else gap)
            durations.append([[0, round(share) + link.duration_ns(size), 0, 0, 0]])
            durations[-1] += [_chain(size, codec, Compression(codec, times), (ranks, link, share)) for codec in codecs]
    if not sizes:
        raise InputError(f"no gradient has {MIN_BYTES} bytes: there is nothing to choose.")
    chains = StageChains(
        np.array(segments),
        np.broadcast_to(np.array([lane, LINK, lane, LINK, lane]), (len(sizes), len(codecs) + 1, 5)),
        np.array(durations),
        gap_lane=LINK,
    )

    def score(plans: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        ns, gap = chains.score(plans)
        return ns.astype(np.float64), gap

    return Pricing(tuple(sizes), tuple(range(len(codecs) + 1)), score, names=(RAW, *codecs))


def _chain(size: int, codec: str, compression: Compression, on: tuple[int, CollectiveLink, float]) -> list[int]:
    """Return the stages of a gradient of `size` bytes, ns; `on` = ranks, link, and its share of a latency."""
    ranks, link, latency_ns = on
    part = [(stretch, codec) for one in partitions([size // FLOAT_BYTES], ranks) for stretch in one]
    push, answer, pull = compression.stages_ns(part, ranks)
    queue = round(compression.times.collective_s * NS_PER_S)
    travel = round(latency_ns) + queue + link.duration_ns(message_bytes(part, ranks) // 2)
    return [push, travel, answer, travel, pull]


def gaps_ns(thread: Thread, buckets: int) -> list[int]:
    """Return [buckets] the thread's own time before each bucket's call, from the last bucket of the step before.

    The median over the steps of the window. Raises `InputError` where no step has that many buckets.
    """
    work = np.cumsum(np.where(thread.what == WAIT, 0, thread.own_ns))
    calls = (thread.what == CALL) & (thread.backward >= 0)
    found, last = [], 0
    for number in np.unique(thread.backward[calls]):
        at = work[calls & (thread.backward == number)]
        if at.size == buckets:
            found.append(np.diff(at, prepend=last))
        last = int(at[-1])
    if not found:
        raise InputError(f"no step of the window has the {buckets} buckets that DDP's rule gives.")
    return [int(gap) for gap in np.median(found[1:] or found, axis=0)]


NAME, GRANT = "comm.compress", "lossy"

NOT_GRANTED = "compressed gradients change results: grant --allow lossy to have it predicted"
"""Why nothing is measured or predicted without the grant."""

UNKNOWN = "what compressed gradients would win is not known"
"""How the reason begins where the recorded windows cannot tell."""

CANDIDATES = ("half", "int8", "dither:4", "sign", "topk:0.01:bf16")
"""Codecs that are tried, nearest to the plain gradient first. Others are for those who know their model:
`headway whatif compress=NAME` predicts them, a plan file names them."""

MEASURED = (
    *CANDIDATES,
    "bfloat16",
    "natural:4",
    "topk:0.01",
    "topk:0.001:bf16",
    "randomk:0.01",
    "shared-randomk:0.01",
)
"""What is measured where nobody says."""

EQUAL = 0.03
"""Of codecs predicted within this of the fastest, the one nearest to the plain gradient is taken."""

LONGEST_S = 20.0
"""A measurement may take this long."""


def measure(codecs: Sequence[str], path: Path) -> CodecTimes:
    """Measure codecs in a child process, into the file `path`. Raises `InputError` where the child fails."""
    longest_s = LONGEST_S * 3
    run_measurement(
        "headway.comm.compression.torch_measure", [",".join(codecs), str(path)], what="codecs", longest_s=longest_s,
        too_late=f"codecs were not measured within {longest_s:g} s: the host is too busy.",
    )  # fmt: skip
    return read_times(path)


def read_times(path: Path) -> CodecTimes:
    """Read a table of codecs."""
    return CodecTimes.from_json(read_json(path, fix="Measure anew: headway comm bench."))


def propose_compression(program: Program, setup: Setup) -> Proposal | Refusal:
    """Return the codec under which the recorded steps are shortest, or why none is proposed."""
    if GRANT not in setup.limits.allow:
        return Refusal(NAME, "comm", NOT_GRANTED)
    try:
        deep = program.windows()
        if deep.busy:
            raise InputError(f"{deep.busy}.")
        if program.run is None:
            raise InputError("a bare trace does not say which host would encode.")
        path = program.run.path / CODECS_FILE
        times = read_times(path) if path.exists() else None
        if times is None or not set(CANDIDATES) <= set(times.rows):
            times = measure(MEASURED, path)
        deep = replace(deep, codecs=times)
        program.deep[:] = [deep]
        found = {codec: program.predict([f"compress={codec}"]) for codec in CANDIDATES}
    except HeadwayError as cause:
        return Refusal(NAME, "comm", f"{UNKNOWN}: {cause}")
    fastest = min(prediction.step_s for prediction in found.values())
    codec = next(name for name in CANDIDATES if found[name].step_s <= fastest * (1 + EQUAL))
    best = found[codec]
    table = _table(deep, best.speedup)
    tried = ", ".join(f"{name} {prediction.speedup:.2f}x" for name, prediction in found.items())
    speedup, interval = best.speedup, best.interval
    chosen: str | dict[str, str] = codec
    if table is not None:
        share = table.speedup / best.speedup
        speedup, interval = table.speedup, (interval[0] * share, interval[1] * share)
        chosen = table.codecs
        tried += f", a codec for each of {len(table.codecs)} gradients {table.speedup:.2f}x"
    if speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"the link is fast for what this host's cores need to encode: {tried}")
    return Proposal(
        name=NAME,
        room="comm",
        edits=(f"compress={codec}",),
        predicted_speedup=speedup,
        interval=interval,
        applies=True,
        parameters={"codec": chosen, "feedback": True, "two_way": True, "min_bytes": MIN_BYTES},
        cost="a thread per rank that encodes and decodes; two residuals, a copy of the gradients and more",
        risk="gradients are approximated: compare the loss with that of an uncompressed run",
        allow=GRANT,
        conflicts=("comm.bucket",),
        reason=f"Tried: {tried}. {best.note}",
    )


def _table(deep: DdpReplay, speedup: float) -> Table | None:
    """Return the best table of codecs by parameter, where it beats the best codec for all, which wins `speedup`."""
    try:
        table = best_table(deep, CANDIDATES)
    except InputError:  # names, order or buckets are not known: one codec for all is
        return None
    return table if table.codecs and table.speedup > speedup * (1 + EQUAL) else None
