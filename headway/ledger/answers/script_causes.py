"""Causes that lie in the script's own loop: code between the steps, headway's work there, and evaluation.

Seconds are device-seconds.
"""

from __future__ import annotations

from dataclasses import replace

from headway.core.units import NS_PER_S, format_fraction, format_seconds, plural
from headway.ledger.answers.evidence import (
    TRY,
    also_waited,
    blamed_s,
    booked_s,
    counted,
    lines_in_words,
    mean_of,
    share_of,
    share_words,
    span_of,
)
from headway.ledger.answers.input_causes import where_of
from headway.ledger.answers.input_hints import LoaderState, hint_of
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.waits import KINDS
from headway.ledger.cause import Cause, SampledLine
from headway.trace.events.loader_facts import unmovable_by_hand

LEAST_SAMPLES = 8
"""Samples below which no line is named: the next one could turn the shares over."""

BUSY = 0.1
"""Cores that others want from which on they are named."""

LARGE = 0.02
"""Share of the device time from which headway's own work is a cause: twice what deep windows may cost by default. Less
waiting for a core is what any host has."""


def _telling(ledger: Ledger) -> tuple[SampledLine, ...]:
    """Return the sampled lines where they are enough, and of enough of the time, to say where it went."""
    lines = ledger.script_lines
    seen_ns, count = sum(row.ns for row in lines), sum(row.count for row in lines)
    enough = count >= LEAST_SAMPLES and 2 * seen_ns >= ledger.sub_ns.get("host.script", 0)
    return lines if enough else ()


def host_script(ledger: Ledger) -> list[Cause]:
    """Code of the script between an update and the next forward: batches made by hand, environments, writers."""
    own, lines = booked_s(ledger, "host.script"), _telling(ledger)
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.script"))
    steps = max(ledger.steps * ledger.devices, 1)
    spent = f"{format_seconds(own)} over all attempts" if ledger.facts.attempt else f"{mean_of(own, steps)} step"
    evidence = f"the script ran code of its own for {spent}, between an update and the next forward"
    if any(row.ns for row in lines):
        evidence += f": {', '.join(lines_in_words(lines))} of {plural(sum(row.count for row in lines), 'sample')}"
    first = lines[0] if lines else None
    where = first.words if first else "training loop"
    if first and first.feeds_forward:
        maker = first.function or first.line
        fix = f"{maker} makes the batch: give it to a DataLoader with workers, or to a thread that runs ahead"
    else:
        fix = "move it to a thread or another process, or do it less often"
    return [Cause("host.script", where, own + waited, evidence + also_waited(waited), f"{fix}{TRY}script=none")]


def host_cpu_wait(ledger: Ledger) -> list[Cause]:
    """Time in which the training threads, or the pools that compute with them, were ready to run and had no core."""
    facts, booked = ledger.facts, booked_s(ledger, "host.cpu_wait")
    if ledger.fraction("host.cpu_wait") < LARGE:
        return []
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.cpu_wait"))
    share = format_fraction(booked * NS_PER_S / max(ledger.total_ns, 1))
    evidence = f"for {share} of the time training was ready to compute and had no core"
    load, ranks = facts.host_load, max(1, ledger.devices // max(1, len(facts.hosts)))
    threads, cores = ranks * max(facts.threads.values(), default=1), facts.cores or 0
    others = load.demand if load is not None else 0.0
    if load is not None and others >= BUSY:
        named = ", ".join(f"{name} {used:.2f}" for name, used in load.other_names)
        evidence += f"; other processes wanted {others:.2f} of {plural(load.cores, 'core')}"
        evidence += f" (cores used: {named})" if named else ""
    fix, edit = "give the job cores of its own: end or move what else runs here", ""
    if others >= BUSY and threads // ranks > 1 and threads + others > cores > 0:
        # The threads of a pool wait for each other at the end of each operator: one without a core holds all of them.
        edit = f"torch.set_num_threads({max(1, int((cores - others) / ranks))})"
        fix += f", or compute on as many threads as cores stay free: {edit}"
    if 0 < cores < threads:
        fair = max(1, cores // ranks)
        evidence += (
            f"; {plural(ranks, 'rank')} with {plural(threads // ranks, 'thread')} each share {plural(cores, 'core')}"
        )
        fix, edit = f"no more threads than cores: OMP_NUM_THREADS={fair}", f"torch.set_num_threads({fair})"
    elif others < BUSY and any(loader.num_workers for loader in facts.effective_loaders.values()):
        fix = "fewer processes and threads of the job than cores: loader workers count as well"
    elif others < BUSY:
        evidence += "; nobody else is known to have computed here"
        fix = "record for longer: headway reads data and times the model again in processes beside the first steps"
    return [
        Cause("host.cpu_wait", "training thread", booked + waited, evidence + also_waited(waited), fix, script=edit)
    ]


def host_recording(ledger: Ledger) -> list[Cause]:
    """Headway's own work on the training thread, where it is much: a short run pays for its windows in full."""
    own, span = booked_s(ledger, "host.recording"), span_of(ledger, "host.recording")
    if ledger.fraction("host.recording") < LARGE:
        return []
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.recording"))
    windows = span_of(ledger, "window").count
    times = f" {plural(span.count, 'time')}" if span.count else ""
    evidence = f"headway stopped training{times} for itself, {mean_of(own, span.count)}"
    evidence += f"; {plural(windows, 'deep window')} opened and closed" if windows else ""
    fix = "record without deep windows (--windows 0), or for longer" if windows else "record for longer"
    fix += f": most of it is done once, or bounded by a share of the time{TRY}op:host.recording=none"
    return [Cause("host.recording", "headway's recorder", own + waited, evidence + also_waited(waited), fix)]


def evaluation(ledger: Ledger) -> list[Cause]:
    """Evaluation of the model: its forwards, its loaders, its metrics."""
    acted = share_of(ledger, "eval", "eval.rollout")
    own, waited = ledger.ledger_ns["eval"] / NS_PER_S * (1 - acted), blamed_s(ledger, "eval", 1 - acted)
    parts = {"forward": "forward passes", "input": "waiting for its loader", "other": "the rest"}
    seconds = {text: booked_s(ledger, f"eval.{part}") for part, text in parts.items()}
    count = 0 if acted else span_of(ledger, "eval").count  # spans of both kinds are counted together
    split = ", ".join(f"{text} {format_seconds(took)}" for text, took in seconds.items() if took)
    mean = f"{mean_of(own, count)}, {format_seconds(own)} in all" if count > 1 else format_seconds(own)
    evidence = f"{counted(count, 'evaluation')} took {mean} ({split})"
    known = ledger.facts.effective_loaders
    waits = {loader: amounts.get("eval.input", 0) for loader, amounts in ledger.loader_ns.items()}
    slowest = max(waits, key=lambda loader: waits[loader], default=None)
    facts = known.get(str(slowest)) if slowest is not None and waits[slowest] else None
    found = Cause("eval", "evaluation", own + waited, evidence + also_waited(waited), "")
    if facts is None or seconds["waiting for its loader"] <= own / 4 or unmovable_by_hand(facts):
        fix = "evaluate less often, on fewer examples, or in a process of its own from a checkpoint"
        return [replace(found, fix=fix)]
    state = LoaderState(workers=facts.num_workers, is_persistent=facts.persistent)
    hint = hint_of("eval", state)
    found = replace(found, where=where_of(facts), fix=hint.fix(state), script=hint.edit(state))
    return [replace(found, line=facts.place, library=facts.library)]


def rollout(ledger: Ledger) -> list[Cause]:
    """A policy that acts in its environment while nothing is learned."""
    acted = booked_s(ledger, "eval.rollout")
    waited = blamed_s(ledger, "eval", share_of(ledger, "eval", "eval.rollout"))
    steps = max(ledger.steps * ledger.devices, 1)
    evidence = f"the policy acted in its environment for {mean_of(acted, steps)} update, without learning"
    fix = "step several environments at once (a vectorised one, or processes), or act in a process of its own"
    return [Cause("rollout", "training loop", acted + waited, evidence + also_waited(waited), fix)] if acted else []


def bubble(ledger: Ledger) -> list[Cause]:
    """Stages of a pipeline that waited for their neighbours, and what of it another job used."""
    filled = ledger.sub_ns.get("bubble.filled", 0)
    own = (ledger.ledger_ns["bubble"] - filled) / NS_PER_S
    spans = [span_of(ledger, name) for name in ("comm.recv", "comm.send")]
    count = sum(span.count for span in spans)
    evidence = f"{count:,} sends and receives waited {mean_of(own, count)} for the stage at the other end"
    kernels = span_of(ledger, "kernel.p2p").count
    if kernels:
        evidence = f"{kernels:,} kernels waited {mean_of(own, kernels)} for the stage at the other end"
    elif not count:  # on a device the host only queues them; windows show a share of their kernels
        evidence = f"kernels waited {format_seconds(own)} in all for the stage at the other end"
    kinds = {kind: ledger.sub_ns.get(f"bubble.{kind}", 0) for kind in KINDS}
    if any(kinds.values()):
        total = sum(ledger.sub_ns.get(f"bubble.{kind}", 0) for kind in (*KINDS, "p2p"))
        said = {kind: share_words(ns, total) for kind, ns in kinds.items()}
        shares = [f"{share} {kind.replace('_', ' and ')}" for kind, share in said.items() if share]
        evidence += f": {', '.join(shares)}" if shares else ""
    if filled:
        of = share_words(filled, ledger.ledger_ns["bubble"])
        evidence += (
            f"; {format_seconds(filled / NS_PER_S)} more, {of} of all, ran chunks of another job: its useful time"
        )
    fix = "more micro-batches per step, stages of equal time, an interleaved or zero-bubble schedule"
    return [Cause("bubble.p2p", plural(ledger.devices, "stage"), own, evidence, fix)]
