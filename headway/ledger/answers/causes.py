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

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.ledger.answers.comm_causes import comm_calls, comm_exposed, evaluations, straggler_rank
from headway.ledger.answers.input_causes import (
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

WARM_STEPS, RECOMPILED = 5, 0.1
"""Steps at the start in which any job compiles; share of the others from which on it compiles again and again."""

FAR_FROM_BOOKED = 0.03
"""Where a replay without a cause wins more or less than was booked by so much of the device time, both are told."""

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


NUMBER_OF_THREADS = re.compile(r"torch\.set_num_threads\((\d+)\)")
"""A line of the script that says on how many threads it computes."""

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
    if "comm.exposed" in total_s:  # nor is there a replay without the rest of communication alone
        total_s["comm.exposed"] += total_s.get("comm.calls", 0.0)
    if "straggler.rank" in total_s:
        total_s["straggler.rank"] += blamed_s(ledger, "eval")  # a cause of its own, which the replay takes away too
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
    edit, load = EDIT_OF_CAUSE.get(cause.cause), ledger.facts.host_load
    threads = NUMBER_OF_THREADS.fullmatch(cause.script) if cause.cause == "host.cpu_wait" else None
    edits = [f"compute_threads={threads[1]}"] if threads else []
    if edit is not None and (cause.cause != "host.cpu_wait" or (load is not None and load.demand >= BUSY)):
        edits.append(edit)  # without others on the host, the job takes its cores from itself
    if not edits:
        return cause
    for edit in edits:
        try:
            forecast = predict((edit,))
        except InputError:  # This run cannot be replayed so.
            continue
        break
    else:  # The booked seconds stand, without a prediction.
        return _booked(cause)
    by_hand = edit not in EDIT_OF_CAUSE.values()
    if by_hand and forecast.speedup < 1:
        return _booked(replace(cause, fix=cause.fix.partition(", or ")[0], script=""))
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
    return replace(found, predicted_speedup=gain, interval=bounds, at_most=not by_hand)


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
    "eval": evaluations,
    "rollout": rollout,
    "host.script": host_script,
    "host.cpu_wait": host_cpu_wait,
    "comm.exposed": comm_exposed,
    "comm.calls": comm_calls,
    "bubble.p2p": bubble,
    "straggler.rank": straggler_rank,
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
