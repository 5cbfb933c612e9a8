"""Causes between ranks: communication that nothing hides, collectives of the script's own, and ranks that come last.

Times are device-seconds.

>>> round(by_chance(6, 10, 2), 3)
0.377
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headway.core.rng import binomial
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.ledger.answers.input_causes import LEAST_SAMPLES
from headway.ledger.answers.ledger import Ledger, blamed_s, booked_s, lines_in_words, mean_of, share_of, span_of
from headway.ledger.answers.script_causes import evaluation
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import Cause, SampledLine
from headway.trace.events.vocabulary import BEHIND_BACKWARD, BEHIND_UPDATE
from headway.trace.rings.rank_tables import RankTables

PERSISTENT = 2 / 3
"""A rank that was last at this share of the collectives, or blamed for this share of the waiting, is a straggler."""

SIGNIFICANT = 0.01
"""A rank is named where chance makes it last so often in fewer cases than that."""

MANY_COLLECTIVES, SMALL_COLLECTIVE = 8, 1 << 20
"""Collectives of a rank in a step, and the mean bytes of one, by which gradients are reduced tensor by tensor."""

ACCUMULATED = 1.9
"""Reductions of DDP's in a step from which on gradients that are added up are reduced each time."""

SMALL_VALUES, SMALL_IN_STEP = 1 << 16, 1 << 10
"""Mean bytes of a call up to which it brings together values that no update needs: behind an update, and elsewhere."""

OF_EACH_STEP = 0.5
"""Calls of a line per step from which on it counts as one of each step."""

LEAST_LOSSES = 8
"""Different losses that must be the same on all ranks before their batches are said to be."""

UNEVEN = 10
"""One rank alone evaluates where it does so many times as much of it as all others together."""

MOST_RANKS = 8
"""Ranks named in one piece of evidence; the rest is counted."""

DOING: dict[str, str] = {
    "useful": "computed longer",
    "input": "waited longer for input",
    "eval": "evaluated longer",
    "checkpoint": "saved or loaded state for longer",
    "host": "collected garbage, logged, recorded, or ran code of the script for longer",
    "startup": "compiled or started later",
}
"""Bucket of a rank's largest excess -> what the rank was doing, in words."""


def comm_exposed(ledger: Ledger) -> list[Cause]:
    """Communication that nothing hides, without what `comm_calls` is about."""
    calls = _calls_of_each_step(ledger)
    own = ledger.ledger_ns["comm"] / NS_PER_S - _booked_in(ledger, calls)
    kernels = span_of(ledger, "kernel.comm") + span_of(ledger, "kernel.p2p")
    names = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
    spans = [span_of(ledger, name) for name in names]
    count = sum(span.count for span in spans) - sum(row.count for row in calls)
    size = sum(span.total_bytes for span in spans) - sum(row.num_bytes for row in calls)
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


def comm_calls(ledger: Ledger) -> list[Cause]:
    """Collectives that the script calls in each step for values that no update needs: metrics, objects, barriers.

    Lost is what they take once all ranks are there. Without them a step saves at most what they take in all: the ranks
    meet at the next collective, so some of the waiting for each other may only move there.
    """
    rows = _calls_of_each_step(ledger)
    step_ns, steps = int(ledger.step_ns.sum()), ledger.step_ns.shape[1] * ledger.devices
    most_ns = step_ns - max(1, int(ledger.step_ns[BUCKETS.index("useful")].sum()))
    took_ns = min(sum(row.ns for row in rows), most_ns)
    if not rows or took_ns <= 0:
        return []
    count = sum(row.count for row in rows)
    evidence = f"the script calls {plural(round(count / steps), 'collective')} in each step, "
    evidence += f"{mean_of(took_ns / NS_PER_S, count)} with waiting for other ranks: {', '.join(lines_in_words(rows))}"
    first, script = rows[0], ""
    if first.function.endswith("barrier"):
        fix = "leave the barrier out: the next collective of the step waits for all ranks as it is"
    elif first.gap == BEHIND_BACKWARD:
        fix = "behind a backward of DistributedDataParallel gradients are the same on all ranks: norms of them need no "
        fix += "collective (clip_grad_norm_ does it); stack other values and reduce them in one"
    else:
        fix = "where they only inform, and no update depends on them: call them once, or every 50 steps, and for all "
        fix += "values in one tensor (sum metrics on each rank until then)"
        script = "if step % 50 == 0: ...  # and all values in one tensor"
    if first.gap == BEHIND_UPDATE and script:  # with the calls goes what the script computes for them
        took_ns = min(took_ns + ledger.sub_ns.get("host.script", 0), most_ns)
    lost_s, gain = _booked_in(ledger, rows), step_ns / (step_ns - took_ns)
    found = Cause("comm.calls", first.words, lost_s, evidence, fix, gain, (1.0, gain))
    return [replace(found, at_most=True, script=script, line=first.line)]


def _calls_of_each_step(ledger: Ledger) -> list[SampledLine]:
    """Return the lines that call a small collective in each step; not those that reduce gradients by hand."""
    by_ddp = span_of(ledger, "comm.wait").count > 0
    min_count = OF_EACH_STEP * ledger.step_ns.shape[1] * ledger.devices
    return [
        row
        for row in ledger.collective_lines
        if 0 < min_count <= row.count
        and row.num_bytes <= row.count * (SMALL_VALUES if row.gap == BEHIND_UPDATE else SMALL_IN_STEP)
        and (row.gap or not row.num_bytes)  # a loss may be divided by what is added up in it
        and (by_ddp or row.gap != BEHIND_BACKWARD or not row.num_bytes)
    ]


def _booked_in(ledger: Ledger, rows: Sequence[SampledLine]) -> float:
    """Return the device-seconds of blocking collectives, once all ranks are there, that fall on some lines."""
    whole_ns = max(span_of(ledger, "comm.collective").total_ns, 1)
    return booked_s(ledger, "comm.collective") * min(1.0, sum(row.ns for row in rows) / whole_ns)


def evaluations(ledger: Ledger) -> list[Cause]:
    """Evaluation, told where one rank does all of it and the others wait."""
    by_rank = {rank: row.get("eval", 0) for rank, row in ledger.by_rank_ns.items()}
    waited, causes = blamed_s(ledger, "eval"), evaluation(ledger)
    rank = max(by_rank, key=lambda number: by_rank[number], default=-1)
    alone = len(by_rank) > 1 and by_rank[rank] > UNEVEN * (sum(by_rank.values()) - by_rank[rank])
    if not alone or 2 * waited * NS_PER_S < by_rank[rank]:
        return causes
    fix = f"rank {rank} evaluates alone: let each rank evaluate its share, and add up the sums in one all_reduce"
    script = "DataLoader(..., sampler=DistributedSampler(dataset, shuffle=False))"
    return [replace(cause, fix=fix, script=script) for cause in causes]


def same_batches(ledger: Ledger, tables: Mapping[int, RankTables]) -> list[Cause]:
    """Ranks of one DistributedDataParallel that compute the same losses: they train on the same batches.

    Not told where a loss may be that of all ranks: the script calls collectives between a forward and its backward.
    """
    curves = [dict(table.losses) for table in tables.values()]
    shared = set.intersection(*map(set, curves)) if curves else set[int]()
    steps = ledger.step_ns.shape[1] * ledger.devices
    outside = sum(row.count for row in ledger.collective_lines if row.gap)
    within = span_of(ledger, "comm.collective").count - outside >= OF_EACH_STEP * steps
    of_all = all(len(row.get("ranks", ())) == len(tables) for table in tables.values() for row in table.groups.values())
    alike = all(len({curve[step] for curve in curves}) == 1 for step in shared)
    if not 1 < len(tables) == ledger.devices or not span_of(ledger, "comm.wait").count or within or not of_all:
        return []
    if not alike or len({curves[0][step] for step in shared}) < LEAST_LOSSES:
        return []
    evidence = f"all {len(shared):,} losses that were noted are the same on {plural(len(tables), 'rank')}: they "
    evidence += "train on the same batches, and each epoch has as many steps as one rank alone would need"
    fix = "give each rank a share of the examples: DistributedSampler, with set_epoch(epoch) in each epoch; where "
    fix += "batches are drawn, seed each rank otherwise"
    loaders = [row for row in ledger.facts.effective_loaders.values() if row.sampler and not row.streams]
    line = loaders[0].place if len(loaders) == 1 else ""
    script = "DataLoader(..., sampler=DistributedSampler(dataset))" if loaders else "torch.manual_seed(seed + rank)"
    return [Cause("input.ranks", plural(len(tables), "rank"), 0.0, evidence, fix, script=script, line=line or "")]


def straggler_rank(ledger: Ledger) -> list[Cause]:
    """A rank that the others waited for, with what it was doing; what has a cause of its own is left out."""
    late = ledger.lateness
    rows = {
        rank: {bucket: ns for bucket, ns in row.items() if bucket not in ("checkpoint", "startup", "eval")}
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
    no_core = bucket == "host" and share_of(ledger, "host", "host.cpu_wait") > 1 / 2
    doing = "waited longer for a CPU core" if no_core else DOING[bucket]
    evidence = (
        f"last at {late.times_last.get(rank, 0):,} of {late.num_collectives:,} collectives, by {margin} in the median; "
        f"it {doing} than the others ({100 * row[bucket] / own_ns:.0f} % of the "
        f"{format_seconds(own_ns / NS_PER_S)} that they waited for it)"
    )
    elsewhere = ", or replace it" if len(set(ledger.hosts.values())) > 1 else ""  # ranks of one host share its load
    fix = {
        "useful": f"give rank {rank} batches of the others' size and length; where they are of that, look at what else "
        f"runs on its cores or device (clocks, heat, neighbours){elsewhere}",
        "input": f"compare rank {rank}'s storage and loader workers with the others'",
        "host": f"look at what else runs on rank {rank}'s cores" if no_core else "",
    }.get(bucket) or "do it on all ranks at the same step: collect garbage together, log on every rank alike"
    where = f"rank {rank}" + (f" on {host}" if host else "")
    return Cause("straggler.rank", where, own_ns / NS_PER_S, evidence, fix)
