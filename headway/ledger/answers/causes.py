"""What cost the time: the causes of a recorded run, ranked, each with evidence and a fix.

One rule per cause, in the table `RULES`. A rule reads the ledger's sub-lines
and totals; what other ranks waited because of a cause counts as lost to it
too, so causes may overlap. With a predictor the seconds lost are
counterfactual: the recorded run replayed without the cause.

>>> from headway.trace.events.trace import Trace
>>> trace = Trace.from_columns({"rank": [0] * 3, "start_ns": [0, 0, 20], "duration_ns": [100, 100, 30]},
...                            name=[0, 1, 2], names=["process", "step", "host.gc"])
>>> [(cause.cause, cause.lost_device_s) for cause in find_causes(Ledger.of(trace))]
[('host.gc', 3e-08)]
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.core.errors import InputError
from headway.core.rng import binomial
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.ledger.answers.input_causes import (
    LEAST_SAMPLES,
    UNHIDDEN,
    input_fetch,
    input_prep,
    input_start,
    input_transfer,
)
from headway.ledger.answers.ledger import (
    TRY,
    Ledger,
    also_waited,
    blamed_s,
    booked_s,
    counted,
    mean_of,
    share_of,
    span_of,
    the_longest,
)
from headway.ledger.answers.script_causes import (
    BUSY,
    bubble,
    evaluation,
    foreign_lines,
    gradient_lines,
    host_cpu_wait,
    host_launch,
    host_recording,
    host_script,
    input_repeats,
    memory_grows,
    optimizer_loops,
    rollout,
    steps_grow,
)
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import NOT_RESOLVED, Cause, ranked

if TYPE_CHECKING:
    from headway.sim.whatif import Prediction

LEAST_FRACTION = 0.005
"""A cause that lost less of the device time than this is not listed."""

PERSISTENT = 2 / 3
"""A rank that was last at this share of the collectives, or blamed for this share of the waiting, is a straggler."""

SIGNIFICANT = 0.01
"""A rank is named where chance makes it last so often in fewer cases than that."""

WARM_STEPS, RECOMPILED = 5, 0.1
"""Steps at the start in which any job compiles; share of the others from which on it compiles again and again."""

MANY_COLLECTIVES, SMALL_COLLECTIVE = 8, 1 << 20
"""Collectives of a rank in a step, and the mean bytes of one, by which gradients are reduced tensor by tensor."""

ACCUMULATED = 1.9
"""Reductions of DDP's in a step from which on gradients that are added up are reduced each time."""

FAR_FROM_BOOKED = 0.03
"""Where a replay without a cause wins more or less than was booked by so much of the device time, both are told."""

MOST_RANKS = 8
"""Ranks named in one piece of evidence; the rest is counted."""

EDIT_OF_CAUSE: dict[str, str] = {
    "input.fetch": "input.fetch=none",
    "input.prep": "input.prep=none",
    "input.transfer": "input.transfer=none",
    "comm.exposed": "comm=none",
    "straggler.rank": "straggler=none",
    "host.script": "script=none",
    "host.cpu_wait": "other=0",
    "host.gc": "host.gc=none",
    "host.logging": "host.logging=none",
    "host.recording": "op:host.recording=none",
    "checkpoint.stall": "checkpoint=none",
}
"""Cause -> the what-if edit that takes it away; causes left out cannot be replayed away."""

DOING: dict[str, str] = {
    "useful": "computed longer",
    "input": "waited longer for input",
    "eval": "evaluated longer",
    "checkpoint": "saved or loaded state for longer",
    "host": "collected garbage, logged, recorded, or ran code of the script for longer",
    "startup": "compiled or started later",
}
"""Bucket of a rank's largest excess -> what the rank was doing, in words."""


Predictor = Callable[[Sequence[str]], "Prediction"]
"""Replays the run under what-if edits such as ('input.fetch=none',); may raise `InputError` when it cannot."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A remedy that somebody predicted: what to do instead of a rule's general advice."""

    text: str
    """One concrete action; '' leaves the rule's advice."""

    predicted_speedup: float
    """Step-rate ratio after it."""

    interval: tuple[float, float] | None = None
    """Range of the speedup."""

    script: str = ""
    """The same as a line of the user's script; '' leaves the rule's."""

    remedy: str = ""
    """Name of the remedy where headway applies it; '' where the user does."""

    allow: str = ""
    """The consent that it needs; '' where it needs none."""


NUMBER_OF_WORKERS = re.compile(r"num_workers=\d+")
"""Where a text says how many workers a loader takes."""


def find_causes(
    ledger: Ledger,
    *,
    predict: Predictor | None = None,
    fixes: Mapping[str, Fix] | None = None,
    least_fraction: float = LEAST_FRACTION,
    more: Iterable[Cause] = (),
) -> list[Cause]:
    """Return the causes of a ledger, by device-seconds lost.

    Without `predict` the seconds are those booked; with it, those that a replay without the cause wins, and the
    speedup is that replay's: the most that a fix can win. `fixes` (cause -> Fix) puts predicted remedies in the place
    of general advice. `more` are causes that other rooms have found.
    """
    least_s = least_fraction * ledger.total_ns / NS_PER_S
    found = [cause for rule in RULES.values() for cause in rule(ledger) if cause.lost_device_s > 0] + [*more]
    warnings = [*input_repeats(ledger), *memory_grows(ledger)]
    found = [cause for cause in found if cause.lost_device_s >= least_s]
    total_s: dict[str, float] = {}
    for cause in found:
        total_s[cause.cause] = total_s.get(cause.cause, 0.0) + cause.lost_device_s
    # A replay without waits for input is one without those of evaluations too, which are a cause of their own.
    evaluating_s = ledger.sub_ns.get("eval.input", 0) / NS_PER_S
    for name in total_s:
        if name.startswith("input.") and evaluating_s > total_s[name]:
            total_s[name] += evaluating_s
    found = [
        _booked(cause)
        if predict is None
        else _predicted(cause, ledger, predict, cause.lost_device_s / total_s[cause.cause])
        for cause in found
    ]
    return [*ranked(_fixed(cause, (fixes or {}).get(cause.cause)) for cause in found), *warnings]


def _booked(cause: Cause) -> Cause:
    """Leave out what to try in a replay: there is none."""
    return replace(cause, fix=cause.fix.partition(TRY)[0])


def _predicted(cause: Cause, ledger: Ledger, predict: Predictor, part: float) -> Cause:
    """Put the replay without the cause in the place of the booked seconds, where it can be replayed.

    The replay takes the cause away wherever it is; `part` of what that wins is this cause's: one loader of several.
    """
    edit = EDIT_OF_CAUSE.get(cause.cause)
    load = ledger.facts.host_load
    if edit is None or (cause.cause == "host.cpu_wait" and (load is None or load.demand < BUSY)):
        return cause  # without others on the host, the job takes its cores from itself
    try:
        forecast = predict((edit,))
    except InputError:  # This run cannot be replayed so; the booked seconds stand, without a prediction.
        return _booked(cause)
    won_step_s = part * max(0.0, forecast.base_step_s - forecast.step_s)
    won_s = won_step_s * ledger.steps * ledger.devices
    useful_ns = ledger.ledger_ns["useful"]
    won_s = min(won_s, (ledger.total_ns - useful_ns) / NS_PER_S)  # steps that grow are not those that were replayed
    if ledger.sub_ns.get("input.open", 0) and cause.cause.startswith("input."):
        won_s = min(won_s, cause.lost_device_s)  # the replay also takes away what new workers open: another cause's
    evidence = cause.evidence
    if ledger.facts.attempt:  # what the earlier attempts and the first, cold steps lost besides is in the buckets
        evidence += (
            f"; {format_seconds(cause.lost_device_s)} over all attempts: replayed is the steady part of the last"
        )
    elif abs(won_s - cause.lost_device_s) * NS_PER_S > FAR_FROM_BOOKED * ledger.total_ns:
        evidence += f"; {format_seconds(cause.lost_device_s)} booked, {format_seconds(won_s)} of the job won without it"
    gain, bounds = forecast.speedup, forecast.interval
    if part < 1:
        gain, *ends = (1 / (1 - part * (1 - 1 / max(value, 1e-9))) for value in (gain, *bounds))
        bounds = (ends[0], ends[1])
    found = replace(cause, lost_device_s=won_s, evidence=evidence)
    return replace(found, predicted_speedup=gain, interval=bounds, at_most=True)


def _fixed(cause: Cause, fix: Fix | None) -> Cause:
    """Put a predicted remedy in the place of the advice."""
    unhidden = cause.fix.endswith(UNHIDDEN)
    if fix is None or (unhidden and fix.text.startswith(NOT_RESOLVED)):
        return cause
    text = fix.text or _booked(cause).fix
    text += f"; or {cause.fix}" if unhidden and fix.text else ""
    gain, bounds = fix.predicted_speedup, fix.interval
    script = fix.script or cause.script
    if number := NUMBER_OF_WORKERS.search(script):  # the advice names as many as the line to copy
        text = NUMBER_OF_WORKERS.sub(number[0], text)
    said = replace(cause, fix=text, predicted_speedup=gain, interval=bounds, at_most=False, script=script)
    return replace(said, remedy=fix.remedy, allow=fix.allow)


# ---- the rules


def _comm_exposed(ledger: Ledger) -> list[Cause]:
    """Communication that nothing hides."""
    own = ledger.ledger_ns["comm"] / NS_PER_S
    kernels = span_of(ledger, "kernel.comm") + span_of(ledger, "kernel.p2p")
    names = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
    spans = [span_of(ledger, name) for name in names]
    count, size = sum(span.count for span in spans), sum(span.total_bytes for span in spans)
    evidence = f"communication not hidden by compute: {mean_of(own, count)}"
    if count:
        evidence += f" x {count:,}" + (f", for {format_bytes(size / count)} each" if size else "")
    if kernels.count:
        evidence = (
            f"{plural(kernels.count, 'communication kernel')} ran {mean_of(kernels.total_ns / NS_PER_S, kernels.count)}"
            f"; for {format_seconds(own)} in all nothing computed beside them"
        )
    # Only DDP's own wait for its gradients can be cut into other buckets.
    cut = "another DDP bucket size, " if span_of(ledger, "comm.wait").count else ""
    fix = f"overlap more or send less: {cut}gradients or activations in bf16, faster links"
    times = span_of(ledger, "comm.wait").count / max(ledger.steps * ledger.devices, 1)
    one_model = ledger.facts.compute is not None and len(ledger.facts.compute.models) == 1
    script = ""
    if one_model and times >= ACCUMULATED:
        evidence += f"; gradients are reduced in each of {times:.0f} backwards a step"
        fix = "reduce them once a step: model.no_sync() around all of its backwards but the last"
        script = "with model.no_sync(): loss.backward()  # all backwards of a step but the last"
    by_hand = span_of(ledger, "comm.collective")
    between = sum(row.count for row in ledger.gradient_lines) >= LEAST_SAMPLES  # behind the backward, unlike FSDP's
    if between and not times and by_hand.count >= MANY_COLLECTIVES * ledger.steps * ledger.devices > 0:
        evidence += f"; each step makes {by_hand.count / (ledger.steps * ledger.devices):.0f} of them"
        if by_hand.total_bytes < SMALL_COLLECTIVE * by_hand.count:
            fix = "reduce gradients together: DistributedDataParallel does it in buckets, beside the backward; or one "
            fix += "collective of all of them, flattened"
            script = "model = torch.nn.parallel.DistributedDataParallel(model)  # and no all_reduce of the loop's own"
    messages = booked_s(ledger, "comm.p2p")
    on_device = bool(kernels.count) or ledger.facts.device_type != "cpu"
    if on_device and 2 * messages > own:
        if not kernels.count:
            evidence = f"for {format_seconds(own)} in all devices communicated and computed nothing beside it"
        evidence += f"; {format_fraction(messages / own, 0)} of it are sends and receives"
        fix = "send less between stages: activations in bf16, neighbours on the fastest links, fewer stages"
    return [Cause("comm.exposed", plural(ledger.devices, "rank"), own, evidence, fix, script=script)]


def _straggler_rank(ledger: Ledger) -> list[Cause]:
    """A rank that the others waited for, with what it was doing; saves and compilation are causes of their own."""
    late = ledger.lateness
    rows = {
        rank: {bucket: ns for bucket, ns in row.items() if bucket not in ("checkpoint", "startup")}
        for rank, row in late.blamed_ns.items()
    }
    total_ns = sum(sum(row.values()) for row in rows.values())
    found = []
    for rank, row in rows.items():
        own_ns = sum(row.values())
        if own_ns and _persistent(ledger, rank, own_ns, total_ns):
            found.append(_one_straggler(ledger, rank, row))
    rest_ns = total_ns - round(sum(cause.lost_device_s for cause in found) * NS_PER_S)
    if not found and rest_ns > 0:
        waited = format_seconds(rest_ns / NS_PER_S)
        evidence = f"{late.num_collectives:,} collectives waited {waited} in all, each time for another rank"
        evidence += _times_last(late.times_last)
        fix = "even out the work per step: equal batches and lengths, fewer background processes per host"
        found.append(Cause("straggler.rank", "ranks in turn", rest_ns / NS_PER_S, evidence, fix))
    return found


def _times_last(times_last: Mapping[int, int]) -> str:
    """Return which ranks came last how often, the `MOST_RANKS` that did most; '' where ranks came together."""
    often = sorted((-count, rank) for rank, count in times_last.items() if count)
    named = ", ".join(f"rank {rank} {-count:,}x" for count, rank in sorted(often[:MOST_RANKS], key=lambda row: row[1]))
    more = f" and {len(often) - MOST_RANKS} more" if len(often) > MOST_RANKS else ""
    return f": {named}{more}" if often else ""


def _persistent(ledger: Ledger, rank: int, own_ns: int, total_ns: int) -> bool:
    """Return whether one rank is the straggler rather than one of many: it is last too often for chance."""
    late = ledger.lateness
    last, count = late.times_last.get(rank, 0), late.num_collectives
    largest = last >= PERSISTENT * count > 0 or own_ns >= PERSISTENT * total_ns
    return largest and by_chance(last, count, ledger.devices) < SIGNIFICANT


def by_chance(times_last: int, num_collectives: int, num_ranks: int) -> float:
    """Return how likely one of `num_ranks` alike is last so often or more: the sign test of the straggler.

    >>> round(by_chance(6, 10, 2), 3), by_chance(40, 40, 3) < 1e-15
    (0.377, True)
    """
    chances = binomial(num_collectives, 1 / max(num_ranks, 2))
    return min(1.0, math.fsum(itertools.islice(chances, times_last, None)))


def _one_straggler(ledger: Ledger, rank: int, row: Mapping[str, int]) -> Cause:
    """Describe one straggling rank."""
    late, own_ns = ledger.lateness, sum(row.values())
    bucket = max(sorted(row), key=lambda name: row[name])
    host = ledger.hosts.get(rank)
    margin = format_seconds(late.median_margin_ns.get(rank, 0) / NS_PER_S)
    evidence = (
        f"last at {late.times_last.get(rank, 0):,} of {late.num_collectives:,} collectives, by {margin} in the median; "
        f"it {DOING[bucket]} than the others ({100 * row[bucket] / own_ns:.0f} % of the "
        f"{format_seconds(own_ns / NS_PER_S)} that they waited for it)"
    )
    elsewhere = ", or replace it" if len(set(ledger.hosts.values())) > 1 else ""  # ranks of one host share its load
    fix = {
        "useful": f"look at what else runs on rank {rank}'s cores or device (clocks, heat, neighbours){elsewhere}",
        "input": f"compare rank {rank}'s storage and loader workers with the others'",
    }.get(bucket, "do it on all ranks at the same step: collect garbage together, log on every rank alike")
    where = f"rank {rank}" + (f" on {host}" if host else "")
    return Cause("straggler.rank", where, own_ns / NS_PER_S, evidence, fix)


def _host_gc(ledger: Ledger) -> list[Cause]:
    """Garbage collection on the training thread."""
    own, span = booked_s(ledger, "host.gc"), span_of(ledger, "host.gc")
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.gc"))
    evidence = f"{counted(span.count, 'collection')} stopped training{the_longest(span.max_ns)}"
    fix = f"freeze what set-up made and collect on all ranks at once: remedy host.gc{TRY}gc=frozen:100"
    called = span_of(ledger, "host.collect")
    if called.total_ns > span.total_ns / 2:  # no remedy puts these off: the script may wait for what they do
        evidence += f"; the script called gc.collect() for {called.count:,} of them"
        fix = "call gc.collect() less often"
        script = ""
    else:
        script = "gc.freeze(); gc.disable()  # behind the set-up; then gc.collect() every 100 steps, on all ranks"
    return [Cause("host.gc", "training thread", own + waited, evidence + also_waited(waited), fix, script=script)]


def _host_logging(ledger: Ledger) -> list[Cause]:
    """Logging handlers on the training thread."""
    own, span = booked_s(ledger, "host.logging"), span_of(ledger, "host.logging")
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.logging"))
    evidence = f"{counted(span.count, 'log record')} took {mean_of(own, span.count)} on the training thread"
    fix = f"hand log records to a background thread: remedy host.logging{TRY}logging=buffered"
    script = "if step % 50 == 0: logger.info(...)"
    return [Cause("host.logging", "training thread", own + waited, evidence + also_waited(waited), fix, script=script)]


def _checkpoint_stall(ledger: Ledger) -> list[Cause]:
    """Saves that held up training, and the ranks that waited for them."""
    own, waited = ledger.ledger_ns["checkpoint"] / NS_PER_S, blamed_s(ledger, "checkpoint")
    stock, copies = span_of(ledger, "checkpoint.save"), span_of(ledger, "checkpoint.snapshot")
    count = stock.count + copies.count
    evidence = f"{counted(count, 'save')} stopped training for {mean_of(own, count)}"
    parts = {"save": "writing", "persist": "fsync and flush", "commit": "rename"} if stock.count else {}
    parts |= {"snapshot": "copying", "wait": "waiting for a copy or an earlier save"} if copies.count else {}
    took = {text: booked_s(ledger, f"checkpoint.{key}") for key, text in parts.items()}
    shares = [f"{text} {format_seconds(seconds)}" for text, seconds in took.items() if seconds]
    evidence += f" ({', '.join(shares)})" if shares else ""
    evidence += _in_background(ledger) + also_waited(waited)
    fix = f"save less often, or copy to host memory and write in the background{TRY}checkpoint=0.5x"
    if copies.count and not stock.count:
        fix = f"save less often: CheckpointPolicy(budget=) bounds the share of the time{TRY}checkpoint=0.5x"
    return [Cause("checkpoint.stall", "training thread", own + waited, evidence, fix)]


def _in_background(ledger: Ledger) -> str:
    """Say what was done for the saves without holding training up."""
    writes = span_of(ledger, "checkpoint.persist")
    if not writes.count:
        return ""
    seconds = writes.total_ns / NS_PER_S
    return f"; {format_bytes(writes.total_bytes)} were written in the background, {mean_of(seconds, writes.count)}"


def _startup_compile(ledger: Ledger) -> list[Cause]:
    """torch.compile at work, at the start and in steps."""
    own, waited = booked_s(ledger, "startup.compile", "restart.compile"), blamed_s(ledger, "startup")
    span = span_of(ledger, "host.compile")
    times = f" {plural(span.count, 'time')}" if span.count else ""
    evidence = f"torch.compile worked{times}{the_longest(span.max_ns)}"
    fix = "keep the compile cache between runs (TORCHINDUCTOR_CACHE_DIR), mark dynamic shapes to avoid recompilation"
    cached = span_of(ledger, "host.compile.cached")
    if 2 * cached.total_ns > span.total_ns:
        evidence += f"; the compile cache held {format_fraction(cached.count / span.count, 0)} of what it needed"
        fix = "compile fewer and larger graphs: mark dynamic shapes, remove graph breaks (TORCH_LOGS=graph_breaks)"
    compiling = int((ledger.step_ns[BUCKETS.index("startup")][WARM_STEPS:] > 0).sum())
    script = ""
    if compiling >= RECOMPILED * max(ledger.steps, 1) and compiling >= WARM_STEPS:
        evidence += f"; it worked in {compiling:,} of {ledger.steps:,} steps: something that it compiled for changes"
        fix = "compile once: dynamic shapes, or inputs padded to few sizes (TORCH_LOGS=recompiles says what changes)"
        script = "torch.compile(..., dynamic=True)"
    lost_s = own + waited
    return [Cause("startup.compile", "training thread", lost_s, evidence + also_waited(waited), fix, script=script)]


RULES: dict[str, Callable[[Ledger], list[Cause]]] = {
    "input.fetch": input_fetch,
    "input.prep": input_prep,
    "input.transfer": input_transfer,
    "input.start": input_start,
    "eval": evaluation,
    "rollout": rollout,
    "host.script": host_script,
    "host.cpu_wait": host_cpu_wait,
    "comm.exposed": _comm_exposed,
    "bubble.p2p": bubble,
    "straggler.rank": _straggler_rank,
    "host.gc": _host_gc,
    "host.logging": _host_logging,
    "host.recording": host_recording,
    "host.launch": host_launch,
    "checkpoint.stall": _checkpoint_stall,
    "startup.compile": _startup_compile,
    "steps.grow": steps_grow,
    "compute.optimizer": optimizer_loops,
    "compute.gradients": gradient_lines,
    "compute.foreign": foreign_lines,
}
"""Every cause that a recorded run can show. Adding one is adding a line here."""
