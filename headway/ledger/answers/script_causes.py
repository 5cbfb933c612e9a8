"""Causes that lie in the script's own loop: code between the steps, headway's work there, and evaluation.

Seconds are device-seconds.

Causes that grow while a run goes on: steps that take longer and longer, and memory that fills.

Both are told from medians of blocks of the run (`headway.ledger.growth`). Neither has a line of its own in the ledger:
time that steps grew by is in the buckets already. Times are ns.

Causes inside useful time: what a few words in the script would make faster. Times are device-seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.cost.fused import Share, fused_share
from headway.ledger.answers.input_causes import LEAST_SAMPLES, LoaderState, hint_of, seen_in_loads, where_of
from headway.ledger.answers.ledger import (
    TRY,
    Ledger,
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
from headway.ledger.booking.waits import KINDS
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import RECORD_LONGER, Cause, SampledLine
from headway.ledger.growth import BLOCKS, LEAST_STEPS, rising, slowed
from headway.sim.recorded.core_use import SPIN_NS
from headway.trace.events.loader_facts import unmovable_by_hand
from headway.trace.rings.rank_tables import PROFILED, OptimizerFacts

BUSY = 0.1
"""Cores that others want from which on they are named."""

NAMED = 0.05
"""Cores that another process used from which on it is named."""

LARGE = 0.02
"""Share of the device time from which headway's own work is a cause: twice what deep windows may cost by default. Less
waiting for a core is what any host has."""


def _telling(lines: tuple[SampledLine, ...], booked_ns: float) -> tuple[SampledLine, ...]:
    """Return the sampled lines where they are enough, and of enough of the time, to say where it went."""
    seen_ns, count = sum(row.ns for row in lines), sum(row.count for row in lines)
    return lines if count >= LEAST_SAMPLES and 2 * seen_ns >= booked_ns else ()


def host_script(ledger: Ledger) -> list[Cause]:
    """Code of the script between an update and the next forward: batches made by hand, environments, writers."""
    own = booked_s(ledger, "host.script")
    lines = _telling(ledger.script_lines, ledger.sub_ns.get("host.script", 0))
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.script"))
    steps = max(ledger.steps * ledger.devices, 1)
    spent = f"{format_seconds(own)} over all attempts" if ledger.facts.attempt else f"{mean_of(own, steps)} step"
    evidence = f"the script ran code of its own for {spent}, between an update and the next forward"
    if any(row.ns for row in lines):
        evidence += f": {', '.join(lines_in_words(lines))} of {plural(sum(row.count for row in lines), 'sample')}"
    first, compute = lines[0] if lines else None, ledger.facts.compute
    where = first.words if first else "training loop"
    host_places = {PHASES["host"], *(line.words for line in ledger.script_lines[:1])}
    growing = [row for row in steps_grow(ledger) if row.where in host_places and 2 * row.lost_device_s >= own]
    if growing:  # one line, and most of its time is growth: done less often, it would still grow
        fix = growing[0].fix
    elif first and first.feeds_forward:
        maker = first.function or first.line
        fix = f"{maker} makes the batch: give it to a DataLoader with workers, or to a thread that runs ahead"
    elif compute is not None and compute.profiled > PROFILED:
        evidence += f"; a profiler of torch's was on at {format_fraction(compute.profiled, 0)} of the looks"
        fix = "profile a few steps, not all of them: torch.profiler.profile(schedule=torch.profiler.schedule(...))"
    else:
        fix = "move it to a thread or another process, or do it less often"
        acts = compute is not None and any(model.acts for model in compute.models)
        if first and first.loop and not acts:
            evidence += f"; most of the first lay in a Python loop at {first.loop}"
            fix = f"let one call do all passes of the loop at {first.loop} where one can (stack them, broadcast, "
            fix += "torch._foreach functions for parameters); else move it to a thread, or do it less often"
    return [Cause("host.script", where, own + waited, evidence + also_waited(waited), f"{fix}{TRY}script=none")]


def host_cpu_wait(ledger: Ledger) -> list[Cause]:
    """Time in which the training threads, or the pools that compute with them, were ready to run and had no core."""
    facts, booked = ledger.facts, booked_s(ledger, "host.cpu_wait")
    if ledger.fraction("host.cpu_wait") < LARGE:
        return []
    waited = blamed_s(ledger, "host", share_of(ledger, "host", "host.cpu_wait"))
    inside = booked_s(ledger, "input.cpu_wait")
    share = format_fraction((booked + inside) * NS_PER_S / max(ledger.total_ns, 1))
    evidence = f"for {share} of the time training was ready to compute and had no core"
    evidence += f", {format_seconds(inside)} of it while it prepared batches" if inside > LARGE * booked else ""
    load, ranks = facts.host_load, max(1, ledger.devices // max(1, len(facts.hosts)))
    threads, cores = ranks * max(facts.threads.values(), default=1), facts.cores or 0
    others = load.demand if load is not None else 0.0
    if load is not None and others >= BUSY:
        named = ", ".join(f"{name} {used:.2f}" for name, used in load.other_names if used >= NAMED)
        evidence += f"; other processes wanted {others:.2f} of {plural(load.cores, 'core')}"
        evidence += f" (cores used: {named})" if named else ""
    fix, edit = "give the job cores of its own: end or move what else runs here", ""
    if others >= BUSY and threads // ranks > 1 and threads + others > cores > 0:
        # The threads of a pool wait for each other at the end of each operator: one without a core holds all of them.
        edit = f"torch.set_num_threads({max(1, int((cores - others) / ranks))})"
        fix += f", or compute on as many threads as cores stay free: {edit} (sums are rounded in another order)"
    if 0 < cores < threads:
        fair = max(1, cores // ranks)
        evidence += (
            f"; {plural(ranks, 'rank')} with {plural(threads // ranks, 'thread')} each share {plural(cores, 'core')}"
        )
        fix, edit = f"no more threads than cores: OMP_NUM_THREADS={fair}", f"torch.set_num_threads({fair})"
    elif load is None:
        evidence += "; what else ran on the host is not known"
    elif others < BUSY and any(loader.num_workers for loader in facts.effective_loaders.values()):
        fix = (
            "loader workers, training and torch's threads take turns on the cores: one worker less, or fewer threads, "
        )
        fix += "may win or lose: compare runs"
    elif others < BUSY and threads > ranks and _waits_between(ledger):
        evidence += "; nobody else is known to have computed here: torch's threads sleep while a batch is awaited, and "
        evidence += "one that is woken on the core of another waits until that has spun for 12 ms"
        edit = "torch.set_num_threads(1)"
        fix = f"shorter waits for input, or one thread: {edit} (sums are rounded in another order)"
    elif others < BUSY:
        evidence += "; nobody is known to have computed here but headway's own processes beside the first steps"
        fix = f"{RECORD_LONGER}: headway's own processes read data and time the model beside the first steps, once"
    return [
        Cause("host.cpu_wait", "training thread", booked + waited, evidence + also_waited(waited), fix, script=edit)
    ]


def _waits_between(ledger: Ledger) -> bool:
    """Say whether steps wait for input longer than a thread spins, and wait for cores up to the run's end."""
    input_ns, host_ns = (np.asarray(ledger.step_ns)[BUCKETS.index(name)] for name in ("input", "host"))
    return bool(np.median(input_ns) > SPIN_NS and host_ns[len(host_ns) // 2 :].sum() > host_ns.sum() / 5)


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
    fix = f"{RECORD_LONGER}, or without deep windows (--windows 0)" if windows else RECORD_LONGER
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
    graphs = not acted and 2 * span_of(ledger, "eval.graphs").total_ns > seconds["forward passes"] * NS_PER_S
    evidence += ", with gradients enabled" if graphs else ""
    known = ledger.facts.effective_loaders
    waits = {loader: amounts.get("eval.input", 0) for loader, amounts in ledger.loader_ns.items()}
    slowest = max(waits, key=lambda loader: waits[loader], default=None)
    facts = known.get(str(slowest)) if slowest is not None and waits[slowest] else None
    found = Cause("eval", "evaluation", own + waited, evidence + also_waited(waited), "")
    if facts is None or seconds["waiting for its loader"] <= own / 4 or unmovable_by_hand(facts):
        fix = "evaluate less often, on fewer examples, or in a process of its own from a checkpoint"
        if not graphs:
            return [replace(found, fix=fix)]
        fix = f"evaluate under torch.no_grad(): forwards keep what a backward would need. Or {fix}"
        return [replace(found, fix=fix, script="with torch.no_grad():  # around the evaluation")]
    state = LoaderState(workers=facts.num_workers, is_persistent=facts.persistent, is_once=count == 1)
    hint = hint_of("eval", state)
    evidence = found.evidence + seen_in_loads(ledger, slowest if slowest is not None else -1)
    found = replace(found, where=where_of(facts), evidence=evidence, fix=hint.fix(state), script=hint.edit(state))
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


SETTLED = 0.4
"""Share of the training in which memory is filled for good: first batches, the state of optimizers, evaluation."""

LEAST_BYTES, LEAST_SHARE = 64 << 20, 0.05
"""Memory grows where it grew by so much over the rest, and by this share of what it was."""


def steps_grow(ledger: Ledger) -> list[Cause]:
    """Steps that take longer and longer: something that is kept, searched or summed grows with them."""
    wall = np.asarray(ledger.step_wall_ns, np.float64)
    calm = np.ones(len(wall), bool) if ledger.undisturbed is None else np.array(ledger.undisturbed)
    calm[:1] = False  # it compiles, and fills caches
    if (ends := slowed(wall[calm])) is None:
        return []
    buckets = np.asarray(ledger.step_ns, np.float64)[:, calm]
    eighth = max(1, buckets.shape[1] // BLOCKS)
    more = np.median(buckets[:, -eighth:], axis=1) - np.median(buckets[:, :eighth], axis=1)
    bucket = BUCKETS[int(more.argmax())]
    # Code that takes longer and longer also waits longer for a core, where others want it too.
    waited_ns = ledger.sub_ns.get("host.cpu_wait", 0)
    by_host = ledger.sub_ns.get("host.script", 0) > (ledger.ledger_ns["host"] - waited_ns) / 2
    if bucket == "host" and not by_host:
        return []  # other processes, or collections: causes of their own
    lost_s = float(np.maximum(wall - ends[0], 0).sum()) / NS_PER_S * ledger.devices
    first, last = (format_seconds(end / NS_PER_S) for end in ends)
    share = format_fraction(more.max() / max(more[more > 0].sum(), 1.0), 0)
    where = ledger.script_lines[0].words if bucket == "host" and ledger.script_lines else PHASES.get(bucket, bucket)
    evidence = f"a step took {first} in the first eighth of the run and {last} in the last one, rising all the way; "
    evidence += f"{share} of the growth is {PHASES.get(bucket, bucket)}"
    fix = (
        "what is kept from step to step there grows with the run: bound it, sum it as it comes, or reset it each epoch"
    )
    return [Cause("steps.grow", where, lost_s, evidence, fix)]


PHASES = {
    "useful": "forward, backward and update",
    "host": "the script's own code between steps",
    "input": "waiting for input",
    "checkpoint": "saving",
    "eval": "evaluation",
    "comm": "communication",
    "straggler": "waiting for other ranks",
}
"""Bucket -> what of a step it is, in words."""


def memory_grows(ledger: Ledger) -> list[Cause]:
    """Memory of the host that fills: by the ranks, or by their loader workers."""
    series, steps = ledger.facts.host_series, int(ledger.steps)
    if series is None or not series.rank_bytes or steps < LEAST_STEPS or len(series.end_s) < 2 * BLOCKS:
        return []
    last = len(series.end_s) - 2  # at the end processes go
    trained_s = min(float(np.sum(ledger.step_wall_ns)) / NS_PER_S, series.end_s[last])
    settled = int(np.searchsorted(series.end_s, series.end_s[last] - (1 - SETTLED) * trained_s))
    loaders, passes = ledger.facts.effective_loaders, span_of(ledger, "input.iter").count / max(ledger.devices, 1)
    # Workers that start anew in each pass keep nothing from one to the next.
    stay = passes <= len(loaders) or any(row.persistent for row in loaders.values())
    causes = []
    for who, size in (("the training process", series.rank_bytes), ("loader workers", series.worker_bytes * stay)):
        behind = [value for value in size[settled:last] if value]  # before they start, workers have none
        of_workers = who == "loader workers"  # read so rarely that a few readings must do; they load no libraries late
        ends = rising(behind, 2, 1.0) if of_workers else rising(behind, BLOCKS // 2)
        if len(behind) < BLOCKS or ends is None:
            continue
        grown = ends[1] - ends[0]
        if grown < max(LEAST_BYTES, LEAST_SHARE * ends[0]):
            continue
        # The medians of the first and last quarter lie three quarters of the time apart.
        seconds = 0.75 * (series.end_s[last - 1] - series.end_s[settled])
        step_s = float(np.mean(ledger.step_wall_ns)) / NS_PER_S
        per_step = grown / max(seconds, 1e-9) * step_s
        evidence = f"{who} grew from {format_bytes(ends[0])} to {format_bytes(ends[1])} behind the start"
        evidence += f": {format_bytes(1000 * per_step)} per 1,000 steps"
        available = ledger.facts.memory_available_bytes
        evidence += f"; full after about {available / per_step:,.0f} steps" if available else ""
        causes.append(Cause("memory.grow", who, 0.0, evidence, FIXES[who]))
    return causes


FIXES = {
    "the training process": "something is kept from step to step: sums and lists of losses and outputs keep their "
    "graphs unless they are detached (loss.item(), .detach())",
    "loader workers": "each worker copies the pages of objects that it reads (reference counts are written): keep "
    "examples in one array or tensor in place of lists of objects",
}
"""Who grows -> what to do."""


def input_repeats(ledger: Ledger) -> list[Cause]:
    """Streams that each worker yields whole: every example is trained on as often as there are workers."""
    causes = []
    for facts in ledger.facts.effective_loaders.values():
        if facts.repeats:
            count = facts.num_workers or 2
            evidence = f"its {count} workers begin with the same batches: each example comes {count} times"
            fix = "let each worker yield its share: ask torch.utils.data.get_worker_info() in __iter__"
            causes.append(Cause("input.repeats", where_of(facts), 0.0, evidence, fix, script=SHARE, line=facts.place))
    return causes


SHARE = "itertools.islice(examples, info.id, None, info.num_workers)  # info = torch.utils.data.get_worker_info()"
"""The edit of a stream: in its __iter__."""


LARGE_UPDATE = 0.05
"""Share of the steps' time from which on the form of an update is worth a word: start-up may be long."""


def updates_s(ledger: Ledger) -> float:
    """Return the device-seconds of the updates alone, without what the script does between a backward and one."""
    return min(booked_s(ledger, "useful.optimizer"), span_of(ledger, "optimizer.step").total_ns / NS_PER_S)


def optimizer_loops(ledger: Ledger) -> list[Cause]:
    """Updates that loop over tensors on a CPU, several operators for each, where one fused kernel does the same."""
    compute = ledger.facts.compute
    own_s = updates_s(ledger)
    fraction = own_s * NS_PER_S / max(int(ledger.step_ns.sum()), 1)
    in_force = "compute.fused_optimizer" in ledger.facts.in_force
    if compute is None or in_force or len(compute.optimizers) != 1 or fraction < LARGE_UPDATE:
        return []
    [optimizer] = compute.optimizers
    share = fused_share_of(optimizer)
    if isinstance(share, str):
        return []
    evidence = f"{optimizer.name} takes {format_fraction(fraction)} of the steps' time: on a CPU torch loops over its "
    evidence += f"{optimizer.num_tensors:,} tensors, several operators for each; fused, it takes {share.low:.2f} to "
    evidence += f"{share.high:.2f} of that"
    edit = f"torch.optim.{optimizer.name}(..., fused=True)"
    return [Cause("compute.optimizer", optimizer.name, own_s * (1 - share.mid), evidence, edit, script=edit)]


def gradient_lines(ledger: Ledger) -> list[Cause]:
    """Code of the script between a backward and the update, on a CPU: loops over gradients, one tensor at a time."""
    between_ns = ledger.sub_ns.get("useful.optimizer", 0) - span_of(ledger, "optimizer.step").total_ns
    lines = _telling(ledger.gradient_lines, between_ns)
    fraction = between_ns / max(int(ledger.step_ns.sum()), 1)
    clips = bool(lines) and lines[0].function.startswith("clip_grad")  # torch's own, one call as it is
    # Gradients that a script reduces itself are communication, with a fix of its own.
    reduces = span_of(ledger, "comm.collective").count >= 2 * ledger.steps * ledger.devices > 0
    if fraction < LARGE_UPDATE or not lines or clips or reduces or ledger.facts.device_type != "cpu":
        return []
    per_step = mean_of(between_ns / NS_PER_S, max(ledger.steps * ledger.devices, 1))
    evidence = f"between a backward and the update the script ran code of its own for {per_step} step: "
    evidence += f"{', '.join(lines_in_words(lines))} of {plural(sum(row.count for row in lines), 'sample')}"
    fix = "loop over fewer tensors, or over all in one call (torch.nn.utils.clip_grad_norm_, torch._foreach_mul_), and "
    fix += "read values (.item()) once a step, or every 50 steps"
    return [Cause("compute.gradients", lines[0].words, between_ns / NS_PER_S, evidence, fix)]


def foreign_lines(ledger: Ledger) -> list[Cause]:
    """Lines of the script that call libraries without torch in forwards, losses and hooks: metrics and statistics."""
    lines = [row for row in ledger.loop_lines if row.library]
    count = sum(row.count for row in lines)
    called_ns = min(sum(row.ns for row in lines), ledger.ledger_ns["useful"])
    fraction = called_ns / max(int(ledger.step_ns.sum()), 1)
    if count < LEAST_SAMPLES or fraction < LARGE_UPDATE or ledger.facts.device_type != "cpu":
        return []
    libraries = ", ".join(dict.fromkeys(row.library for row in lines))
    evidence = f"in forwards, losses and backwards the script was in {libraries} for {format_fraction(fraction)} of "
    evidence += f"the steps' time: {', '.join(lines_in_words(lines))} of {plural(count, 'sample')}"
    fix = "do it in every 50th step, once an epoch, or with torch"
    return [Cause("compute.foreign", lines[0].words, called_ns / NS_PER_S, evidence, fix)]


IN_LOOP = 0.5
"""Share of the samples of forwards and losses that loops are worth a word from."""

IN_ONE_CALL = (
    "let one call do all passes of the loop: stack them, or broadcast; nn.LSTM or nn.GRU in place of a loop over cells"
)


def python_loops(
    ledger: Ledger,
    counts: Callable[[SampledLine], bool] = lambda _: True,
    *,
    with_layers: bool = False,
    share_from: float = IN_LOOP,
) -> tuple[list[SampledLine], float]:
    """Return the lines of Python loops in forwards and losses that count, and their share of the samples.

    None where the share is below `share_from`, or where samples are few.

    Loops over layers are left alone: those that call layers count where the same one is called again and again.
    """
    lines = ledger.loop_lines
    rows = [row for row in lines if row.line and not row.library and (with_layers or not row.calls_layer)]
    rows = [row for row in rows if counts(row)]
    share = sum(row.ns for row in rows) / max(sum(row.ns for row in lines), 1)
    return (rows, share) if share >= share_from and sum(row.count for row in rows) >= LEAST_SAMPLES else ([], 0.0)


def looped_words(ledger: Ledger, rows: list[SampledLine], share: float) -> str:
    """Say how much of forwards and losses lies in Python loops, and in which lines."""
    of = f"{format_fraction(share, 0)} of the samples of forwards and losses lie in Python loops of the script"
    return f"{of}: {', '.join(lines_in_words(rows, ledger.loop_lines))}"


LARGE_WAIT = 0.02
"""Share of the device time that ending the waits must win to be named."""


def host_launch(ledger: Ledger) -> list[Cause]:
    """Devices that waited for the host to launch the next kernel, and the lines at which it waited for them before.

    A host that waits for W of the time and launches in the rest of it has a device that idles for I. Without the waits
    a step takes as long as the longer of launching, 1 - W, and computing, 1 - I: what is won is the lesser of W and I.
    """
    idle_s = booked_s(ledger, "host.launch", "host.copy")
    idle = format_fraction(idle_s * NS_PER_S / max(ledger.total_ns, 1))
    kernels, lines = span_of(ledger, "kernel.compute"), ledger.wait_lines
    many = sum(row.count for row in lines) >= LEAST_SAMPLES
    waited_ns = sum(row.ns for row in lines) if many else 0
    won_s = min(waited_ns / NS_PER_S, idle_s)
    causes = list[Cause]()
    if won_s and won_s * NS_PER_S >= LARGE_WAIT * ledger.total_ns:
        evidence = f"the host waited for the device for {format_fraction(waited_ns / ledger.total_ns)} of the time "
        evidence += f"({', '.join(lines_in_words(lines))}) and launched nothing; the device idled {idle} of the time "
        evidence += "for the next kernel"
        fix = "read values less often, or all at the end of an epoch: until then they stay on the device"
        edit = "total += loss.detach()  # and total.item() every 50 steps"
        causes.append(Cause("compute.sync", lines[0].words, won_s, evidence, fix, script=edit))
    evidence = f"devices idled {idle} of the time because no kernel had been launched"
    if kernels.count:
        evidence += f"; {plural(kernels.count, 'kernel')} took {mean_of(kernels.total_ns / NS_PER_S, kernels.count)}"
    fix = "launch less from Python: torch.compile or CUDA graphs, larger batches"
    if span_of(ledger, "graph.replay").count:
        fix = "do less in Python between replays of the graph: prepare its inputs while it runs"
    fix += "" if causes else ", no .item() inside the step"
    loops, share = python_loops(ledger)
    if loops:
        evidence, fix = f"{evidence}; {looped_words(ledger, loops, share)}", IN_ONE_CALL
    return [*causes, Cause("host.launch", plural(ledger.devices, "device"), idle_s - won_s, evidence, fix)]


def fused_share_of(optimizer: OptimizerFacts) -> Share | str:
    """Return what the fused form takes of an optimizer's time, or why it is not proposed.

    >>> fused_share_of(OptimizerFacts("LBFGS", device_type="cpu"))
    'LBFGS has no fused form that was measured to be faster'
    """
    if optimizer.is_fused is not None or optimizer.is_foreach is not None:
        return f"the script says itself which form of {optimizer.name} it wants"
    if optimizer.device_type != "cpu":
        return "on a device torch updates all tensors in a few kernels as it is"
    if not optimizer.is_plain:
        return f"{optimizer.name} updates sparse or complex numbers, or tensors that lie unlike their gradients"
    size = optimizer.num_elements / max(optimizer.num_tensors, 1)
    share = fused_share(optimizer.name, has_momentum=optimizer.has_momentum, mean_elements=size)
    return share or f"{optimizer.name} has no fused form that was measured to be faster"
